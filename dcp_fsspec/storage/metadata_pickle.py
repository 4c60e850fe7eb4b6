"""Write the pickle of ``.metadata``, what there are millions of opcode by opcode.

The result is a pickle like any other: `pickle.load` makes the same objects of it. Two things make it faster to write
and to read, and half as long. Records that differ only in their values are made of a few bytes each, instead of asking
each of them how it is pickled. And only what is referred to again is remembered, while `pickle` remembers every object.

It begins with a list of all that occurs more than once (classes, keys, names of files, shapes), which is dropped again
after it has been remembered.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_fsspec.storage.torch_internals import StorageInfo

_PROTOCOL = 3
"""The last one without frames, so that parts can be joined. Opcodes as in the module `pickle`."""
_BATCH = 1000
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Metadata: (),
    MetadataIndex: ("fqn", "offset", "index"),
    StorageInfo: ("relative_path", "offset", "length"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    ChunkStorageMetadata: ("offsets", "sizes"),
}


def dumps(metadata: Metadata) -> bytes:
    """Return the pickle of `metadata`."""
    return b"".join(_Writer(metadata).parts())


class _Writer:
    """Writes one pickle."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, _PROTOCOL)
        self._sizes: dict[torch.Size, bytes] = {}
        self._texts: dict[str, bytes] = {}

    def parts(self) -> Iterator[bytes]:
        """Return the pickle in parts."""
        yield pickle.PROTO + bytes([_PROTOCOL])
        yield self._preamble()
        yield self._opening(Metadata)
        for name, value in self._metadata.__dict__.items():
            yield self._fragment(name)
            if name == "state_dict_metadata" and type(value) is dict:
                yield from _dict(map(self._tensor, value.items()))
            elif name == "storage_data" and type(value) is dict:
                yield from _dict(self._places(value))
            else:
                yield self._fragment(value)
        yield _CLOSING + pickle.STOP

    def _preamble(self) -> bytes:
        """Return the code that remembers all that occurs often and leaves nothing on the stack."""
        texts = dict.fromkeys(name for names in _ATTRIBUTES.values() for name in names)
        texts |= dict.fromkeys(self._metadata.state_dict_metadata)
        texts |= dict.fromkeys(info.relative_path for info in (self._metadata.storage_data or {}).values())
        sizes: dict[torch.Size, None] = {}
        for record in self._metadata.state_dict_metadata.values():
            if type(record) is TensorStorageMetadata:
                # The offsets of the places are among these.
                for one in ([chunk.offsets for chunk in record.chunks], [chunk.sizes for chunk in record.chunks]):
                    if set(map(type, one)) == {torch.Size}:
                        sizes |= dict.fromkeys(one)
        common = [list(_ATTRIBUTES), list(texts), list(sizes)]
        code = self._fragment(common) + pickle.POP
        numbers = {number: _get(place) for number, (place, _) in self._pickler.memo.copy().items()}
        self._texts = {text: numbers[id(text)] for text in texts}
        self._sizes = {size: numbers[id(size)] for size in sizes}
        self._openings = {
            cls: numbers[id(cls)] + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
            for cls in _ATTRIBUTES
        }
        return code

    def _fragment(self, value: object) -> bytes:
        """Return the code that makes `value`, as `pickle` writes it."""
        self._stream.seek(0)
        self._stream.truncate()
        self._pickler.dump(value)
        return self._stream.getvalue()[2:-1]

    def _opening(self, cls: type) -> bytes:
        return self._openings[cls]

    def _size(self, value: Any) -> bytes:
        known = self._sizes.get(value) if type(value) is torch.Size else None
        return self._fragment(value) if known is None else known

    def _tensor(self, item: tuple[str, Any]) -> bytes:
        fqn, record = item
        if type(record) is not TensorStorageMetadata or tuple(vars(record)) != _ATTRIBUTES[TensorStorageMetadata]:
            return self._texts[fqn] + self._fragment(record)
        properties, size, chunks = (self._texts[name] for name in _ATTRIBUTES[TensorStorageMetadata])
        parts = [self._texts[fqn], self._opening(TensorStorageMetadata)]
        parts += [properties, self._fragment(record.properties), size, self._fragment(record.size)]
        parts += [chunks, pickle.EMPTY_LIST, pickle.MARK, *self._chunks(record.chunks), pickle.APPENDS, _CLOSING]
        return b"".join(parts)

    def _chunks(self, chunks: Iterable[ChunkStorageMetadata]) -> Iterator[bytes]:
        opening = self._opening(ChunkStorageMetadata)
        first, second = (self._texts[name] for name in _ATTRIBUTES[ChunkStorageMetadata])
        first = opening + first
        size = self._size
        for chunk in chunks:
            if type(chunk) is ChunkStorageMetadata and len(vars(chunk)) == 2:
                yield b"%b%b%b%b%b" % (first, size(chunk.offsets), second, size(chunk.sizes), _CLOSING)
            else:
                yield self._fragment(chunk)

    def _places(self, places: Mapping[MetadataIndex, StorageInfo]) -> Iterator[bytes]:
        fqn, offset, number = (self._texts[name] for name in _ATTRIBUTES[MetadataIndex])
        path, start, length = (self._texts[name] for name in _ATTRIBUTES[StorageInfo])
        fqn, path = self._opening(MetadataIndex) + fqn, _CLOSING + self._opening(StorageInfo) + path
        texts, size = self._texts, self._size
        for index, info in places.items():
            if _is_plain(index, info):
                yield b"".join(
                    (
                        *(
                            fqn,
                            texts.get(index.fqn) or self._fragment(index.fqn),
                            offset,
                            size(index.offset),
                            number,
                            _number(index.index),
                        ),
                        *(path, texts[info.relative_path], start, _number(info.offset), length, _number(info.length)),
                        _CLOSING,
                    )
                )
            else:
                yield self._fragment(index) + self._fragment(info)


_CLOSING = pickle.SETITEMS + pickle.BUILD


def _is_plain(index: MetadataIndex, info: StorageInfo) -> bool:
    return (
        type(index) is MetadataIndex
        and type(info) is StorageInfo
        and len(vars(index)) == 3
        and not getattr(info, "transform_descriptors", None)
    )


def _dict(entries: Iterable[bytes]) -> Iterator[bytes]:
    """Return the code of a dict of `entries`, each a key and a value."""
    yield pickle.EMPTY_DICT
    batch: list[bytes] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) == _BATCH:
            yield pickle.MARK + b"".join(batch) + pickle.SETITEMS
            batch.clear()
    if batch:
        yield pickle.MARK + b"".join(batch) + pickle.SETITEMS


def _get(place: int) -> bytes:
    return pickle.BINGET + bytes([place]) if place < 256 else pickle.LONG_BINGET + place.to_bytes(4, "little")


def _small_numbers() -> list[bytes]:
    one = (pickle.BININT1 + bytes([number]) for number in range(1 << 8))
    two = (pickle.BININT2 + number.to_bytes(2, "little") for number in range(1 << 8, 1 << 16))
    return [*one, *two]


_SMALL = _small_numbers()


def _number(value: int | None) -> bytes:
    if value is None:
        return pickle.NONE
    if 0 <= value < 1 << 16:
        return _SMALL[value]
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little", signed=True)
