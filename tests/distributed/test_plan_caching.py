"""Planners that keep plans from one save to the next, as torchtitan's do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import Shard

from dcp_fsspec import DistributedCheckpointer, FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.tensors import assert_bits_equal, random_tensor
from support.training import assert_same, make_job
from support.worlds import Layout, assert_holds, laid_out

pytestmark = pytest.mark.distributed

SHARD_BYTES = 64 << 10
ROWS = Layout([0, 1], (Shard(0),))


def _forget_plans() -> None:
    """Drop what planners keep on their class, for the whole process."""
    for name in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, name).clear()
    SavePlanner._cached_metadata.clear()


def _full(version: int) -> dict[str, torch.Tensor]:
    return {"large": random_tensor(700, 101, seed=version), "small": random_tensor(5, 3, seed=version + 100)}


def _state(version: int) -> dict[str, Any]:
    """Return sharded, replicated and plain values that all differ from version to version."""
    return {
        "sharded": laid_out(_full(version), ROWS),
        "plain": random_tensor(400, 99, seed=version + 200),
        "iteration": version,
    }


def _assert_loads(url: str, version: int) -> None:
    state = _state(version + 1000)
    dcp.load(state, storage_reader=FsspecStorageReader(url, verify="full"))
    assert_holds(state["sharded"], _full(version), f"{url}, version {version}")
    assert_bits_equal({name: state[name] for name in ("plain", "iteration")}, _plain(version))


def _plain(version: int) -> Mapping[str, Any]:
    return {"plain": random_tensor(400, 99, seed=version + 200), "iteration": version}


def _save(state: dict[str, Any], writer: FsspecStorageWriter, url: str | None = None) -> None:
    dcp.save(state, checkpoint_id=url, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))


def _snapshot(url: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(url).iterdir()}


def _assert_untouched_where_it_still_stands(url: str, before: Mapping[str, bytes]) -> None:
    """Shard files are never written twice under one name: a reader of the old checkpoint would see a mix."""
    for name, content in _snapshot(url).items():
        if name.endswith(".distcp"):
            assert before.get(name, content) == content, f"{url}/{name} was overwritten in place"


def _save_with_a_new_writer_each(rank: int, root: str) -> None:
    _forget_plans()
    for version, name in enumerate(["a", "b", "c", "a", "a", "b"]):
        url = f"{root}/{name}"
        dist.barrier()
        before = _snapshot(url) if Path(url).exists() else {}
        _save(_state(version), FsspecStorageWriter(url, shard_bytes=SHARD_BYTES))
        _assert_loads(url, version)
        _assert_untouched_where_it_still_stands(url, before)
    _assert_loads(f"{root}/c", 2)


def _save_with_the_same_writer(rank: int, root: str) -> None:
    _forget_plans()
    writer = FsspecStorageWriter(f"{root}/a", shard_bytes=SHARD_BYTES)
    for version, name in enumerate(["a", "a", "b", "b", "a", "c"]):
        url = f"{root}/{name}"
        dist.barrier()
        before = _snapshot(url) if Path(url).exists() else {}
        _save(_state(version), writer, url)
        _assert_loads(url, version)
        _assert_untouched_where_it_still_stands(url, before)
    _assert_loads(f"{root}/b", 3)
    _assert_loads(f"{root}/a", 4)


def _save_with_the_same_writer_and_no_url(rank: int, root: str) -> None:
    _forget_plans()
    writer = FsspecStorageWriter(f"{root}/a", shard_bytes=SHARD_BYTES)
    for version in range(3):
        dist.barrier()
        before = _snapshot(f"{root}/a") if version else {}
        _save(_state(version), writer)
        _assert_loads(f"{root}/a", version)
        _assert_untouched_where_it_still_stands(f"{root}/a", before)


def _save_states_that_change(rank: int, root: str) -> None:
    """Change the state on one rank only, then on all: the planner sends what changed and keeps the rest."""
    _forget_plans()
    for version, url in enumerate([f"{root}/a", f"{root}/b", f"{root}/b", f"{root}/c"]):
        state = _state(version)
        if rank == 1 and version == 1:
            state["only_here"] = random_tensor(300, 88, seed=300)
        if version == 2:
            state["more"] = random_tensor(300, 88, seed=301)
        _save(state, FsspecStorageWriter(url, shard_bytes=SHARD_BYTES))
        _assert_loads(url, version)
        if version == 1:
            extra = {"only_here": torch.zeros(300, 88)}
            dcp.load(extra, storage_reader=FsspecStorageReader(url))
            assert_bits_equal(extra, {"only_here": random_tensor(300, 88, seed=300)})
        if version == 2:
            extra = {"more": torch.zeros(300, 88)}
            dcp.load(extra, storage_reader=FsspecStorageReader(url))
            assert_bits_equal(extra, {"more": random_tensor(300, 88, seed=301)})


def _save_components_in_turn(rank: int, root: str) -> None:
    """Save two states of different keys in turn, as a trainer saves model and optimizer: one cache serves both."""
    _forget_plans()
    for version in range(3):
        model, optim = _state(version), {"optim": laid_out(_full(version + 50), ROWS), "lr": 0.1 * version}
        _save(model, FsspecStorageWriter(f"{root}/{version % 2}/model", shard_bytes=SHARD_BYTES))
        _save(optim, FsspecStorageWriter(f"{root}/{version % 2}/optim", shard_bytes=SHARD_BYTES))
        _assert_loads(f"{root}/{version % 2}/model", version)
        loaded: dict[str, Any] = {"optim": laid_out(_full(version + 60), ROWS), "lr": -1.0}
        dcp.load(loaded, storage_reader=FsspecStorageReader(f"{root}/{version % 2}/optim"))
        assert_holds(loaded["optim"], _full(version + 50), f"optim {version}")
        assert loaded["lr"] == 0.1 * version


def _save_after_a_failed_one(rank: int, root: str) -> bool:
    """Let rank 1 fail between two good saves."""
    _forget_plans()
    url = f"{root}/a"
    _save(_state(0), FsspecStorageWriter(url, shard_bytes=SHARD_BYTES))
    writer = FsspecStorageWriter(url, shard_bytes=SHARD_BYTES)
    planner = _FailsOn1(enable_plan_caching=True)
    failed = False
    try:
        dcp.save(_state(1), storage_writer=writer, planner=planner)
    except dcp.CheckpointException:
        failed = True
    _assert_loads(url, 0)
    _save(_state(2), writer)
    _assert_loads(url, 2)
    _save(_state(3), FsspecStorageWriter(url, shard_bytes=SHARD_BYTES))
    _assert_loads(url, 3)
    return failed


class _FailsOn1(DefaultSavePlanner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cached_plans_key = DefaultSavePlanner.__name__

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no data on rank 1")
        return super().resolve_data(write_item)


@pytest.mark.parametrize(
    "save_all",
    [
        _save_with_a_new_writer_each,
        _save_with_the_same_writer,
        _save_with_the_same_writer_and_no_url,
        _save_states_that_change,
        _save_components_in_turn,
    ],
)
def test_kept_plans_never_bring_back_old_values_or_overwrite_files_in_place(
    save_all: Any, two_ranks: RankPool, tmp_path: Path
) -> None:
    values(two_ranks.run(save_all, str(tmp_path)))


def test_a_failed_save_leaves_no_kept_plan_that_harms_the_next(two_ranks: RankPool, tmp_path: Path) -> None:
    assert values(two_ranks.run(_save_after_a_failed_one, str(tmp_path))) == [True, True]


def test_kept_plans_work_without_ranks(tmp_path: Path) -> None:
    _forget_plans()
    for version, name in enumerate(["a", "b", "a", "a"]):
        state: dict[str, Any] = dict(_plain(version))
        _save(state, FsspecStorageWriter(tmp_path / name, shard_bytes=SHARD_BYTES))
        loaded: dict[str, Any] = {"plain": torch.zeros(400, 99), "iteration": -1}
        dcp.load(loaded, storage_reader=FsspecStorageReader(tmp_path / name))
        assert_bits_equal(loaded, state)
    _forget_plans()


def _save_often(rank: int, url: str) -> list[int]:
    """Return how often plans of all ranks have been made, after each save."""
    made = []
    original = DefaultSavePlanner.create_global_plan

    def counted(self: DefaultSavePlanner, all_plans: Any) -> Any:
        made.append(len(all_plans))
        return original(self, all_plans)

    job, counts = make_job(num_steps=1), []
    checkpointer = DistributedCheckpointer(url)
    DefaultSavePlanner.create_global_plan = counted  # type: ignore[method-assign]
    try:
        for iteration in (1, 2, 3):
            checkpointer.save(*job.train(1).parts, iteration)
            counts.append(len(made))
        job = make_job(seed=3, num_steps=1, model=torch.nn.Sequential(torch.nn.Linear(4, 2)))
        checkpointer.save(*job.parts, 4)
        counts.append(len(made))
    finally:
        DefaultSavePlanner.create_global_plan = original  # type: ignore[method-assign]
    fresh = make_job(seed=4, model=torch.nn.Sequential(torch.nn.Linear(4, 2)))
    assert checkpointer.load(*fresh.parts) == 4
    assert_same(fresh, job.state())
    return counts


def test_h28_a_job_plans_its_components_once_and_again_when_they_have_changed(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    coordinator, other = values(two_ranks.run(_save_often, str(tmp_path)))
    # Four components; then another model with its optimizer, while scheduler and trainer are as before.
    assert coordinator == [4, 4, 4, 6]
    assert other == [0, 0, 0, 0]
