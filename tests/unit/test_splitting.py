"""Where tensors are cut and how pieces are packed."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_fsspec.storage.splitting import MAX_PIECE_BYTES, Piece, cut, file_bytes, item_bytes, pack, split_plan

MIB = 1 << 20


def item(
    sizes: tuple[int, ...],
    *,
    offsets: tuple[int, ...] | None = None,
    whole: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> WriteItem:
    offsets = offsets or tuple(0 for _ in sizes)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(whole or sizes),
    )
    kind = WriteItemType.TENSOR if whole is None else WriteItemType.SHARD
    return WriteItem(MetadataIndex("w", offsets), kind, tensor_data=data)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    max_bytes=st.integers(1, 600),
)
def test_boxes_tile_the_whole_in_memory_order(sizes: tuple[int, ...], itemsize: int, max_bytes: int) -> None:
    tensor = torch.arange(math.prod(sizes)).reshape(sizes)
    boxes = list(cut(sizes, itemsize, max_bytes))
    parts = []
    for offsets, lengths in boxes:
        assert math.prod(lengths) * itemsize <= max(max_bytes, itemsize)
        part = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert part.is_contiguous()
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat(parts), tensor.reshape(-1))


def test_pieces_are_even_and_below_the_limit() -> None:
    plan = split_plan(SavePlan([item((1000, 4096))]), 4 * MIB, replicated=False)
    sizes = [item_bytes(piece) for piece in plan.items]
    assert len(sizes) == 4
    assert max(sizes) <= 4 * MIB
    assert max(sizes) - min(sizes) <= 4096 * 4
    assert sum(sizes) == 1000 * 4096 * 4


def test_no_piece_is_larger_than_the_limit_even_if_shard_files_are() -> None:
    plan = split_plan(SavePlan([item((100, MIB))]), 1 << 30, replicated=False)
    assert max(item_bytes(piece) for piece in plan.items) <= MAX_PIECE_BYTES


def test_a_piece_of_a_shard_keeps_its_place_in_the_whole() -> None:
    shard = item((8, MIB // 4), offsets=(24, 0), whole=(32, MIB // 4))
    plan = split_plan(SavePlan([shard]), 2 * MIB, replicated=True)
    chunks = [piece.tensor_data.chunk for piece in plan.items if piece.tensor_data]
    assert [tuple(chunk.offsets) for chunk in chunks] == [(24, 0), (26, 0), (28, 0), (30, 0)]
    local = torch.arange(8).reshape(8, 1).expand(8, MIB // 4)
    for piece, start in zip(plan.items, (0, 2, 4, 6), strict=True):
        assert isinstance(piece, Piece)
        assert torch.equal(piece.narrow(local), local[start : start + 2])


def test_replicated_tensors_are_cut_finer_so_that_ranks_can_share_them() -> None:
    alone = split_plan(SavePlan([item((8, MIB // 4))]), 8 * MIB, replicated=False)
    shared = split_plan(SavePlan([item((8, MIB // 4))]), 8 * MIB, replicated=True)
    assert len(alone.items) == 2
    assert len(shared.items) == 4


def test_a_row_that_is_too_large_is_cut_within() -> None:
    plan = split_plan(SavePlan([item((2, 3 * MIB))]), 8 * MIB, replicated=False)
    chunks = [tuple(piece.tensor_data.chunk.offsets) for piece in plan.items if piece.tensor_data]
    assert chunks == [(0, 0), (0, MIB), (0, 2 * MIB), (1, 0), (1, MIB), (1, 2 * MIB)]


def test_small_states_are_spread_over_the_connections() -> None:
    assert file_bytes(1 << 40, 8 * MIB, 32) == 8 * MIB
    assert file_bytes(320 * MIB, 8 * MIB, 32) == 5 * MIB
    assert file_bytes(1, 8 * MIB, 32) == MAX_PIECE_BYTES


def test_where_to_cut_depends_on_the_item_alone() -> None:
    one, other = item((64, MIB)), item((3, MIB))
    together = split_plan(SavePlan([other, one]), 8 * MIB, replicated=True).items
    alone = split_plan(SavePlan([one]), 8 * MIB, replicated=True).items
    assert [piece.index for piece in together][-len(alone) :] == [piece.index for piece in alone]


def test_a_piece_survives_what_planners_do_to_items() -> None:
    piece = split_plan(SavePlan([item((4, MIB))]), 4 * MIB, replicated=False).items[1]
    renumbered = dataclasses.replace(piece, index=dataclasses.replace(piece.index, index=7))
    assert isinstance(renumbered, Piece)
    assert renumbered.parent is not None
    assert renumbered.parent.index.offset == torch.Size((0, 0))
    assert renumbered.tensor_storage_size() == item_bytes(piece)


def test_byte_items_pass_through() -> None:
    plan = SavePlan([WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO)])
    assert split_plan(plan, MIB, replicated=True).items == plan.items


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_small_and_empty_tensors_stay_whole(shape: tuple[int, ...]) -> None:
    (piece,) = split_plan(SavePlan([item(shape)]), MIB, replicated=True).items
    assert isinstance(piece, Piece)
    assert piece.parent is None


@given(sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 60))
def test_packing_keeps_order_and_the_limit(sizes: list[int], limit: int) -> None:
    files = pack(sizes, limit)
    assert [number for file in files for number in file] == list(range(len(sizes)))
    totals = [sum(sizes[number] for number in file) for file in files]
    assert all(total <= limit or len(file) == 1 for file, total in zip(files, totals, strict=True))
    assert all(total + sizes[after[0]] > limit for total, (_, after) in zip(totals, pairwise(files), strict=False))
