"""What ranks tell the coordinator of the items that they have written: a few columns for each file.

DCP gathers a list of `WriteResult` from every rank. Pickled one by one, a million of them keep the coordinator busy for
half a minute; so a rank's list is pickled as columns, and the coordinator goes on with these.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, overload

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsspec.storage.checksums import FileChecksums, ItemRecord, ItemRows
from dcp_fsspec.storage.torch_internals import StorageInfo


@dataclass(frozen=True)
class Written:
    """One item's place and record, in ``WriteResult.storage_data``.

    Attributes:
        info: Its place.
        record: Its record.
        file: The record of its file, without items; one object for all of them.
    """

    info: StorageInfo
    record: ItemRecord
    file: FileChecksums


@dataclass(frozen=True)
class FileResult:
    """What was written into one shard file.

    Attributes:
        name: Of the file.
        num_bytes: Its size.
        crc: CRC32C of the whole file.
        transforms: Descriptors of the transforms that its items went through, if there were any.
        fqns: The key of each item.
        offsets: Where each lies in its tensor.
        numbers: The index hint of each.
        rows: Four numbers for each item: offset and length in the file, CRC32C, where the payload begins.
    """

    name: str
    num_bytes: int
    crc: int
    transforms: Sequence[str] | None
    fqns: list[str] = field(default_factory=list)
    offsets: list[tuple[int, ...] | None] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)
    rows: "array[int]" = field(default_factory=lambda: array("q"))

    def add(self, index: MetadataIndex, written: Written) -> None:
        """Append an item."""
        self.fqns.append(index.fqn)
        self.offsets.append(None if index.offset is None else tuple(index.offset))
        self.numbers.append(index.index)
        info, record = written.info, written.record
        self.rows.extend((info.offset, info.length, record.crc, record.payload_at))

    def __reduce__(self) -> tuple[Any, ...]:
        # Many tensors are cut alike; `pickle` writes one tuple once.
        shared = {offset: offset for offset in self.offsets}
        columns = vars(self) | {"offsets": list(map(shared.get, self.offsets)), "rows": self.rows.tobytes()}
        return _file_result, tuple(columns.values())

    @property
    def item_bytes(self) -> int:
        """Bytes of all items."""
        return sum(self.rows[1::4])

    def places(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        """Return the index and the place of each item, as ``.metadata`` has them."""
        sizes: dict[tuple[int, ...] | None, torch.Size | None] = {None: None}
        columns = zip(self.fqns, self.offsets, self.numbers, self.rows[::4], self.rows[1::4], strict=True)
        for fqn, offset, number, start, length in columns:
            if offset not in sizes:
                sizes[offset] = torch.Size(cast(Sequence[int], offset))
            index = object.__new__(MetadataIndex)
            # As unpickling does; the constructor of a frozen class takes four times as long.
            object.__setattr__(index, "__dict__", {"fqn": fqn, "offset": sizes[offset], "index": number})
            yield index, StorageInfo(self.name, start, length, self.transforms)

    def checksums(self) -> FileChecksums:
        """Return the record of the file with those of its items."""
        return FileChecksums(self.num_bytes, self.crc, ItemRows(self.rows))


def _file_result(*columns: Any) -> FileResult:
    values = (*columns[:-1], array("q", columns[-1]))
    return FileResult(*values)


class Results(list[WriteResult]):
    """What one rank has written."""

    def __reduce__(self) -> tuple[Any, ...]:
        return GatheredResults, (by_file(self),)


class GatheredResults(Sequence[WriteResult]):
    """What one rank has written, as it arrives at the coordinator.

    Args:
        files: By file.
    """

    def __init__(self, files: list[FileResult]) -> None:
        self.files = files

    def __len__(self) -> int:
        return sum(len(file.fqns) for file in self.files)

    @overload
    def __getitem__(self, place: int) -> WriteResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[WriteResult]: ...

    def __getitem__(self, place: int | slice) -> WriteResult | list[WriteResult]:
        return self._all()[place]

    def __iter__(self) -> Iterator[WriteResult]:
        return iter(self._all())

    def _all(self) -> list[WriteResult]:
        results = []
        for file in self.files:
            whole = FileChecksums(file.num_bytes, file.crc)
            records = zip(file.rows[2::4], file.rows[3::4], strict=True)
            for (index, info), (crc, payload_at) in zip(file.places(), records, strict=True):
                written = Written(info, ItemRecord(crc, payload_at), whole)
                results.append(WriteResult(index=index, size_in_bytes=info.length, storage_data=written))
        return results


def by_file(results: Iterable[WriteResult]) -> list[FileResult]:
    """Return the results of one rank by file."""
    if isinstance(results, GatheredResults):
        return results.files
    files: dict[str, FileResult] = {}
    for result in results:
        written = cast(Written, result.storage_data)
        info = written.info
        file = files.get(info.relative_path)
        if file is None:
            # Before torch 2.6 there were no transforms.
            transforms = getattr(info, "transform_descriptors", None)
            file = FileResult(info.relative_path, written.file.num_bytes, written.file.crc, transforms)
            files[info.relative_path] = file
        file.add(result.index, written)
    return list(files.values())
