"""What some ranks saved in some layout, any other number of ranks loads in any other layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import Replicate, Shard

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.stores import FolderStore, Store
from support.tensors import assert_bits_equal, random_tensor
from support.worlds import Layout, assert_holds, blank, full_tensors, laid_out, rank_of_file, world

pytestmark = pytest.mark.distributed

SHARD_BYTES = 64 << 10
WORLDS = (1, 2, 3, 4)

FLAT = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicated": (Replicate(),),
}
"""Placements on a mesh of one dimension. One checkpoint holds all tensors in each of them."""

LAYOUTS = {
    "rows": Layout([0, 1, 2, 3], (Shard(0),)),
    "columns": Layout([0, 1, 2, 3], (Shard(1),)),
    "hybrid": Layout([[0, 1], [2, 3]], (Shard(0), Replicate())),
    "hybrid_inside": Layout([[0, 1], [2, 3]], (Replicate(), Shard(0))),
    "blocks": Layout([[0, 1], [2, 3]], (Shard(0), Shard(1))),
    "rows_of_rows": Layout([[0, 1], [2, 3]], (Shard(0), Shard(0))),
    "without_rank_3": Layout([0, 1, 2], (Shard(0),)),
    "only_rank_2": Layout([2], (Replicate(),)),
}


def _values(rank: int) -> dict[str, Any]:
    """Return what is no DTensor: the same on all ranks."""
    return {"plain": random_tensor(5, 3, seed=90), "scalar": torch.tensor(2.5), "iteration": 7, "names": ["a", "b"]}


def _flat_state(num_ranks: int, full: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    mesh = list(range(num_ranks))
    return {name: laid_out(full, Layout(mesh, placements)) for name, placements in FLAT.items()}


def _writer(kind: str, url: str, arguments: Mapping[str, Any]) -> Any:
    if kind == "stock":
        return FileSystemWriter(url)
    return FsspecStorageWriter(url, shard_bytes=SHARD_BYTES, **arguments)


def _save_and_load_in_worlds(
    rank: int, kind: str, url: str, arguments: dict[str, Any], scratch: str, pairs: list[tuple[int, int]]
) -> int:
    full = full_tensors()
    checked = 0
    for saving, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        with world(rank, saving, f"{scratch}/save{saving}") as inside:
            if inside:
                state = {**_flat_state(saving, full), "values": _values(rank)}
                dcp.save(state, storage_writer=_writer(kind, f"{url}/{saving}", arguments))
        for _, loading in group:
            with world(rank, loading, f"{scratch}/save{saving}load{loading}") as inside:
                if inside:
                    zeros = blank(full)
                    state = {**_flat_state(loading, zeros), "values": {}}
                    state["values"] = {
                        "plain": torch.zeros(5, 3),
                        "scalar": torch.tensor(0.0),
                        "iteration": 0,
                        "names": [],
                    }
                    dcp.load(state, storage_reader=FsspecStorageReader(f"{url}/{saving}", **arguments))
                    for name in FLAT:
                        assert_holds(state[name], full, f"{saving} -> {loading}, {name}")
                    assert_bits_equal(state["values"], _values(rank))
                    checked += 1
    return checked


def _assert_loads_without_ranks(reader: Any) -> None:
    full = full_tensors()
    state: dict[str, Any] = {name: blank(full) for name in FLAT}
    state["values"] = {"plain": torch.zeros(5, 3), "scalar": torch.tensor(0.0), "iteration": 0, "names": []}
    dcp.load(state, storage_reader=reader)
    assert_bits_equal(state, {**dict.fromkeys(FLAT, full), "values": _values(0)})


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_b13_every_number_of_ranks_loads_what_every_other_number_saved(
    kind: str, four_ranks: RankPool, tmp_path: Path
) -> None:
    """B13."""
    url = str(tmp_path / "saves")
    pairs = list(itertools.product(WORLDS, WORLDS))
    counts = values(four_ranks.run(_save_and_load_in_worlds, kind, url, {}, str(tmp_path), pairs))
    assert counts == [16, 12, 8, 4]
    for saved_by in WORLDS:
        _assert_loads_without_ranks(FsspecStorageReader(f"{url}/{saved_by}"))
        _assert_loads_without_ranks(FileSystemReader(f"{url}/{saved_by}"))


@pytest.mark.server
@pytest.mark.parametrize("store", ["seaweed"], indirect=True)
def test_on_object_storage_other_numbers_of_ranks_load_what_was_saved(
    store: Store, four_ranks: RankPool, tmp_path: Path
) -> None:
    """B13."""
    pairs = [(3, 2), (4, 4), (4, 1)]
    values(four_ranks.run(_save_and_load_in_worlds, "ours", store.url, store.arguments, str(tmp_path), pairs))
    _assert_loads_without_ranks(FsspecStorageReader(store.below("3"), **store.arguments))


def _save_in_layouts(rank: int, url: str, names: list[str]) -> None:
    full = full_tensors(large_rows=200)
    for name in names:
        writer = FsspecStorageWriter(f"{url}/{name}", shard_bytes=SHARD_BYTES)
        dcp.save(laid_out(full, LAYOUTS[name]), storage_writer=writer)


def _load_in_layouts(rank: int, url: str, names: list[str]) -> None:
    full = full_tensors(large_rows=200)
    for saved, loaded in itertools.product(names, names):
        state = laid_out(blank(full), LAYOUTS[loaded])
        dcp.load(state, storage_reader=FsspecStorageReader(f"{url}/{saved}"))
        assert_holds(state, full, f"{saved} -> {loaded}")


def test_every_layout_loads_what_every_other_layout_saved(four_ranks: RankPool, tmp_path: Path) -> None:
    """B13: meshes of two dimensions, and meshes that leave ranks out."""
    names = list(LAYOUTS)
    values(four_ranks.run(_save_in_layouts, str(tmp_path), names))
    values(four_ranks.run(_load_in_layouts, str(tmp_path), names))
    full = full_tensors(large_rows=200)
    num_bytes = sum(tensor.nbytes for tensor in full.values())
    for name in names:
        # What several ranks hold is written by one of them; each item takes some room for itself.
        files = [path.stat().st_size for path in (tmp_path / name).glob("*.distcp")]
        num_items = len(FileSystemReader(tmp_path / name).read_metadata().storage_data)
        assert num_bytes <= sum(files) <= num_bytes + 2000 * num_items, name
        for reader in (FsspecStorageReader(tmp_path / name), FileSystemReader(tmp_path / name)):
            state = blank(full)
            dcp.load(state, storage_reader=reader)
            assert_bits_equal(state, full, name)


def _sharded_tensor(rank: int, full: torch.Tensor) -> ShardedTensor:
    """Return a sharded tensor of which rank 0 has two shards, rank 1 a large one, and the last rank none."""
    rows = {0: [(0, 1), (1, 2)], 1: [(3, len(full) - 5)], 2: [(len(full) - 2, 2)]}.get(rank, [])
    shards = [
        LocalShard.from_tensor_and_offsets(full[start : start + size].clone(), [start, 0], rank) for start, size in rows
    ]
    made: ShardedTensor = init_from_local_shards(shards, *full.shape)
    return made


def _save_and_load_sharded_tensors(rank: int, url: str) -> None:
    full = {"small": random_tensor(9, 3, seed=1), "large": random_tensor(1500, 301, seed=2)}
    state = {name: _sharded_tensor(rank, tensor) for name, tensor in full.items()}
    dcp.save(state, storage_writer=FsspecStorageWriter(url, shard_bytes=SHARD_BYTES))
    loaded = {name: _sharded_tensor(rank, torch.zeros_like(tensor)) for name, tensor in full.items()}
    dcp.load(loaded, storage_reader=FsspecStorageReader(url))
    for name, sharded in loaded.items():
        for shard in sharded.local_shards():
            start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            assert_bits_equal(shard.tensor, full[name][start : start + size], name)
    rows = laid_out(blank(full), LAYOUTS["rows"])
    dcp.load(rows, storage_reader=FsspecStorageReader(url))
    assert_holds(rows, full, "sharded tensors as DTensors")


def test_sharded_tensors_of_uneven_shards_are_saved_and_loaded(four_ranks: RankPool, tmp_path: Path) -> None:
    """B13, B35: the kind of sharding before DTensor."""
    values(four_ranks.run(_save_and_load_sharded_tensors, str(tmp_path)))
    state = {"small": torch.zeros(9, 3), "large": torch.zeros(1500, 301)}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path))
    assert_bits_equal(state, {"small": random_tensor(9, 3, seed=1), "large": random_tensor(1500, 301, seed=2)})


def _save_few_rows(rank: int, url: str) -> None:
    full = {"one_row": random_tensor(1, 4, seed=3), "three_rows": random_tensor(3, 5, seed=4)}
    dcp.save(laid_out(full, LAYOUTS["rows"]), storage_writer=FsspecStorageWriter(f"{url}/rows"))
    loaded = laid_out(blank(full), LAYOUTS["rows"])
    dcp.load(loaded, storage_reader=FsspecStorageReader(f"{url}/rows"))
    assert_holds(loaded, full, "few rows")
    dcp.save(laid_out(full, LAYOUTS["only_rank_2"]), storage_writer=FsspecStorageWriter(f"{url}/rank_2"))
    dcp.save({"plain": full["one_row"]}, storage_writer=FsspecStorageWriter(f"{url}/plain"))


def _ranks_with_files(folder: Path) -> list[int]:
    names = set(FolderStore(folder, "").raw_list()) - {".metadata", "checksums.json"}
    return sorted(rank_of_file(name) for name in names)


def test_h27_a_rank_with_nothing_to_write_writes_no_file(four_ranks: RankPool, tmp_path: Path) -> None:
    """B13: fewer rows than ranks. The last ranks' empty shards are one item to DCP, which one of them may write."""
    values(four_ranks.run(_save_few_rows, str(tmp_path)))
    assert _ranks_with_files(tmp_path / "rank_2") == [2]
    assert len(_ranks_with_files(tmp_path / "plain")) == 1
    assert len(_ranks_with_files(tmp_path / "rows")) == len(set(_ranks_with_files(tmp_path / "rows"))) <= 4
