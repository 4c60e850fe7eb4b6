"""B08, B09, B10: what is stored is the state at the call; the next save waits; no failure hides."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import AsyncSaveError, StorageWriteError
from dcp_fsspec.checkpointer.plan_cache import PlanCache
from dcp_fsspec.checkpointer.snapshot import SnapshotPlanner, flat_state
from support.faultproxy import Delay, FaultProxy
from support.jobs import BACKGROUND, Job, finalized, kill
from support.stores import S3Store


def _state() -> dict[str, Any]:
    ones = torch.ones(1_000_000)
    return {
        "ones": ones,
        "shared": torch.ones(1000).share_memory_(),
        "of_a_graph": torch.ones(1000, requires_grad=True) * 1,
        "number": 1,
        "list": [1, {"deep": [1]}],
        "dict": {"a": 1, "b": [1, 1]},
    }


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b08_what_changes_after_the_call_is_not_stored(mode: str, tmp_path: Path) -> None:
    with finalized(Job(str(tmp_path / "run"), async_mode=mode, state=_state())) as job:
        job.save(1)
        state = job.box.state
        with torch.no_grad():
            for key in ("ones", "shared", "of_a_graph"):
                state[key].mul_(5)
        state["number"] = 5
        state["list"][1]["deep"].append(5)
        state["dict"]["b"][0] = 5
        job.checkpointer.wait()
        fresh = Job(str(tmp_path / "run"))
        fresh.load()
    got = fresh.box.state
    assert all(bool((got[key] == 1).all()) for key in ("ones", "shared", "of_a_graph"))
    wanted = _state()
    assert {key: got[key] for key in ("number", "list", "dict")} == {
        key: wanted[key] for key in ("number", "list", "dict")
    }


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b09_saves_without_a_pause_are_each_of_one_piece(mode: str, proxied_store: S3Store, proxy: FaultProxy) -> None:
    """The next save waits until the memory is free; there is one block of it."""
    proxy.add(Delay(0.2), operation="PUT", key="*.distcp", times=None)
    arguments = {"storage_options": proxied_store.storage_options}
    state = {f"x{number}": torch.zeros(5000) for number in range(3)}
    with finalized(Job(proxied_store.url, async_mode=mode, state=state, **arguments)) as job:
        for iteration in (1, 2, 3):
            for one in state.values():
                one.fill_(iteration)
            job.save(iteration)
            for one in state.values():
                one.fill_(-1)
        uploader: Any = job.checkpointer._uploader
        assert uploader._staging.stager.arena.generation == 1
        job.checkpointer.wait()
        for iteration in (1, 2, 3):
            fresh = Job(proxied_store.url, **arguments)
            assert fresh.load(iteration) == iteration
            assert all(bool((one == iteration).all()) for one in fresh.box.state.values())


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b10_a_failure_in_the_background_is_told_and_the_next_save_works(mode: str, tmp_path: Path) -> None:
    with finalized(Job("/proc/nope/run", async_mode=mode)) as job:
        job.save(1)
        with pytest.raises(AsyncSaveError, match=r"iteration 1 .*/proc/nope/run"):
            job.checkpointer.wait()
        job.save(2)
        with pytest.raises(AsyncSaveError, match=r"iteration 2 .*/proc/nope/run"):
            job.save(3)
        assert job.ears.told("failure") == [1, 2]
        assert job.ears.told("success") == []
    with finalized(Job(str(tmp_path / "run"), async_mode=mode)) as job:
        job.save(1)
        job.checkpointer.wait()
        if mode == "async_with_pinned_mem":
            kill(job.worker.pid)
        # In the way of the iteration's folder: the one store error that needs no fault.
        (tmp_path / "run" / "iter_000000002").write_text("in the way")
        job.save(2)
        with pytest.raises(AsyncSaveError, match="iteration 2"):
            job.checkpointer.wait()
        assert (tmp_path / "run" / "latest_checkpoint.txt").read_text() == "iter_000000001\n"
        job.save(3)
    assert job.ears.told("success") == [1, 3]
    assert job.ears.told("failure") == [2]
    assert job.ears.threads == {threading.main_thread().name}


def test_b10_ranks_whose_group_was_destroyed_do_not_save_each_by_itself() -> None:
    """Torch then takes each rank for a job of its own, and what the first one writes for the whole."""
    planner = SnapshotPlanner(flat_state({"x": torch.ones(3)}, "box"), PlanCache(), num_ranks=2)
    planner.set_up_planner({}, is_coordinator=True)
    plan = planner.create_local_plan()
    with pytest.raises(StorageWriteError, match="only 1 of 2 ranks"):
        planner.create_global_plan([plan])
    assert planner.create_global_plan([plan, plan])
