"""Cut write items into pieces and pack pieces into shard files.

Pure: plans in, plans out. DCP asks the storage writer for its changes to a local plan before the planner merges
the plans of all ranks, so a piece becomes an ordinary chunk of stock metadata, and de-duplication of replicated
tensors works piece by piece.

Every rank must cut a replicated tensor at the same places, or the chunks would overlap. So where to cut is a
function of the item and of the settings alone, never of the rank or of what else it saves.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_fsspec.storage.framing import QUANTIZED

MAX_PIECE_BYTES = 4 << 20
"""Largest piece of a tensor that can be cut. It is the least that is read back as a whole, so it bounds how many
connections can share a load: 32 of them a state of 128 MiB."""

_MIN_REPLICATED_PIECE_BYTES = 2 << 20
_REPLICATED_PIECES = 8
"""A tensor that other ranks may hold as well is cut into about so many pieces, so that they can share the work."""


@dataclasses.dataclass(frozen=True)
class Piece(WriteItem):
    """A write item that knows its local size, and the item of the planner that it was cut from.

    Attributes:
        parent: The planner's own item, to ask the planner for the data. None: this is the whole item.
    """

    parent: WriteItem | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the bytes of this piece, where torch would return those of the whole global tensor.

        DCP balances replicated tensors over the ranks by this number.
        """
        return item_bytes(self)

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cut this piece out of what the planner returned for `parent`."""
        if self.parent is None:
            return tensor
        own, whole = _chunk(self), _chunk(self.parent)
        for dim, (start, begin, size) in enumerate(zip(own.offsets, whole.offsets, own.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start - begin, size)
        return tensor


def whole_of(item: WriteItem) -> WriteItem:
    """Return the planner's own item that `item` was cut from, or `item` itself."""
    return item.parent if isinstance(item, Piece) and item.parent is not None else item


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.tensor_data is None:
        raise AssertionError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data.chunk


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of the local chunk of a tensor item; 0 for a byte item, whose size is not known yet."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def split_plan(plan: SavePlan, shard_bytes: int, *, replicated: bool) -> SavePlan:
    """Return `plan` with every tensor item as one or several `Piece`.

    Args:
        plan: A rank's local plan, from whatever planner.
        shard_bytes: Aimed size of a shard file; no piece is larger if it can be cut.
        replicated: Other ranks may hold the same tensors.
    """
    pieces = [piece for item in plan.items for piece in _split(item, shard_bytes, replicated)]
    return dataclasses.replace(plan, items=pieces)


def _split(item: WriteItem, shard_bytes: int, replicated: bool) -> Iterator[WriteItem]:
    data = item.tensor_data
    if data is None:
        yield item
        return
    limit = _piece_bytes(item, shard_bytes, replicated)
    if item_bytes(item) <= limit or data.properties.dtype in QUANTIZED:
        yield Piece(item.index, item.type, tensor_data=data)
        return
    for offsets, sizes in cut(data.chunk.sizes, data.properties.dtype.itemsize, limit):
        start = torch.Size(a + b for a, b in zip(data.chunk.offsets, offsets, strict=True))
        chunk = ChunkStorageMetadata(offsets=start, sizes=torch.Size(sizes))
        yield Piece(
            index=MetadataIndex(item.index.fqn, start),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=chunk),
            parent=item,
        )


def _piece_bytes(item: WriteItem, shard_bytes: int, replicated: bool) -> int:
    limit = min(shard_bytes, MAX_PIECE_BYTES)
    data = item.tensor_data
    if not replicated or data is None or data.chunk.sizes != data.size:
        return limit
    return min(limit, max(_MIN_REPLICATED_PIECE_BYTES, math.ceil(item_bytes(item) / _REPLICATED_PIECES)))


def cut(sizes: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into boxes of at most `max_bytes`, each contiguous in the row-major order of the whole.

    The cut runs along the first dimension; only where one row is too large does it go on within the row.

    Args:
        sizes: Shape of the box.
        itemsize: Bytes of an element.
        max_bytes: Largest box wanted; a single element may be larger.

    Yields:
        Offsets and sizes of each box, in row-major order.
    """
    axis, row_bytes = 0, math.prod(sizes[1:]) * itemsize
    while axis + 1 < len(sizes) and row_bytes > max_bytes:
        axis += 1
        row_bytes = math.prod(sizes[axis + 1 :]) * itemsize
    num_boxes = math.ceil(sizes[axis] / max(1, max_bytes // max(1, row_bytes)))
    rows = math.ceil(sizes[axis] / num_boxes)
    ones, rest = (1,) * axis, tuple(sizes[axis + 1 :])
    for outer in itertools.product(*(range(size) for size in sizes[:axis])):
        for start in range(0, sizes[axis], rows):
            yield (
                (*outer, start, *(0 for _ in rest)),
                (*ones, min(rows, sizes[axis] - start), *rest),
            )


def file_bytes(total_bytes: int, shard_bytes: int, max_concurrency: int) -> int:
    """Return the size of shard files for a rank that writes `total_bytes`.

    Below what fills every connection twice, files become smaller than `shard_bytes`, down to one piece each.
    """
    return min(shard_bytes, max(MAX_PIECE_BYTES, total_bytes // (2 * max_concurrency)))


def pack(sizes_bytes: Sequence[int], shard_bytes: int) -> list[range]:
    """Pack items, in order, into files of about `shard_bytes`.

    Returns:
        For each file the range of item numbers in it. No file is empty, and none is larger than `shard_bytes`
        unless a single item is.
    """
    files: list[range] = []
    first = total = 0
    for number, size in enumerate(sizes_bytes):
        if number > first and total + size > shard_bytes:
            files.append(range(first, number))
            first, total = number, 0
        total += size
    if first < len(sizes_bytes):
        files.append(range(first, len(sizes_bytes)))
    return files
