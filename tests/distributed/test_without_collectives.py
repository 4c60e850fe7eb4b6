"""`use_collectives=False`, process groups that are not the whole world, and saves that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Shard

from dcp_fsspec import CheckpointExistsError, FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.stores import FolderStore, Store
from support.tensors import assert_bits_equal, random_tensor
from support.worlds import Layout, assert_holds, blank, laid_out

pytestmark = pytest.mark.distributed

SHARD_BYTES = 64 << 10


def _own_state(rank: int, version: int = 0) -> dict[str, Any]:
    """Return what one rank alone holds, under the same keys as the other ranks."""
    seed = 10 * version + rank
    return {"large": random_tensor(300 + rank, 101, seed=seed), "rank": rank, "version": version}


def _blank_state(rank: int) -> dict[str, Any]:
    return {"large": torch.zeros(300 + rank, 101), "rank": -1, "version": -1}


def _save_each_alone(rank: int, url: str, arguments: dict[str, Any]) -> None:
    for version in range(2):
        writer = FsspecStorageWriter(url, shard_bytes=SHARD_BYTES, **arguments)
        dcp.save(_own_state(rank, version), storage_writer=writer, use_collectives=False)
        dist.barrier()
        for verify in ("read", "full", "off"):
            reader = FsspecStorageReader(url, verify=verify, **arguments)
            loaded = _blank_state(rank)
            dcp.load(loaded, storage_reader=reader)
            assert_bits_equal(loaded, _own_state(rank, version), f"rank {rank}, version {version}")
            assert reader.last_report.checksums == ("off" if verify == "off" else "checked")
        dist.barrier()


def test_ranks_that_save_each_alone_load_each_their_own(two_ranks: RankPool, tmp_path: Path) -> None:
    values(two_ranks.run(_save_each_alone, str(tmp_path), {}))
    names = FolderStore(tmp_path, "").raw_list()
    assert {"__0.metadata", "__1.metadata"} <= set(names)
    assert ".metadata" not in names


@pytest.mark.server
@pytest.mark.parametrize("store", ["seaweed"], indirect=True)
def test_ranks_that_save_each_alone_on_object_storage_load_each_their_own(store: Store, two_ranks: RankPool) -> None:
    values(two_ranks.run(_save_each_alone, store.url, store.arguments))


def test_one_process_that_saves_without_collectives_loads_what_it_saved(tmp_path: Path) -> None:
    for version in range(2):
        writer = FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES)
        dcp.save(_own_state(0, version), storage_writer=writer, no_dist=True, use_collectives=False)
        for reader in (FsspecStorageReader(tmp_path, verify="full"), FileSystemReader(tmp_path)):
            loaded = _blank_state(0)
            dcp.load(loaded, storage_reader=reader, no_dist=True)
            assert_bits_equal(loaded, _own_state(0, version))


def _exchange_with_stock(rank: int, root: str) -> None:
    ours, stock = f"{root}/ours", f"{root}/stock"
    writer = FsspecStorageWriter(ours, shard_bytes=SHARD_BYTES)
    dcp.save(_own_state(rank), storage_writer=writer, use_collectives=False)
    dcp.save(_own_state(rank), storage_writer=FileSystemWriter(stock), use_collectives=False)
    dist.barrier()
    for reader in (FileSystemReader(ours), FsspecStorageReader(stock)):
        loaded = _blank_state(rank)
        dcp.load(loaded, storage_reader=reader)
        assert_bits_equal(loaded, _own_state(rank))


def test_stock_torch_and_we_read_each_other_where_each_rank_saves_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    values(two_ranks.run(_exchange_with_stock, str(tmp_path)))


def _save_twice_where_overwriting_is_refused(rank: int, url: str, arguments: dict[str, Any]) -> list[str]:
    state = {"w": random_tensor(300, 101)}
    dcp.save(state, storage_writer=FsspecStorageWriter(url, overwrite=False, **arguments))
    try:
        writer = FsspecStorageWriter(url, overwrite=False, **arguments)
        dcp.save({"w": torch.zeros(300, 101)}, storage_writer=writer)
    except CheckpointException as error:
        dist.barrier()  # the group must still be usable
        return [type(failure[0]).__name__ for failure in error.failures.values()]
    return []


@pytest.mark.parametrize("store", ["path", "seaweed"], indirect=True)
def test_a_refused_overwrite_raises_on_every_rank_and_changes_nothing(store: Store, two_ranks: RankPool) -> None:
    outcomes = values(two_ranks.run(_save_twice_where_overwriting_is_refused, store.url, store.arguments))
    assert outcomes == [[CheckpointExistsError.__name__]] * 2
    loaded = {"w": torch.zeros(300, 101)}
    dcp.load(loaded, storage_reader=FsspecStorageReader(store.url, **store.arguments))
    assert_bits_equal(loaded, {"w": random_tensor(300, 101)})
    assert {len(store.raw_list())} == {3}, store.raw_list()


def _save_with_different_sizes(rank: int, url: str) -> bool:
    writer = FsspecStorageWriter(url, shard_bytes=SHARD_BYTES << rank)
    try:
        dcp.save({"w": random_tensor(3000, 101)}, storage_writer=writer)
    except CheckpointException:
        return True
    return False


def test_ranks_that_cut_the_same_tensor_differently_fail_before_anything_is_written(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    assert values(two_ranks.run(_save_with_different_sizes, str(tmp_path))) == [True, True]
    assert FolderStore(tmp_path, "").raw_list() == {}


def _save_in_groups(rank: int, root: str, members: list[list[int]]) -> None:
    """Save in several groups at once, one checkpoint each."""
    full = {"large": random_tensor(301, 101, seed=1), "few": random_tensor(1, 3, seed=2)}
    groups = [dist.new_group(ranks) for ranks in members]
    meshes = [laid_out(full, Layout(ranks, (Shard(0),))) for ranks in members]
    zeros = [laid_out(blank(full), Layout(ranks, (Shard(0),))) for ranks in members]
    for ranks, group, state, loaded in zip(members, groups, meshes, zeros, strict=True):
        if rank not in ranks:
            continue
        url = f"{root}/{'-'.join(map(str, ranks))}"
        plain = {"plain": random_tensor(40, 7, seed=3), "names": [str(ranks)]}
        writer = FsspecStorageWriter(url, shard_bytes=SHARD_BYTES)
        dcp.save({**state, **plain}, storage_writer=writer, process_group=group)
        target: dict[str, Any] = {**loaded, "plain": torch.zeros(40, 7), "names": []}
        dcp.load(target, storage_reader=FsspecStorageReader(url), process_group=group)
        assert_holds(target, full, url)
        assert_bits_equal({key: target[key] for key in plain}, plain)


def test_a_group_that_is_not_the_whole_world_saves_and_loads(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save_in_groups, str(tmp_path), [[0, 1, 2], [0, 2], [1, 3], [3]]))
    for url in tmp_path.iterdir():
        for reader in (FsspecStorageReader(url), FileSystemReader(url)):
            loaded = {"large": torch.zeros(301, 101), "few": torch.zeros(1, 3)}
            dcp.load(loaded, storage_reader=reader)
            assert_bits_equal(loaded, {"large": random_tensor(301, 101, seed=1), "few": random_tensor(1, 3, seed=2)})
