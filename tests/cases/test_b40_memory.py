"""B40, and memory over many saves: flat in the trainer and in its upload process.

``DCP_FSSPEC_TEST_NUM_SAVES=200`` makes as many saves as the promise is given for.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.jobs import BACKGROUND, MODES, Job, children, finalized, num_saves, raised
from support.tensors import random_tensor

_STATE_BYTES = 16 << 20


def _figures(process: psutil.Process) -> dict[str, int]:
    with process.oneshot():
        return {
            "private": process.memory_full_info().uss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }


def _all_figures(job: Job) -> dict[str, int]:
    gc.collect()
    figures = _figures(psutil.Process())
    if job.checkpointer._async_mode == "async_with_pinned_mem":
        figures |= {f"worker's {key}": value for key, value in _figures(job.worker).items()}
    figures["shared memory"] = _shared_bytes()
    return figures


def _shared_bytes() -> int:
    """Return how much memory of ours is in files without a disk: ``/dev/shm``, ``memfd``."""
    sizes: dict[int, int] = {}
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        try:
            if os.readlink(path).startswith(("/memfd:", "/dev/shm")):
                sizes[os.stat(path).st_ino] = os.stat(path).st_size
        except OSError:
            continue  # the one that lists
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", MODES)
def test_b40_memory_descriptors_and_threads_are_flat_over_many_saves(mode: str, tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    state = {f"x{number}": random_tensor(_STATE_BYTES // 32, seed=number) for number in range(8)}
    saves = num_saves(12)
    with finalized(Job(str(tmp_path / "run"), async_mode=mode, state=state, overwrite=True)) as job:
        measured = []
        for iteration in range(saves):
            job.save(iteration % 4)
            if iteration in (5, saves - 1):
                job.checkpointer.wait()
                measured.append(_all_figures(job))
        first, figures = measured
        print(mode, saves, first, figures)
        for key, value in figures.items():
            slack = _STATE_BYTES // 2 if "private" in key else 4
            assert value <= first[key] + slack, (key, first, figures)
        assert figures["shared memory"] <= _STATE_BYTES * 1.03 + 65536
    assert _shared_bytes() == 0
    assert children() == []
    assert set(os.listdir("/dev/shm")) - shm == set()
    uploader: Any = job.checkpointer._uploader
    assert mode == "disabled" or uploader._staging.stager.arena.bytes.numel() == 0


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b40_no_copy_outlives_its_save_not_even_a_failed_one(mode: str, tmp_path: Path) -> None:
    with finalized(Job(str(tmp_path / "run"), async_mode=mode)) as job:
        job.save(1)
        job.checkpointer.wait()
        (tmp_path / "run" / "iter_000000003").write_text("in the way")
        for iteration in (2, 3):
            once = random_tensor(100_000)
            job.box.state = {"x": once}
            dead = weakref.ref(once)
            staging: Any = job.checkpointer._uploader._staging  # type: ignore[attr-defined]
            staged = []
            stage = staging.stager.stage

            def spying(snapshot: Any, stage: Any = stage, staged: list[Any] = staged) -> Any:
                copy = stage(snapshot)
                staged.append(weakref.ref(copy.components["box"].values["x"]))
                return copy

            staging.stager.stage = spying
            job.save(iteration)
            error = raised(job.checkpointer.wait)
            assert (error is not None) == (iteration == 3), error
            del error
            staging.stager.stage = stage
            job.box.state = {}
            del once
            gc.collect()
            assert dead() is None
            assert [one() for one in staged] == [None]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp_fsspec_upload")]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b40_memory_that_is_missing_is_an_error_in_save_and_the_next_one_works(mode: str, tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    state: dict[str, Any] = {"x": torch.ones(1000)}
    with finalized(Job(str(tmp_path / "run"), async_mode=mode, state=state)) as job:
        if mode == "async_with_pinned_mem":
            job.box.state = {"x": torch.ones(1 << 20)}
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        else:
            job.box.state = {"x": torch.ones(1).expand(1 << 45)}
        try:
            with pytest.raises(OSError, match="no host memory for a snapshot"):
                job.save(1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        job.box.state = state
        assert job.checkpointer.poll()
        job.save(1)
        job.checkpointer.wait()
        assert job.ears.told("success") == [1]
