"""From a load plan to filled tensors: choose ranges, have them fetched, check and decode each item, copy it.

A tensor item is read whole, or, when only some of its rows are wanted or it is very large, as rows. Rows need to
know where the payload begins, so the heads of such items are fetched first, all in one round.
"""

import functools
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_fsspec.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    IncompatibleStateError,
)
from dcp_fsspec.storage import framing
from dcp_fsspec.storage.byte_items import ByteItems
from dcp_fsspec.storage.checksums import check_item
from dcp_fsspec.storage.fetching import Fetcher, Source
from dcp_fsspec.storage.filesystem import Buffer
from dcp_fsspec.storage.landing import (
    MIN_LANDING_BYTES,
    Consumer,
    Landing,
    can_land,
    tell_autograd,
)
from dcp_fsspec.storage.metadata import chunk_of
from dcp_fsspec.storage.progress import ProgressCallback
from dcp_fsspec.storage.ranges import (
    FETCH_BYTES,
    MAX_GAP_BYTES,
    Wanted,
    contiguous_run,
    envelope,
)
from dcp_fsspec.storage.report import ReadReport
from dcp_fsspec.storage.splitting import cut
from dcp_fsspec.storage.torch_internals import StorageInfo, StreamTransformExtension
from dcp_fsspec.storage.tracing import NO_SPAN
from dcp_fsspec.storage.transfer import Transfer

_WHOLE_ITEM_SHARE = 0.95
"""An item of which more than this share is wanted is read whole, and so can be checked."""

_CHUNK_BYTES = 1 << 20

_MAX_WHOLE_BYTES = 16 << 20
"""A larger item, of another writer, is read in groups of rows."""


@dataclass(frozen=True)
class _Target:
    """One item of the plan, with what is known about where it lies."""

    item: ReadItem
    info: StorageInfo
    dtype: torch.dtype = torch.uint8
    sizes: tuple[int, ...] = ()

    @property
    def template(self) -> framing.Template | None:
        """Outer parts of the item's frame, if it is one of ours and not transformed."""
        if getattr(self.info, "transform_descriptors", None):
            return None
        if framing.payload_bytes(self.dtype, self.sizes) > self.info.length:
            return None
        made = framing.template(self.dtype, self.sizes)
        return made if made is not None and made.num_bytes == self.info.length else None

    @property
    def num_bytes_needed(self) -> int:
        if self.item.type == LoadItemType.BYTE_IO:
            return self.info.length
        return framing.payload_bytes(self.dtype, self.item.lengths)


class ItemReader:
    """Reads the items of one plan on one rank.

    Args:
        source: What to read from.
        planner: Where to.
        transfer: How.
        progress: Told how far it has come.
    """

    def __init__(
        self, source: Source, planner: LoadPlanner, transfer: Transfer, progress: ProgressCallback | None = None
    ) -> None:
        self._source = source
        self._planner = planner
        self._transfer = transfer
        self._fetcher = Fetcher(source, transfer)
        self._progress = progress
        self._byte_items = ByteItems(source.store.url, source.trust_pickle)
        # Planners are written for one thread; only the copying runs beside it.
        self._planner_lock = threading.Lock()
        self._resolved: dict[int, torch.Tensor] = {}
        self._report = ReadReport()

    def read(self, items: Sequence[ReadItem]) -> ReadReport:
        """Fill the planner's targets; see `FsspecStorageReader.read_data` for what it raises."""
        with self._source.trace.span("plan", items=len(items)):
            wanted = self._wanted(items)
        self._report.num_bytes += self._fetcher.fetch(wanted, self._progress)
        return self._report

    def _wanted(self, items: Sequence[ReadItem]) -> list[Wanted[Consumer]]:
        targets = [self._locate(item) for item in items if not _wants_nothing(item)]
        for item in filter(_wants_nothing, items):
            self._deliver(item, torch.empty(tuple(item.lengths)))
        self._report.num_items = len(items)
        self._report.num_bytes_needed = sum(target.num_bytes_needed for target in targets)
        in_part = [target for target in targets if self._wants_rows(target)]
        by_rows = self._with_known_heads(in_part)
        wanted: list[Wanted[Consumer]] = []
        for target in targets:
            if id(target) in by_rows:
                wanted.extend(self._rows(target, by_rows[id(target)]))
            else:
                start = target.info.offset
                consumer = Consumer(
                    functools.partial(self._take_whole, target), functools.partial(self._land_whole, target)
                )
                wanted.append(Wanted(target.info.relative_path, start, start + target.info.length, consumer))
        if self._source.whole_files:
            wanted.extend(self._rest_of_files(targets))
        return wanted

    # Choosing ranges -------------------------------------------------------------------------------------

    def _locate(self, item: ReadItem) -> _Target:
        metadata = self._source.metadata
        try:
            info = metadata.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                return _Target(item, info)
            tensor, chunk = chunk_of(metadata, item.storage_index)
        except KeyError as error:
            raise CorruptCheckpointError(
                f"{self._source.store.url}: .metadata lists {item.storage_index.fqn} and does not say where it lies"
            ) from error
        target = _Target(item, info, tensor.properties.dtype, tuple(chunk.sizes))
        if info.length > framing.max_frame_bytes(target.dtype, target.sizes):
            raise CorruptCheckpointError(
                f"{self._where(target)}: .metadata says {info.length} bytes for a tensor of shape {target.sizes}"
            )
        return target

    def _wants_rows(self, target: _Target) -> bool:
        made = target.template
        if target.item.type == LoadItemType.BYTE_IO or self._source.whole_files or made is None:
            return False
        if not self._source.store.capabilities.ranges or made.payload_bytes <= MAX_GAP_BYTES:
            return False
        box = envelope(target.sizes, target.item.storage_offsets, target.item.lengths, target.dtype.itemsize)
        if box.stop - box.start < _WHOLE_ITEM_SHARE * made.payload_bytes:
            return True
        return target.info.length > _MAX_WHOLE_BYTES

    def _with_known_heads(self, targets: Sequence[_Target]) -> dict[int, int]:
        """Return where the payload begins, in bytes from the item's start, for each target that allows rows.

        Our own saves say so in their checksums file; of others' items the heads are fetched and looked at.
        """
        known = {
            id(target): len(made.head)
            for target in targets
            if (made := target.template) is not None and self._payload_at(target.info) == len(made.head)
        }

        def take(target: _Target, data: Buffer) -> None:
            made = target.template
            if made is not None and made.fits(data):
                known[id(target)] = len(made.head)

        self._report.num_bytes += self._fetcher.fetch(
            [
                Wanted(
                    target.info.relative_path,
                    target.info.offset,
                    target.info.offset + len(made.head),
                    Consumer(functools.partial(take, target)),
                )
                for target in targets
                if id(target) not in known and (made := target.template) is not None
            ]
        )
        return known

    def _payload_at(self, info: StorageInfo) -> int:
        record = (self._source.checksums or {}).get(info.relative_path)
        item = record.items.get((info.offset, info.length)) if record else None
        return item.payload_at if item else 0

    def _rows(self, target: _Target, payload_at: int) -> Iterator[Wanted[Consumer]]:
        """Cut what is wanted of an item into groups of rows of about one fetch each."""
        item, itemsize = target.item, target.dtype.itemsize
        self._report.num_unverified += 1
        whole = envelope(target.sizes, item.storage_offsets, item.lengths, itemsize)
        # What is fetched for a group is its envelope, which for columns is much larger than the group.
        group_bytes = FETCH_BYTES * math.prod(item.lengths) * itemsize // (whole.stop - whole.start)
        run_bytes, gap_bytes = contiguous_run(target.sizes, item.lengths, itemsize)
        if gap_bytes > MAX_GAP_BYTES:
            group_bytes = min(group_bytes, run_bytes)
        for offsets, lengths in cut(item.lengths, itemsize, max(1, group_bytes)):
            in_storage = [a + b for a, b in zip(item.storage_offsets, offsets, strict=True)]
            in_target = [a + b for a, b in zip(item.dest_offsets, offsets, strict=True)]
            box = envelope(target.sizes, in_storage, lengths, itemsize)
            part = replace(
                item,
                storage_offsets=torch.Size(in_storage),
                dest_offsets=torch.Size(in_target),
                lengths=torch.Size(lengths),
            )
            start = target.info.offset + payload_at
            rows = replace(target, item=part)
            consumer = Consumer(
                functools.partial(self._take_rows, rows, box.strides),
                functools.partial(self._land_rows, rows, box.stop - box.start),
            )
            yield Wanted(target.info.relative_path, start + box.start, start + box.stop, consumer)

    def _rest_of_files(self, targets: Sequence[_Target]) -> Iterator[Wanted[Consumer]]:
        """Want all other items, too, of the shard files that are read."""
        planned_by_file: dict[str, set[tuple[int, int]]] = {}
        for target in targets:
            info = target.info
            planned_by_file.setdefault(info.relative_path, set()).add((info.offset, info.length))
        for name, planned in planned_by_file.items():
            record = (self._source.checksums or {}).get(name)
            for offset, length in set(record.items if record else ()) - planned:
                consumer = Consumer(functools.partial(self._check_other, name, offset))
                yield Wanted(name, offset, offset + length, consumer)

    # Taking what arrived ---------------------------------------------------------------------------------

    def _land_whole(self, target: _Target) -> Landing | None:
        item, made = target.item, target.template
        if made is None or made.payload_bytes < MIN_LANDING_BYTES or tuple(item.lengths) != target.sizes:
            return None
        destination = self._landing_place(target)
        if destination is None:
            return None
        memory = framing.payload_of(destination)

        def landed(head: Buffer, tail: Buffer) -> None:
            self._check(target, [head, memory, tail])
            if made.fits(head):
                self._commit(item, destination)
            else:
                self._decode(target, b"".join([head, memory, tail]))

        return Landing(len(made.head), memory, landed)

    def _land_rows(self, target: _Target, num_bytes: int) -> Landing | None:
        if num_bytes < MIN_LANDING_BYTES or num_bytes != target.num_bytes_needed:
            return None
        destination = self._landing_place(target)
        if destination is None:
            return None
        return Landing(0, framing.payload_of(destination), lambda *_: self._commit(target.item, destination))

    def _landing_place(self, target: _Target) -> torch.Tensor | None:
        """Return the memory of the target if the elements can be put there as they lie in the file."""
        destination = self._destination(target.item)
        if can_land(destination, target.dtype, tuple(target.item.lengths)):
            return destination
        self._resolved[id(target.item)] = destination
        return None

    def _take_whole(self, target: _Target, data: Buffer) -> None:
        self._check(target, [data])
        self._decode(target, data)

    def _decode(self, target: _Target, data: Buffer) -> None:
        item = target.item
        if item.type == LoadItemType.BYTE_IO:
            content = self._untransformed(target, data)
            value = self._byte_items.checked(item.storage_index.fqn, content)
            with self._planner_lock:
                self._planner.load_bytes(item, value)
            return
        with self._decoding(target):
            if getattr(target.info, "transform_descriptors", None):
                tensor = framing.load_tensor(self._untransformed(target, data))
            else:
                tensor = framing.unframe_tensor(data, target.dtype, target.sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if length != tensor.shape[dim]:
                    tensor = tensor.narrow(dim, offset, length)
        self._deliver(item, tensor)

    def _take_rows(self, target: _Target, strides: Sequence[int], data: Buffer) -> None:
        self._deliver(target.item, framing.rows_from_payload(data, target.dtype, strides, target.item.lengths))

    def _check(self, target: _Target, buffers: Sequence[Buffer]) -> None:
        if self._source.checksums is None:
            with self._planner_lock:
                self._report.num_unverified += 1
            return
        name, offset = target.info.relative_path, target.info.offset
        # Of small items there are too many to look at.
        with self._source.trace.span("checksum") if target.info.length >= MIN_LANDING_BYTES else NO_SPAN:
            check_item(
                self._source.checksums, name, offset, buffers, lambda: self._what(target.item.storage_index.fqn, name)
            )
        with self._planner_lock:
            self._report.num_verified += 1

    def _check_other(self, name: str, offset: int, data: Buffer) -> None:
        what = f"an item of {len(data)} bytes"
        check_item(self._source.checksums or {}, name, offset, [data], lambda: self._what(what, name))

    def _what(self, item: str, name: str) -> str:
        return f"{item} in {self._source.store.url_of(name)}"

    def _where(self, target: _Target) -> str:
        info = target.info
        return f"{target.item.storage_index.fqn} in {self._source.store.url_of(info.relative_path)} at {info.offset}"

    def _decoding(self, target: _Target) -> "_Decoding":
        return _Decoding(lambda: self._where(target))

    def _untransformed(self, target: _Target, data: Buffer) -> bytes:
        descriptors = getattr(target.info, "transform_descriptors", None) or ()
        stream: IO[bytes] = io.BytesIO(data)
        try:
            extensions = self._source.extension_registry.from_descriptor_list(descriptors)
        except ValueError as error:
            raise ConfigurationError(
                f"{self._where(target)} was written through {', '.join(descriptors)}: {error}. Register it "
                "with a registry passed as extension_registry."
            ) from error
        limit = self._max_untransformed_bytes(target)
        with self._decoding(target):
            for extension in extensions:
                if isinstance(extension, StreamTransformExtension):
                    stream = extension.transform_from(stream)
            content = b"".join(_chunks(stream, limit + 1))
        if len(content) > limit:
            raise CorruptCheckpointError(
                f"{self._where(target)} grows to more than {limit} bytes, which is too much for what it is said to "
                "be; if it is a Python value, raise memory_budget_bytes"
            )
        return content

    def _max_untransformed_bytes(self, target: _Target) -> int:
        if target.item.type == LoadItemType.BYTE_IO:
            return max(self._transfer.budget_bytes, target.info.length)
        return framing.max_frame_bytes(target.dtype, target.sizes)

    def _deliver(self, item: ReadItem, tensor: torch.Tensor) -> None:
        destination = self._destination(item)
        if destination.layout != torch.strided:
            raise IncompatibleStateError(f"{item.dest_index.fqn}: cannot be loaded into a {destination.layout} tensor")
        if destination.size() != tensor.size():
            raise IncompatibleStateError(
                f"{item.dest_index.fqn}: stored {tuple(tensor.size())}, wanted {tuple(destination.size())}"
            )
        try:
            destination.copy_(tensor)
        except RuntimeError as error:
            raise IncompatibleStateError(
                f"{item.dest_index.fqn}: cannot be loaded into a tensor of dtype {destination.dtype}, strides "
                f"{destination.stride()}: {error}"
            ) from error
        with self._planner_lock:
            self._planner.commit_tensor(item, destination)

    def _destination(self, item: ReadItem) -> torch.Tensor:
        """Ask the planner once where an item goes."""
        with self._planner_lock:
            known = self._resolved.pop(id(item), None)
            return self._planner.resolve_tensor(item).detach() if known is None else known

    def _commit(self, item: ReadItem, destination: torch.Tensor) -> None:
        tell_autograd(destination)
        with self._planner_lock:
            self._planner.commit_tensor(item, destination)


def _chunks(stream: IO[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Read a stream to its end, or until there are `limit_bytes`."""
    while limit_bytes > 0 and (chunk := stream.read(min(limit_bytes, _CHUNK_BYTES))):
        limit_bytes -= len(chunk)
        yield chunk


def _wants_nothing(item: ReadItem) -> bool:
    return item.type != LoadItemType.BYTE_IO and 0 in item.lengths


class _Decoding:
    """Turn whatever a decoder raises on damaged bytes into one error that names the item."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DcpFsspecError):
            raise CorruptCheckpointError(
                f"{self._where()} cannot be decoded ({type(error).__name__}: {error}): it is damaged or hostile"
            ) from error
