"""The training job of `examples/train.py` is told to end, by a real signal to one of its ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from support.forks import Forks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENDLESS = "1000000"


def _iterations(log: Path) -> list[int]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]


def test_a_signal_to_one_rank_lets_all_finish_the_same_iteration_save_it_and_end_well(tmp_path: Path) -> None:
    folder, start = tmp_path / "checkpoints", 0
    with Forks() as forks:
        for rank, number in ((1, signal.SIGTERM), (0, signal.SIGUSR1)):
            log = tmp_path / f"{number.name}.log"
            arguments = ("--url", str(folder), "--log", str(log), "--iterations", ENDLESS, "--save-every", ENDLESS)
            job = forks.start(2, *arguments)
            assert job.wait_until(lambda log=log: len(_iterations(log)) >= 3)
            os.kill(job.ranks[rank], number)
            assert job.wait() == [0, 0], job.output.read_text()

            iterations = _iterations(log)
            assert iterations == list(range(start + 1, start + 1 + len(iterations)))
            start = iterations[-1]
            assert (folder / "latest_checkpoint.txt").read_text() == f"iter_{start:09d}\n"
            record = json.loads((folder / f"iter_{start:09d}" / "commit.json").read_text())
            assert (record["iteration"], record["world_size"]) == (start, 2)
