"""CRC32C of items and shard files, and the file that keeps them: ``checksums.json`` beside ``.metadata``.

The file belongs to one save, named by the save id in ``.metadata``. A save that may meet another one in the same
folder, for instance an overwrite, puts its id into the name of the file, as it does for its shard files; so one
write of ``.metadata`` swaps shard files and checksums together, and no two saves share a file.
"""

import functools
import itertools
import json
import re
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from fastcrc import crc32

from dcp_fsspec.errors import CorruptCheckpointError
from dcp_fsspec.storage.bulk import collection_held_off

FILE_NAME = "checksums.json"

_PREFIX = "dcp_fsspec-"
_FRESH_PREFIX = "dcp_fsspec-fresh-"
_SAVE_ID = re.compile(rf"(?:{_PREFIX}|{_FRESH_PREFIX})[0-9a-f\-]{{36}}")

_FORMAT_VERSION = 1
_MAX_NUMBER = 1 << 50
_POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), bits reversed, as in RFC 3720."""

_CHEAPER_AGAIN_BYTES = 64 << 10
"""Below this, going over the bytes again takes less time than joining two checksums."""

Buffer = bytes | bytearray | memoryview


def crc_of(buffers: Iterable[Buffer], before: int = 0) -> int:
    """Return the CRC32C of `buffers` one after the other. The interpreter lock is free meanwhile.

    Args:
        buffers: The bytes.
        before: CRC32C of what comes before them.
    """
    return functools.reduce(lambda crc, buffer: crc32.iscsi(buffer, crc), buffers, before)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of two texts joined, from the CRC32C of each and the length of the second.

    Appending n bytes multiplies the first checksum, a polynomial over GF(2), by x to the power 8 n.
    """
    return _multiply(_power_of_x(second_bytes), first) ^ second


def extend(first: int, buffers: Sequence[Buffer], crc: int, num_bytes: int) -> int:
    """Return the CRC32C of a text whose own is `first`, followed by `buffers` of `num_bytes`, whose own is `crc`."""
    if num_bytes < _CHEAPER_AGAIN_BYTES:
        return functools.reduce(lambda total, buffer: crc32.iscsi(buffer, total), buffers, first)
    return combine(first, crc, num_bytes)


@functools.lru_cache(maxsize=4096)
def _power_of_x(num_bytes: int) -> int:
    result, square = 1 << 31, 1 << 23  # 1 and x**8: the highest bit is the lowest power.
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        num_bytes >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@dataclass(frozen=True)
class ItemRecord:
    """What is kept of one item.

    Attributes:
        crc: CRC32C of the whole item.
        payload_at: Where the elements begin, in bytes from the item's start, if it is the frame of a plain tensor of
            just the dtype and shape that ``.metadata`` gives; otherwise 0. With it, rows can be read alone.
    """

    crc: int
    payload_at: int = 0


class ItemRows(Mapping[tuple[int, int], ItemRecord]):
    """The records of the items of one file, made of rows of numbers when they are asked for.

    Of a million items a rank asks for a thousand.

    Args:
        rows: Four numbers for each item, one after the other: offset, length, CRC32C, where the payload begins.
    """

    def __init__(self, rows: "array[int]") -> None:
        self.rows = rows

    @functools.cached_property
    def _records(self) -> dict[tuple[int, int], ItemRecord]:
        rows = zip(*(self.rows[column::4] for column in range(4)), strict=True)
        return {(start, length): ItemRecord(crc, payload_at) for start, length, crc, payload_at in rows}

    def __getitem__(self, place: tuple[int, int]) -> ItemRecord:
        return self._records[place]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._records!r})"


@dataclass(frozen=True)
class FileChecksums:
    """Checksums of one shard file.

    Attributes:
        num_bytes: Size of the file.
        crc: CRC32C of the whole file.
        items: Record of each item by its place, (offset, length) in bytes.
    """

    num_bytes: int
    crc: int
    items: Mapping[tuple[int, int], ItemRecord] = field(default_factory=dict)

    @classmethod
    def of_items(cls, items: Mapping[tuple[int, int], ItemRecord]) -> "FileChecksums":
        """Make the record of a file from those of its items.

        Raises:
            ValueError: they do not fill it without gaps.
        """
        crc = end = 0
        for (offset, length), item in sorted(items.items(), key=lambda entry: entry[0]):
            if offset != end:
                raise ValueError(f"items leave a gap or overlap at byte {end}")
            crc, end = combine(crc, item.crc, length), offset + length
        return cls(end, crc, items)

    @property
    def is_consistent(self) -> bool:
        """Whether the record of the file is what those of its items make."""
        try:
            return self == FileChecksums.of_items(self.items)
        except ValueError:
            return False


Section = Mapping[str, FileChecksums]
"""Checksums of one save: shard file name -> record."""


def new_save_id(*, fresh: bool) -> str:
    """Return the id of a new save.

    Args:
        fresh: The save uses file names that no other save has used.
    """
    return f"{_FRESH_PREFIX if fresh else _PREFIX}{uuid.uuid4()}"


def name_suffix(save_id: str) -> str:
    """Return what the save `save_id` adds to the names of its files."""
    return f"_{save_id[-8:]}" if save_id.startswith(_FRESH_PREFIX) else ""


def file_name(save_id: str | None) -> str | None:
    """Return the name of the file with the checksums of the save `save_id`, or None if others wrote it."""
    if save_id is None or not _SAVE_ID.fullmatch(save_id):
        return None
    stem, _, extension = FILE_NAME.partition(".")
    return f"{stem}{name_suffix(save_id)}.{extension}"


def encode(section: Section, save_id: str, metadata_crc: int) -> bytes:
    """Return the content of the file.

    Args:
        section: Checksums of the shard files.
        save_id: Of the save that they belong to.
        metadata_crc: CRC32C of the ``.metadata`` that will be written next.
    """
    head = {
        "format_version": _FORMAT_VERSION,
        "algorithm": "crc32c",
        "save_id": save_id,
        "metadata_crc32c": metadata_crc,
    }
    # Rows of numbers by hand: of a million, `json` writes half as many in the same time.
    files = ",".join(
        f'{json.dumps(name)}:{{"bytes":{file.num_bytes},"crc32c":{file.crc},"items":[{_rows_text(file.items)}]}}'
        for name, file in section.items()
    )
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},"files":{{{files}}}}}'.encode()


def _rows_text(items: Mapping[tuple[int, int], ItemRecord]) -> str:
    if isinstance(items, ItemRows):
        numbers = tuple(items.rows)
    else:
        rows = ((*place, item.crc, item.payload_at) for place, item in items.items())
        numbers = tuple(itertools.chain.from_iterable(rows))
    return ",".join(["[%d,%d,%d,%d]"] * (len(numbers) // 4)) % numbers


def decode(data: bytes, save_id: str, where: str, metadata_crc: int | None = None) -> Section:
    """Return the checksums of the save `save_id`.

    Args:
        data: Content of the file.
        save_id: Of the save that ``.metadata`` belongs to.
        where: Url of the file, for messages.
        metadata_crc: CRC32C of ``.metadata`` as it was read, if that is known.

    Raises:
        CorruptCheckpointError: the file cannot be read; or belongs to another save: another job has written into
            the same folder; or ``.metadata`` is not as it was written.
    """
    try:
        with collection_held_off():
            document = json.loads(data.decode())
            if document["format_version"] != _FORMAT_VERSION:
                raise ValueError(f"format version {document['format_version']!r}, this package knows {_FORMAT_VERSION}")
            owner, wanted = document["save_id"], document["metadata_crc32c"]
            section = {name: _file_record(record) for name, record in document["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(f"{where} is not readable as checksums: {error!r}") from error
    if owner != save_id:
        raise CorruptCheckpointError(
            f"{where} belongs to the save {owner}, .metadata to the save {save_id}: another job wrote into this folder "
            "at the same time, or a file was copied from elsewhere"
        )
    if metadata_crc not in (None, wanted):
        raise CorruptCheckpointError(
            f"the .metadata beside {where} is not as it was written (CRC32C {metadata_crc:08x}). Use another "
            "copy or an older checkpoint."
        )
    return section


def _file_record(record: dict[str, object]) -> FileChecksums:
    num_bytes, crc, items = _count(record["bytes"]), _count(record["crc32c"]), record["items"]
    if not isinstance(items, list):
        raise TypeError("a shard file's record has no list of items")
    if not set(map(type, itertools.chain.from_iterable(items))) <= {int}:
        raise TypeError("an item's record holds something else than counts")
    rows = np.array(items or np.empty((0, 4), dtype=np.int64))
    if rows.dtype != np.int64 or rows.shape != (len(items), 4):
        raise ValueError("an item's record is not four counts")
    if items and not 0 <= rows.min() <= rows.max() <= _MAX_NUMBER:
        raise ValueError("an item's record has an absurd count")
    return FileChecksums(num_bytes, crc, ItemRows(array("q", rows.tobytes())))


def _count(value: object) -> int:
    """Return a size, a place or a checksum as it may be.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{str(value)[:40]} where a number of bytes or a checksum belongs")
    return value


def check_item(section: Section, name: str, offset: int, buffers: Sequence[Buffer], what: Callable[[], str]) -> None:
    """Compare an item as it was read with what was written.

    Args:
        section: Checksums of its save.
        name: Its shard file.
        offset: Where it lies in the file.
        buffers: The whole item.
        what: Gives the item and its url, for messages.

    Raises:
        CorruptCheckpointError: it differs, or is not known.
    """
    record = section.get(name)
    expected = record.items.get((offset, sum(map(len, buffers)))) if record else None
    if expected is None:
        raise CorruptCheckpointError(f"{what()} at byte {offset}: {FILE_NAME} does not know this item")
    actual = crc_of(buffers)
    if actual != expected.crc:
        raise CorruptCheckpointError(
            f"{what()} at byte {offset}: the stored bytes are not those that were written (CRC32C {actual:08x}, wanted "
            f"{expected.crc:08x}). Use another copy or an older checkpoint."
        )
