"""Hooks: their arguments, their order, and success only after the commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from dcp_fsspec import CheckpointCallback, DistributedCheckpointer, KeepLatest, ResumeConfig, StorageWriteError
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from support.stores import MemoryStore
from support.tensors import assert_bits_equal
from support.training import Raising, Recorder, assert_same, make_job

SAVED = ["on_save_checkpoint_start", "on_save_checkpoint", "on_save_checkpoint_success", "on_save_checkpoint_end"]
FAILED = ["on_save_checkpoint_start", "on_save_checkpoint", "on_save_checkpoint_failure", "on_save_checkpoint_end"]


def test_hooks_of_a_save(tmp_path: Path) -> None:
    job, recorder = make_job(), Recorder()
    DistributedCheckpointer(str(tmp_path), callbacks=[recorder]).save(*job.parts, 5)
    assert recorder.hooks == SAVED
    arguments = dict(recorder.calls)
    assert arguments["on_save_checkpoint_start"] == {"args": (job.model, 5)}
    states = arguments["on_save_checkpoint"]["state_dict"]
    assert list(states) == ["model", "optim", "scheduler", "trainer"]
    for name, (state, url) in states.items():
        assert url == f"{tmp_path}/iter_000000005/{name}"
        assert isinstance(state, dict)
    success = arguments["on_save_checkpoint_success"]
    assert set(success) == {"args", "iteration", "elapsed_time"}
    assert success["iteration"] == 5
    assert success["elapsed_time"] > 0
    assert arguments["on_save_checkpoint_end"] == {"args": (), "model": None, "iteration": 5}


def test_h43_hooks_of_a_load_hear_of_every_component(tmp_path: Path) -> None:
    job, recorder = make_job(), Recorder()
    checkpointer = DistributedCheckpointer(str(tmp_path), callbacks=[recorder])
    assert checkpointer.load(*job.parts) == 0
    nothing = {"args": (job.model,), "iteration": 0, "checkpoint_path": None}
    assert recorder.calls == [
        ("on_load_checkpoint_start", {"args": (job.model,)}),
        ("on_load_checkpoint_end", nothing),
    ]
    checkpointer.save(*job.parts, 5)
    recorder.calls.clear()
    assert checkpointer.load(*job.parts) == 5
    assert recorder.hooks == ["on_load_checkpoint_start", "on_load_checkpoint", "on_load_checkpoint_end"]
    end = {"args": (job.model,), "iteration": 5, "checkpoint_path": f"{tmp_path}/iter_000000005"}
    assert recorder.calls[-1][1] == end
    restored = recorder.calls[1][1]["state_dict"]
    assert list(restored) == ["model", "optim", "scheduler", "trainer"]
    assert_bits_equal(dict(restored["model"]), dict(job.model.state_dict()))
    assert restored["trainer"]["iteration"] == 5


def test_a_callback_may_change_what_is_saved(tmp_path: Path) -> None:
    class Changing(CheckpointCallback):
        def on_save_checkpoint(self, model: Any, state_dict: dict[str, tuple[dict[str, Any], str]]) -> None:
            state_dict["model"][0]["net.0.weight"] = torch.full((3, 4), 7.0)
            state_dict["trainer"][0]["note"] = "added"

    job = make_job()
    before = job.state()
    DistributedCheckpointer(str(tmp_path), callbacks=[Changing()]).save(*job.parts, 5)
    assert_same(job, before)
    fresh = make_job(1)
    recorder = Recorder()
    DistributedCheckpointer(str(tmp_path), callbacks=[recorder]).load(*fresh.parts)
    assert_bits_equal(fresh.model.state_dict()["net.0.weight"], torch.full((3, 4), 7.0))
    assert dict(recorder.calls)["on_load_checkpoint"]["state_dict"]["trainer"]["note"] == "added"


@pytest.mark.parametrize(
    "path", ["*/optim/*.distcp", "*/trainer/.metadata", "*/commit.json", "*/latest_checkpoint.txt"]
)
def test_h21_success_is_told_after_the_commit_alone_and_failure_by_its_own_hook(path: str) -> None:
    store, recorder, job = MemoryStore(), Recorder(), make_job()
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    checkpointer = DistributedCheckpointer(store.below("job"), filesystem=faulty, callbacks=[recorder])
    faulty.inject("pipe_file", Fail(PermissionError("not today")), path=path, times=None)
    with pytest.raises(StorageWriteError) as caught:
        checkpointer.save(*job.parts, 5)
    assert recorder.hooks == FAILED
    failure = dict(recorder.calls)["on_save_checkpoint_failure"]
    assert failure == {"args": (), "iteration": 5, "error": caught.value}
    faulty.heal()
    recorder.calls.clear()
    checkpointer.save(*job.parts, 6)
    assert recorder.hooks == SAVED
    assert checkpointer.catalog.pointee() == 6
    store.close()


def test_the_order_of_callbacks_is_kept_and_one_without_a_hook_is_passed_over(tmp_path: Path) -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_save_checkpoint_end(self, model: Any, iteration: int) -> None:
            order.append(self.name)

    callbacks = [Named("a"), object(), Named("b")]
    DistributedCheckpointer(str(tmp_path), callbacks=callbacks).save(*make_job().parts, 1)
    assert order == ["a", "b"]


def test_success_means_that_the_pointer_is_there(tmp_path: Path) -> None:
    seen: list[str] = []

    class Looking(CheckpointCallback):
        def on_save_checkpoint_success(self, iteration: int, elapsed_time: float) -> None:
            seen.append((tmp_path / "latest_checkpoint.txt").read_text())

    checkpointer = DistributedCheckpointer(str(tmp_path), callbacks=[Looking()], retention=KeepLatest(1))
    for iteration in (1, 2):
        checkpointer.save(*make_job().parts, iteration)
    checkpointer.finalize()
    checkpointer.finalize()
    assert seen == ["iter_000000001\n", "iter_000000002\n"]
    assert checkpointer.catalog.iterations() == [2]


def test_h35_all_components_left_out_is_no_crash(tmp_path: Path) -> None:
    job = make_job(num_steps=1)
    DistributedCheckpointer(str(tmp_path / "source")).save(*job.parts, 1)
    fresh, recorder = make_job(1), Recorder()
    before = fresh.state()
    config = ResumeConfig(str(tmp_path / "source"), keys_not_to_resume=["model"])
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=config, callbacks=[recorder])
    assert checkpointer.load(*fresh.parts) == 0
    assert_same(fresh, before)
    assert recorder.hooks[-1] == "on_load_checkpoint_end"


def test_a_callback_that_fails_before_the_write_leaves_nothing(tmp_path: Path) -> None:
    callbacks = [Raising("on_save_checkpoint", KeyError("mine"))]
    with pytest.raises(KeyError, match="mine"):
        DistributedCheckpointer(str(tmp_path), callbacks=callbacks).save(*make_job().parts, 1)
    assert list(tmp_path.iterdir()) == []
