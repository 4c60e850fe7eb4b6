"""What several ranks hold alike is written once, and the work is shared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.stores import FolderStore
from support.tensors import assert_bits_equal, random_tensor
from support.worlds import blank, rank_of_file

pytestmark = pytest.mark.distributed

MIB = 1 << 20


def _state(kind: str) -> dict[str, torch.Tensor]:
    if kind == "many":
        return {f"layer{number}": random_tensor(1024, 1031, seed=number) for number in range(11)}
    return {"one": random_tensor(8192, 1024)}


def _save(rank: int, url: str, kind: str, lowest_rank: bool) -> None:
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest_rank)
    dcp.save(_state(kind), storage_writer=FsspecStorageWriter(url), planner=planner)


def _bytes_by_rank(folder: Path) -> Counter[int]:
    by_rank: Counter[int] = Counter()
    for name, size in FolderStore(folder, "").raw_list().items():
        if name.endswith(".distcp"):
            by_rank[rank_of_file(name)] += size
    return by_rank


@pytest.mark.parametrize("kind", ["many", "one"])
def test_h29_a_replicated_state_is_written_once_and_no_rank_writes_much_more_than_its_share(
    kind: str, four_ranks: RankPool, tmp_path: Path
) -> None:
    values(four_ranks.run(_save, str(tmp_path), kind, False))
    state = _state(kind)
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    by_rank = _bytes_by_rank(tmp_path)
    assert num_bytes <= by_rank.total() <= 1.01 * num_bytes
    assert max(by_rank.values()) <= 0.30 * num_bytes, by_rank
    loaded = blank(state)
    dcp.load(loaded, storage_reader=FsspecStorageReader(tmp_path))
    assert_bits_equal(loaded, state)


def test_the_lowest_rank_writes_what_all_hold_if_the_planner_says_so(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save, str(tmp_path), "one", True))
    assert list(_bytes_by_rank(tmp_path)) == [0]
    loaded = blank(_state("one"))
    dcp.load(loaded, storage_reader=FsspecStorageReader(tmp_path))
    assert_bits_equal(loaded, _state("one"))
