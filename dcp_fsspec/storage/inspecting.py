"""Look around in a checkpoint without loading it, and read single tensors, or some of their rows.

Opening reads ``.metadata`` alone. What is read then goes the way of every load: ranges of just what is wanted, each
item compared with its checksum where it is read whole.
"""

import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_fsspec.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.checksums import Section
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.report import ReadReport
from dcp_fsspec.storage.splitting import cut

_RANK = re.compile(r"__(\d+)_")


@dataclass(frozen=True)
class StoredItem:
    """One item of a shard file: a chunk of a tensor, or a Python value.

    Attributes:
        offsets: Where the chunk begins in its tensor; empty for a value.
        sizes: Shape of the chunk.
        file: Name of the shard file.
        start: Where the item begins in the file, in bytes.
        num_bytes: Bytes of the item in the file, its frame included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, as its file's name says."""
        match = _RANK.match(self.file.rpartition("/")[2])
        return int(match[1]) if match else None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        fqn: Its key.
        shape: Its global shape.
        dtype: Its element type.
        chunks: Where it lies, in pieces.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredItem, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredValue:
    """A Python value of a checkpoint.

    Attributes:
        fqn: Its key.
        item: Where it lies.
    """

    fqn: str
    item: StoredItem


@dataclass(frozen=True)
class Box:
    """A box in a stored tensor.

    Attributes:
        fqn: The tensor's key.
        offsets: Where the box begins.
        sizes: Its shape.
    """

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class CheckpointView:
    """One DCP checkpoint, opened to look around in. Safe to use from many threads, apart from reading.

    Attributes:
        url: Its folder, without secrets.
        tensors: All tensors by key, in the order in which they were saved.
        values: All Python values by key.
        last_report: What the last read did.
    """

    def __init__(self, store: Store, **settings: Any) -> None:
        self.store = store
        self.url = store.url
        self._reader = FsspecStorageReader.at(store, **settings)
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)
        self._lock = threading.Lock()
        placed: dict[str, dict[tuple[int, ...] | None, StoredItem]] = {}
        for index, info in self.metadata.storage_data.items():
            offsets = tuple(index.offset) if index.offset is not None else None
            item = StoredItem(offsets or (), (), info.relative_path, info.offset, info.length)
            placed.setdefault(index.fqn, {})[offsets] = item
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, StoredValue] = {}
        for fqn, record in self.metadata.state_dict_metadata.items():
            items = placed.get(fqn, {})
            if isinstance(record, TensorStorageMetadata):
                self.tensors[fqn] = self._tensor(fqn, record, items)
            else:
                self.values[fqn] = StoredValue(fqn, _only(self.url, fqn, items))

    def _tensor(
        self, fqn: str, record: TensorStorageMetadata, items: Mapping[tuple[int, ...] | None, StoredItem]
    ) -> StoredTensor:
        chunks = []
        for chunk in record.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            item = items.get(offsets) or items.get(None)
            if item is None and 0 not in sizes:
                raise CorruptCheckpointError(f"{self.url}: .metadata lists {fqn} and does not say where it lies")
            if item is not None:
                chunks.append(StoredItem(offsets, sizes, item.file, item.start, item.num_bytes))
        return StoredTensor(fqn, tuple(record.size), record.properties.dtype, tuple(chunks))

    def __repr__(self) -> str:
        return f"CheckpointView({self.url!r}, {len(self.tensors)} tensors, {self.num_bytes} bytes)"

    @property
    def last_report(self) -> ReadReport:
        """What the last read did."""
        return self._reader.last_report

    @property
    def save_id(self) -> str | None:
        """The id of the save that wrote it, if it has one."""
        return metadata.save_id_of(self.metadata)

    @property
    def checksums(self) -> Section | None:
        """Its checksums by shard file; None if it has none, or if it was opened with ``verify="off"``."""
        return self._reader.stored_checksums

    @property
    def num_bytes(self) -> int:
        """Bytes of all items in the shard files."""
        return sum(item.num_bytes for item in self.items())

    def items(self) -> Iterator[StoredItem]:
        """Yield all items, those of tensors first."""
        for tensor in self.tensors.values():
            yield from tensor.chunks
        for value in self.values.values():
            yield value.item

    def bytes_by_file(self) -> dict[str, int]:
        """Return how many bytes of each shard file ``.metadata`` refers to."""
        totals: dict[str, int] = {}
        for item in self.items():
            totals[item.file] = totals.get(item.file, 0) + item.num_bytes
        return dict(sorted(totals.items()))

    def bytes_by_rank(self) -> dict[int | None, int]:
        """Return how many bytes each rank wrote; None stands for files whose names do not say."""
        totals: dict[int | None, int] = {}
        for item in self.items():
            totals[item.rank] = totals.get(item.rank, 0) + item.num_bytes
        return dict(sorted(totals.items(), key=lambda entry: (entry[0] is None, entry[0] or 0)))

    # Reading ---------------------------------------------------------------------------------------------

    def read_tensor(self, fqn: str, rows: slice | tuple[int, int] | None = None) -> torch.Tensor:
        """Return a tensor, or its rows [start, stop) along the first dimension; nothing else of it is fetched.

        Raises:
            CheckpointNotFoundError: there is no such tensor.
            ConfigurationError: `rows` are not of this tensor.
            CorruptCheckpointError, StorageReadError: as for every load.
        """
        tensor = self.tensors.get(fqn)
        if tensor is None:
            kind = "is a Python value there, not a tensor" if fqn in self.values else "is not there"
            raise CheckpointNotFoundError(f"{self.url}: {fqn!r} {kind}")
        offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
        if rows is not None:
            offsets[0:1], sizes[0:1] = _row_range(tensor, rows)
        return self.read_boxes([Box(fqn, tuple(offsets), tuple(sizes))])[0]

    def read_boxes(self, boxes: Sequence[Box]) -> list[torch.Tensor]:
        """Return boxes of stored tensors, all fetched side by side."""
        targets = [torch.empty(box.sizes, dtype=self.tensors[box.fqn].dtype) for box in boxes]
        items = [item for number, box in enumerate(boxes) for item in self._items_of(box, number)]
        self._read(items, _Targets(targets))
        return targets

    def read_values(self, fqns: Sequence[str]) -> dict[str, Any]:
        """Return Python values by key.

        Raises:
            CheckpointNotFoundError: one is not there.
            UnsafeCheckpointError: one needs more than plain types.
        """
        missing = [fqn for fqn in fqns if fqn not in self.values]
        if missing:
            raise CheckpointNotFoundError(f"{self.url}: there is no value {missing[0]!r}")
        index = {index.fqn: index for index in self.metadata.storage_data if index.fqn in self.values}
        nothing = torch.Size()
        planner = _Targets([])
        self._read(
            [ReadItem(LoadItemType.BYTE_IO, index[fqn], nothing, index[fqn], nothing, nothing) for fqn in fqns], planner
        )
        return planner.values

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        with self._lock:
            self._reader.read_data(LoadPlan(items), planner).wait()

    def _items_of(self, box: Box, number: int) -> Iterator[ReadItem]:
        found = 0
        for place, chunk in enumerate(self.tensors[box.fqn].chunks):
            starts = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
            stops = [
                min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
            if any(length <= 0 for length in lengths):
                continue
            found += math.prod(lengths)
            yield ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(box.fqn, index=number),
                torch.Size(a - b for a, b in zip(starts, box.offsets, strict=True)),
                MetadataIndex(box.fqn, torch.Size(chunk.offsets), index=place),
                torch.Size(a - b for a, b in zip(starts, chunk.offsets, strict=True)),
                torch.Size(lengths),
            )
        if found < math.prod(box.sizes):
            raise CorruptCheckpointError(
                f"{self.url}: parts of {box.fqn} are in no shard file, .metadata is incomplete"
            )


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: AbstractFileSystem | None = None,
    **settings: Any,
) -> CheckpointView:
    """Open a DCP checkpoint to look around in. One or two small files are read.

    Args:
        url: Url or path of the checkpoint's folder: the one that holds ``.metadata``.
        storage_options: As in fsspec.
        filesystem: An fsspec filesystem to use instead.
        settings: Further keyword arguments of `FsspecStorageReader`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UnsafeCheckpointError: it was refused.
        StorageReadError: the store did not deliver.
    """
    retry = {"retry_seconds": settings["retry_seconds"]} if "retry_seconds" in settings else {}
    return CheckpointView(Store(url, storage_options, filesystem, **retry), **settings)


def read_tensor(
    url: str | os.PathLike[str],
    fqn: str,
    rows: slice | tuple[int, int] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: AbstractFileSystem | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Return one tensor of a checkpoint, or its rows [start, stop), by reading the bytes of these alone.

    To read several tensors, `open_checkpoint` once. What is read whole is compared with its checksum.

    Args:
        url: Url or path of the checkpoint's folder.
        fqn: Key of the tensor.
        rows: Which rows along the first dimension.
        storage_options: As in fsspec.
        filesystem: An fsspec filesystem to use instead.
        settings: Further keyword arguments of `FsspecStorageReader`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no such tensor in it.
        ConfigurationError: `rows` are not of this tensor.
        CorruptCheckpointError, UnsafeCheckpointError: the checkpoint was refused, or the bytes are not those written.
        StorageReadError: the store did not deliver.
    """
    view = open_checkpoint(url, storage_options=storage_options, filesystem=filesystem, **settings)
    return view.read_tensor(fqn, rows)


def slabs(view: CheckpointView, fqns: Sequence[str], slab_bytes: int) -> Iterator[list[Box]]:
    """Yield the tensors `fqns` in order, as groups of boxes of about `slab_bytes` each.

    The boxes of a tensor follow each other in row-major order. Where it is stored in groups of rows, they are made of
    whole ones, so that each can be compared with its checksum.
    """
    group: list[Box] = []
    held = 0
    for fqn in fqns:
        tensor = view.tensors[fqn]
        for box in _boxes(tensor, slab_bytes):
            num_bytes = math.prod(box.sizes) * tensor.dtype.itemsize
            if group and held + num_bytes > slab_bytes:
                yield group
                group, held = [], 0
            group.append(box)
            held += num_bytes
    if group:
        yield group


def _boxes(tensor: StoredTensor, slab_bytes: int) -> Iterator[Box]:
    origin = (0,) * len(tensor.shape)
    if tensor.num_bytes <= slab_bytes or not tensor.shape:
        yield Box(tensor.fqn, origin, tensor.shape)
        return
    for start, stop in _row_groups(tensor):
        sizes = (stop - start, *tensor.shape[1:])
        for offsets, lengths in cut(sizes, tensor.dtype.itemsize, slab_bytes):
            yield Box(tensor.fqn, (offsets[0] + start, *offsets[1:]), lengths)


def _row_groups(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield the groups of rows in which a tensor is stored, or all rows if it is stored otherwise."""
    ranges = sorted({(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in tensor.chunks})
    whole_rows = all(chunk.sizes[1:] == tensor.shape[1:] for chunk in tensor.chunks)
    adjoin = [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), tensor.shape[0]]
    yield from ranges if whole_rows and adjoin else [(0, tensor.shape[0])]


def _row_range(tensor: StoredTensor, rows: slice | tuple[int, int]) -> tuple[tuple[int], tuple[int]]:
    if not tensor.shape:
        raise ConfigurationError(f"{tensor.fqn} has no dimensions, so it has no rows")
    if isinstance(rows, slice):
        start, stop, step = rows.indices(tensor.shape[0])
        if step != 1:
            raise ConfigurationError(f"rows of {tensor.fqn} must lie together, got a step of {step}")
        return (start,), (max(0, stop - start),)
    start, stop = rows
    if not 0 <= start <= stop <= tensor.shape[0]:
        raise ConfigurationError(f"{tensor.fqn} has {tensor.shape[0]} rows, [{start}, {stop}) is not within them")
    return (start,), (stop - start,)


def _only(url: str, fqn: str, items: Mapping[tuple[int, ...] | None, StoredItem]) -> StoredItem:
    for item in items.values():
        return item
    raise CorruptCheckpointError(f"{url}: .metadata lists {fqn} and does not say where it lies")


class _Targets(LoadPlanner):
    """A planner whose targets are plain tensors, by number."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._targets = targets
        self.values: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.index is not None
        target = self._targets[read_item.dest_index.index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        return None

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        # It has passed torch's rules for untrusted files, unless the caller trusts it.
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=False)

    # Never called: the plan is made by hand, and read_data asks for targets only.

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the plan is made by hand")

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made by hand")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made by hand")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made by hand")
