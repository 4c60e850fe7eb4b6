"""The training job of `examples/train.py` is killed again and again, and ends as if nothing had happened.

Each kill is one SIGKILL for both ranks, at a moment that is told by what the job has done so far: lines in its log,
files in its checkpoints folder. Then the next run of the same command must start at the right iteration.

By default, only some of the moments, and only saves that the training waits for; `DCP_FSSPEC_KILLS=20` for all, which
is what `nox -s crash_training` does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.forks import Forks
from support.tensors import assert_bits_equal

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_KILLS = int(os.environ.get("DCP_FSSPEC_KILLS", "5"))
SAVE_EVERY = 2
COMPONENTS = ("model", "optim", "scheduler", "trainer", "rng", "data")


@dataclass(frozen=True)
class Folder:
    """A job's checkpoints folder, seen without the package."""

    path: Path

    def names(self, iteration: int, since_ns: int = 0) -> set[str]:
        """Return the files of an iteration, those written since then."""
        root = self.path / f"iter_{iteration:09d}"
        found = set()
        # Unlike Path.rglob, this bears folders and files that go away meanwhile.
        for folder, _, names in os.walk(root):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime_ns >= since_ns:
                        found.add(str(path.relative_to(root)))
        return found

    def pointee(self) -> int | None:
        try:
            return int((self.path / "latest_checkpoint.txt").read_text().removeprefix("iter_"))
        except FileNotFoundError:
            return None

    def committed(self) -> list[int]:
        return sorted(int(found.parent.name.removeprefix("iter_")) for found in self.path.glob("iter_*/commit.json"))

    def resumes_from(self) -> int:
        """Return where the next run must start: at the pointee, without a pointer at the newest committed."""
        pointee = self.pointee()
        if pointee is not None:
            assert pointee in self.committed(), "the pointer names what is not committed"
            return pointee
        return max(self.committed(), default=0)

    def state(self, iteration: int, scratch: Path) -> dict[str, Any]:
        """Return a whole iteration, as stock PyTorch reads it."""
        state = {}
        for name in COMPONENTS:
            dcp_to_torch_save(self.path / f"iter_{iteration:09d}" / name, scratch / "whole.pt")
            state[name] = torch.load(scratch / "whole.pt", weights_only=False)
        return state


class Log:
    """The losses that a run has logged so far."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def losses(self) -> dict[int, float]:
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        assert len({entry["iteration"] for entry in entries}) == len(entries), "an iteration was trained twice"
        return {entry["iteration"]: entry["loss"] for entry in entries}


@dataclass(frozen=True)
class Run:
    """A run that is under way.

    Attributes:
        folder: where it saves.
        log: its own.
        start: the iteration that it went on from.
        began_ns: when it was started. Older files are what a killed run has left.
    """

    folder: Folder
    log: Log
    start: int
    began_ns: int

    @property
    def next_save(self) -> int:
        return (self.start // SAVE_EVERY + 1) * SAVE_EVERY


Moment = Callable[[Run], bool]
"""Tells whether it has come."""


def logged(num_iterations: int) -> Moment:
    return lambda run: run.start + num_iterations in run.log.losses()


def appears(beginning: str) -> Moment:
    """A file of the run's first save whose name begins so."""
    return lambda run: any(name.startswith(beginning) for name in run.folder.names(run.next_save, run.began_ns))


def pointed(run: Run) -> bool:
    return run.folder.pointee() == run.next_save


def half_pruned(run: Run) -> bool:
    """The retention has begun to remove an iteration, and has perhaps not ended."""
    return pointed(run) and any(
        "commit.json" not in run.folder.names(int(found.name.removeprefix("iter_")))
        for found in run.folder.path.glob("iter_*")
    )


MOMENTS: dict[str, Moment] = {
    "first save: optimizer begun": appears("optim/__0_"),
    "first save: committed": appears("commit.json"),
    "model half written": appears("model/__1_"),
    "an iteration later": logged(1),
    "committed, pointer not yet": appears("commit.json"),
    "pointer moved, pruning begun": half_pruned,
    "all but the commit record": appears("data/.metadata"),
    # From here on when asked for.
    "process group just made": lambda run: True,
    "save begun": logged(2),
    "model complete": appears("model/.metadata"),
    "optimizer half written": appears("optim/__1_"),
    "optimizer complete": appears("optim/.metadata"),
    "scheduler complete": appears("scheduler/.metadata"),
    "trainer complete": appears("trainer/.metadata"),
    "random numbers half written": appears("rng/__1_"),
    "random numbers complete": appears("rng/.metadata"),
    "pointer moved": pointed,
    "one iteration after a save": logged(3),
    "in the second save of a run": logged(4),
    "in the third save of a run": logged(6),
}
ITERATIONS = SAVE_EVERY * (min(NUM_KILLS, len(MOMENTS)) + 5)
"""Enough for each run to get a save further: what uploads in a process beside a rank may outlive it."""


@pytest.mark.parametrize("async_mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_job_that_is_killed_again_and_again_has_the_losses_of_one_that_never_was(
    async_mode: str, tmp_path: Path
) -> None:
    if async_mode != "disabled" and len(MOMENTS) > NUM_KILLS:
        pytest.skip("only with all moments: `nox -s crash_training`, which sets DCP_FSSPEC_KILLS=20")
    baseline, folder = Folder(tmp_path / "baseline"), Folder(tmp_path / "killed")
    with Forks() as forks:
        wanted = Log(tmp_path / "baseline.log")
        job = forks.start(2, *_arguments(baseline, wanted, save_every=ITERATIONS))
        assert job.wait(deadline_seconds=300) == [0, 0], job.output.read_text()
        assert sorted(wanted.losses()) == list(range(1, ITERATIONS + 1))

        logs = (Log(tmp_path / f"run{number}.log") for number in itertools.count())
        # Every other time, what uploads beside the ranks is killed with them; otherwise it ends its upload.
        for (name, moment), log, workers in zip(_moments(), logs, itertools.cycle([True, False]), strict=False):
            run = Run(folder, log, folder.resumes_from(), time.time_ns())
            job = forks.start(2, *_arguments(folder, log, async_mode))
            came = job.wait_until(functools.partial(moment, run))
            job.kill(workers=workers and async_mode == "async_with_pinned_mem")
            assert came, f"the job ended before: {name}\n{job.output.read_text()}"
            _check_run(log, run.start, wanted)
            print(f"{name}: began after {run.start}, killed with {_on_storage(run)}")

        start = folder.resumes_from()
        log = next(logs)
        job = forks.start(2, *_arguments(folder, log, async_mode))
        assert job.wait(deadline_seconds=300) == [0, 0], job.output.read_text()
    _check_run(log, start, wanted)
    assert max(log.losses()) == ITERATIONS
    assert folder.pointee() == folder.committed()[-1] == ITERATIONS
    assert_bits_equal(folder.state(ITERATIONS, tmp_path), baseline.state(ITERATIONS, tmp_path))


def _moments() -> Iterator[tuple[str, Moment]]:
    chosen = itertools.cycle(MOMENTS.items())
    return itertools.islice(chosen, NUM_KILLS)


def _arguments(folder: Folder, log: Log, async_mode: str = "disabled", save_every: int = SAVE_EVERY) -> list[str]:
    return [
        *("--async-mode", async_mode),
        *("--url", str(folder.path), "--log", str(log.path), "--keep", "2"),
        *("--iterations", str(ITERATIONS), "--save-every", str(save_every)),
    ]


def _check_run(log: Log, start: int, wanted: Log) -> None:
    """The run began after `start`, and has, number by number, the losses of the run that was not killed."""
    losses = log.losses()
    assert list(losses) == list(range(start + 1, start + 1 + len(losses)))
    reference = wanted.losses()
    assert losses == {iteration: reference[iteration] for iteration in losses}


def _on_storage(run: Run) -> str:
    num_files = len(run.folder.names(run.next_save, run.began_ns))
    return f"committed {run.folder.committed()}, pointer {run.folder.pointee()}, {num_files} files of {run.next_save}"
