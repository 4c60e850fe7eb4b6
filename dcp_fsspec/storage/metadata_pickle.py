"""Write the pickle of ``.metadata``, what there are millions of as tables of opcodes.

The result is a pickle like any other: `pickle.load` makes the same objects of it. Two things make it faster to write
and to read, and half as long. Records that differ only in their values are rows of a table: the columns that are the
same in all of them are opcodes, and numpy fills in the others. And only what is referred to again is remembered, while
`pickle` remembers every object.

It begins with all that occurs more than once (classes, keys, names of files, shapes, index hints), which is dropped
again after it has been remembered.
"""

import dataclasses
import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_fsspec.storage.results import FileResult
from dcp_fsspec.storage.torch_internals import StorageInfo

_PROTOCOL = 3
"""Of what `pickle` writes: the last one without frames, so that parts can be joined. All of it is protocol 4."""
_BATCH = 10_000
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Metadata: (),
    MetadataIndex: ("fqn", "offset", "index"),
    StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    ChunkStorageMetadata: ("offsets", "sizes"),
}
_CLOSING = pickle.SETITEMS + pickle.BUILD
_CHUNKS_ARE_KNOWN = _ATTRIBUTES[ChunkStorageMetadata] == tuple(
    field.name for field in dataclasses.fields(ChunkStorageMetadata)
)

_Array = np.ndarray[Any, np.dtype[Any]]
_Code = bytes | _Array
"""Code that is the same in every row of a table, or a number for each row."""
_C = TypeVar("_C", bound=_Code)


def dumps(metadata: Metadata, files: Iterable[FileResult]) -> bytes:
    """Return the pickle of `metadata`.

    Args:
        metadata: All of it but `storage_data`.
        files: What belongs there.
    """
    parts = _Writer(metadata, list(files)).parts()
    return b"".join((pickle.PROTO + b"\4", *itertools.chain.from_iterable(map(_frame, parts)), pickle.STOP))


def _frame(part: bytes) -> Iterator[bytes]:
    """Say how long `part` is, so that it is read at once: not every file can be looked ahead into."""
    yield pickle.FRAME + len(part).to_bytes(8, "little")
    yield part


class _Writer:
    """Writes one pickle."""

    def __init__(self, metadata: Metadata, files: list[FileResult]) -> None:
        self._metadata = metadata
        self._files = files
        self._tensors = {fqn: record for fqn, record in metadata.state_dict_metadata.items() if _is_plain(record)}
        chunks = [chunk for record in self._tensors.values() for chunk in record.chunks]
        self._chunks = list(map(attrgetter("offsets"), chunks)), list(map(attrgetter("sizes"), chunks))
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, _PROTOCOL)
        self._places: dict[Hashable, int] = {}

    def parts(self) -> Iterator[bytes]:
        """Return the pickle in parts, without its first and last opcode."""
        yield self._preamble()
        yield self._opening(Metadata)
        for name, value in vars(self._metadata).items():
            yield self._fragment(name)
            if name == "state_dict_metadata":
                yield pickle.EMPTY_DICT + b"".join(self._state())
            elif name == "storage_data":
                yield pickle.EMPTY_DICT
                yield from self._storage()
            else:
                yield self._fragment(value)
        yield _CLOSING

    def _preamble(self) -> bytes:
        """Return the code that remembers all that occurs often and leaves nothing on the stack."""
        files = self._files
        attributes = dict.fromkeys(name for names in _ATTRIBUTES.values() for name in names)
        numbers = dict.fromkeys(itertools.chain((None,), *(file.numbers for file in files)))
        texts = dict.fromkeys(itertools.chain(self._metadata.state_dict_metadata, *(file.fqns for file in files)))
        texts |= dict.fromkeys(file.name for file in files)
        sizes = dict.fromkeys(itertools.chain(*self._chunks, *(file.offsets for file in files)))
        shapes = [size if type(size) is torch.Size else torch.Size(size) for size in sizes if size is not None]
        code = self._remember([*_ATTRIBUTES, *attributes])  # First: small numbers take less room.
        code += self._remember_numbers(numbers)
        code += self._remember([*(text for text in texts if text not in attributes), *shapes])
        return pickle.MARK + code + pickle.POP_MARK

    def _remember(self, values: Sequence[Hashable]) -> bytes:
        code = self._fragment(values)
        memo = self._pickler.memo.copy()
        self._places |= {value: memo[id(value)][0] for value in values}
        return code

    def _remember_numbers(self, numbers: Collection[int | None]) -> bytes:
        """Do what `pickle` does not do for numbers."""
        memo = self._pickler.memo.copy()
        places: dict[Hashable, int] = dict(zip(numbers, itertools.count(len(memo)), strict=False))
        self._pickler.memo = {**memo, **{id(number): (place, number) for number, place in places.items()}}
        self._places |= places
        return b"".join(self._fragment(number) + _at(place, put=True) for number, place in places.items())

    def _fragment(self, value: object) -> bytes:
        """Return the code that makes `value`, as `pickle` writes it."""
        self._stream.seek(0)
        self._stream.truncate()
        self._pickler.dump(value)
        return self._stream.getvalue()[2:-1]

    def _known(self, value: Hashable) -> bytes:
        return _at(self._places[value])

    def _opening(self, cls: type) -> bytes:
        return self._known(cls) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK

    def _record(self, cls: type, *values: tuple[_C, ...]) -> Iterator[bytes | _C]:
        """Return the code that makes an object with `values` in its attributes."""
        yield self._opening(cls)
        for name, value in zip(_ATTRIBUTES[cls], values, strict=False):
            yield self._known(name)
            yield from value
        yield _CLOSING

    def _all_known(self, values: Collection[Hashable]) -> tuple[_Code, ...]:
        places = map(self._places.__getitem__, values)
        return pickle.LONG_BINGET, np.fromiter(places, dtype="<u4", count=len(values))

    def _state(self) -> Iterator[bytes]:
        chunks = _table(self._record(ChunkStorageMetadata, *map(self._all_known, self._chunks)), len(self._chunks[0]))
        begin = 0
        for fqn, record in self._metadata.state_dict_metadata.items():
            yield self._known(fqn)
            tensor = self._tensors.get(fqn)
            if tensor is None:
                yield self._fragment(record)
            else:
                end = begin + len(tensor.chunks)
                rows = pickle.EMPTY_LIST, pickle.MARK, chunks[begin:end].tobytes(), pickle.APPENDS
                common = (self._fragment(tensor.properties),), (self._fragment(tensor.size),)
                yield from self._record(TensorStorageMetadata, *common, rows)
                begin = end
            yield pickle.SETITEM

    def _storage(self) -> Iterator[bytes]:
        alike: defaultdict[tuple[str, ...], list[FileResult]] = defaultdict(list)
        for file in self._files:
            alike[tuple(file.transforms or ())].append(file)
        for transforms, files in alike.items():
            table = self._items(files, [(self._fragment(list(transforms)),)] if transforms else [])
            for begin in range(0, len(table), _BATCH):
                yield pickle.MARK + table[begin : begin + _BATCH].tobytes() + pickle.SETITEMS

    def _items(self, files: Sequence[FileResult], transforms: Sequence[tuple[_Code, ...]]) -> _Array:
        rows = np.concatenate([np.frombuffer(file.rows, dtype=np.int64) for file in files]).reshape(-1, 4)
        index = self._record(
            MetadataIndex,
            self._all_known(list(itertools.chain.from_iterable(file.fqns for file in files))),
            self._all_known(list(itertools.chain.from_iterable(file.offsets for file in files))),
            self._all_known(list(itertools.chain.from_iterable(file.numbers for file in files))),
        )
        paths = np.repeat([self._places[file.name] for file in files], [len(file.fqns) for file in files])
        path = pickle.LONG_BINGET, paths.astype("<u4")
        info = self._record(StorageInfo, path, _numbers(rows[:, 0]), _numbers(rows[:, 1]), *transforms)
        return _table(itertools.chain(index, info), len(rows))


def _is_plain(record: object) -> TypeGuard[TensorStorageMetadata]:
    """Tell whether `record` and its chunks can be written as rows."""
    if type(record) is not TensorStorageMetadata or tuple(vars(record)) != _ATTRIBUTES[TensorStorageMetadata]:
        return False
    if not _CHUNKS_ARE_KNOWN or set(map(type, record.chunks)) - {ChunkStorageMetadata}:
        return False
    shapes = map(attrgetter("offsets", "sizes"), record.chunks)
    return not set(map(type, itertools.chain.from_iterable(shapes))) - {torch.Size}


def _numbers(column: _Array) -> tuple[_Code, ...]:
    if not len(column) or column.max() < 1 << 31:
        return pickle.BININT, column.astype("<i4")
    return pickle.LONG1 + b"\x08", column.astype("<i8")


def _table(columns: Iterable[_Code], num_rows: int) -> _Array:
    """Return the bytes of `num_rows` rows, as long as each other."""
    parts = [np.void(part) if isinstance(part, bytes) else part for part in columns]
    table = np.empty(num_rows, dtype=[(f"f{number}", part.dtype) for number, part in enumerate(parts)])
    for name, part in zip(table.dtype.names or (), parts, strict=True):
        table[name] = part
    return table.view(np.uint8).reshape(num_rows, table.itemsize)


def _at(place: int, *, put: bool = False) -> bytes:
    short, long = (pickle.BINPUT, pickle.LONG_BINPUT) if put else (pickle.BINGET, pickle.LONG_BINGET)
    return short + bytes([place]) if place < 256 else long + place.to_bytes(4, "little")
