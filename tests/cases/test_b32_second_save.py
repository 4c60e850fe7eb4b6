"""B32: saving where a checkpoint stands already: a rerun with fewer ranks, a crash in the swap, a second job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import CheckpointExistsError, FsspecStorageWriter
from support.checkpoints import Failure, assert_loads, fails, folder_files, load, save
from support.ranks import RankPool, values
from support.stores import FolderStore, Store
from support.tensors import assert_bits_equal, random_tensor
from support.worlds import world

SHARD_BYTES = 64 << 10
SAFE_STORES = ("path", "moto")


def _state(seed: int, num_tensors: int = 3) -> dict[str, Any]:
    return {f"tensor{number}": random_tensor(15_000, seed=10 * seed + number) for number in range(num_tensors)}


def _save_own(rank: int, url: str, seed: int) -> None:
    save({f"rank{rank}": random_tensor(20_000, seed=seed + rank), "all": seed}, url)


def _save_and_load_by_two(rank: int, url: str, seed: int, folder: str) -> None:
    with world(rank, 2, f"{folder}/rendezvous") as inside:
        if inside:
            _save_own(rank, url, seed)
            assert_loads({f"rank{rank}": random_tensor(20_000, seed=seed + rank), "all": seed}, url)


def _refused(rank: int, url: str) -> Failure:
    with fails() as failure:
        save({f"rank{rank}": torch.zeros(3)}, url, overwrite=False)
    return failure


@pytest.mark.distributed
def test_b32_save_by_fewer_ranks_leaves_only_its_own_files(four_ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path / "root/checkpoint")
    store = FolderStore(tmp_path / "root", str(tmp_path / "root"))
    values(four_ranks.run(_save_own, url, 100))
    old = store.raw_list()
    assert sum(name.endswith(".distcp") for name in old) == 4

    before = folder_files(store, "checkpoint")
    for failure in values(four_ranks.run(_refused, url)):
        assert isinstance(failure.causes[0], CheckpointExistsError)
        failure.names(url, "overwrite=True")
    assert folder_files(store, "checkpoint") == before

    values(four_ranks.run(_save_and_load_by_two, url, 200, str(tmp_path)))
    new = store.raw_list()
    assert sum(name.endswith(".distcp") for name in new) == 2
    assert set(old) & set(new) == {"checkpoint/.metadata"}


class Interleaved(FsspecStorageWriter):
    """A writer in whose saves another job comes between two steps.

    Args:
        url: see `FsspecStorageWriter`.
        step: method of the writer before which it happens.
        other: what the other job does.
    """

    def __init__(self, url: str, step: str, other: Callable[[], object], **arguments: Any) -> None:
        super().__init__(url, **arguments)
        self._pending = {step: other}

    def _let_other(self, step: str) -> None:
        self._pending.pop(step, lambda: None)()

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._let_other("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._let_other("finish")
        super().finish(metadata, results)


@pytest.mark.parametrize("store", SAFE_STORES, indirect=True)
@pytest.mark.parametrize("step", ["write_data", "finish"])
@pytest.mark.parametrize("stands", [False, True], ids=["first", "overwrite"])
def test_b32_two_jobs_that_overwrite_each_other_never_give_a_mix(store: Store, step: str, stands: bool) -> None:
    url = store.below("checkpoint")
    if stands:
        save(_state(0), url, shard_bytes=SHARD_BYTES, **store.arguments)
    first, second = _state(1), _state(2)
    slow = Interleaved(
        url,
        step,
        lambda: save(second, url, shard_bytes=SHARD_BYTES, **store.arguments),
        shard_bytes=SHARD_BYTES,
        **store.arguments,
    )
    dcp.save(first, storage_writer=slow)
    _assert_first_or_told(first, url, files_are_its_own=stands, **store.arguments)


@pytest.mark.parametrize("stands", [False, True], ids=["first", "overwrite"])
def test_b32_commit_of_one_job_inside_the_commit_of_another_never_gives_a_mix(stands: bool) -> None:
    first, second = _state(1), _state(2)
    filesystem = _Pausing()
    arguments = {"shard_bytes": SHARD_BYTES, "filesystem": filesystem}
    if stands:
        save(_state(0), "/checkpoint", **arguments)
    filesystem.before_commit = lambda: save(second, "/checkpoint", **arguments)
    save(first, "/checkpoint", **arguments)
    _assert_first_or_told(first, "/checkpoint", files_are_its_own=stands, filesystem=filesystem)


def _assert_first_or_told(first: dict[str, Any], url: str, *, files_are_its_own: bool, **arguments: Any) -> None:
    """Assert that what the first job committed last loads, or at least that no mix does."""
    if files_are_its_own:
        assert_loads(first, url, **arguments)
        return
    with contextlib.suppress(CheckpointException):
        assert_bits_equal(load(first, url, **arguments), first)


class _Pausing(MemoryFileSystem):
    """Calls `before_commit` once when `.metadata` is about to be written."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.before_commit: Callable[[], object] | None = None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if path.endswith("/.metadata") and self.before_commit is not None:
            other, self.before_commit = self.before_commit, None
            other()
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.mark.parametrize("store", ["path", "moto", pytest.param("seaweed", marks=pytest.mark.server)], indirect=True)
@pytest.mark.parametrize("step", ["write_data", "finish"])
def test_b32_second_job_that_may_not_overwrite_is_refused_and_the_first_ones_checkpoint_stays_good(
    store: Store, step: str
) -> None:
    url = store.below("checkpoint")
    winner, loser = _state(1), _state(2)
    arguments = {"shard_bytes": SHARD_BYTES, "overwrite": False, **store.arguments}
    slow = Interleaved(url, step, lambda: save(winner, url, **arguments), **arguments)
    with fails() as failure:
        dcp.save(loser, storage_writer=slow)
    assert isinstance(failure.causes[0], CheckpointExistsError)
    failure.names(url)
    assert_loads(winner, url, **store.arguments)
    # A save by permission comes over both of them and clears up.
    save(loser, url, shard_bytes=SHARD_BYTES, **store.arguments)
    assert_loads(loser, url, **store.arguments)
