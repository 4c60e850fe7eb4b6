"""CRC32C of items and shard files, and the file that keeps them: ``checksums.json`` beside ``.metadata``.

The file holds one section per save, found by the save id in ``.metadata``. An overwrite carries the section of
the checkpoint that still stands along until ``.metadata`` is swapped, so a crash between the two writes leaves
the old checkpoint checkable.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from dcp_fsspec.errors import CorruptCheckpointError

FILE_NAME = "checksums.json"
SAVE_ID_PREFIX = "dcp_fsspec-"
"""Save ids that begin so always come with checksums; their absence then means damage, not a foreign writer."""

_FORMAT_VERSION = 1
_POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), bits reversed, as in RFC 3720."""

Buffer = bytes | bytearray | memoryview


def crc_of(buffers: Iterable[Buffer]) -> int:
    """Return the CRC32C of `buffers` one after the other. The interpreter lock is free meanwhile."""
    return functools.reduce(lambda crc, buffer: crc32c(buffer, crc), buffers, 0)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32C of two texts joined, from the CRC32C of each and the length of the second.

    Appending n bytes multiplies the first checksum, a polynomial over GF(2), by x to the power 8 n.
    """
    return _multiply(_power_of_x(second_bytes), first) ^ second


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
class FileChecksums:
    """Checksums of one shard file.

    Attributes:
        num_bytes: Size of the file.
        crc: CRC32C of the whole file.
        items: CRC32C of each item by its place, (offset, length) in bytes.
    """

    num_bytes: int
    crc: int
    items: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of_items(cls, items: Sequence[tuple[int, int, int]]) -> "FileChecksums":
        """Make the record of a file from the (offset, length, crc) of its items, which fill it without gaps."""
        crc = end = 0
        for offset, length, item_crc in sorted(items):
            if offset != end:
                raise AssertionError(f"items leave a gap or overlap at byte {end}")
            crc, end = combine(crc, item_crc, length), offset + length
        return cls(end, crc, {(offset, length): item_crc for offset, length, item_crc in items})


Section = Mapping[str, FileChecksums]
"""Checksums of one save: shard file name -> record."""


def encode(sections: Mapping[str, Section]) -> bytes:
    """Return the content of the file for saves by their ids."""
    saves = {
        save_id: {
            name: {
                "bytes": file.num_bytes,
                "crc32c": file.crc,
                "items": [[offset, length, crc] for (offset, length), crc in file.items.items()],
            }
            for name, file in section.items()
        }
        for save_id, section in sections.items()
    }
    document = {"format_version": _FORMAT_VERSION, "algorithm": "crc32c", "saves": saves}
    return json.dumps(document, separators=(",", ":")).encode()


def decode(data: bytes, save_id: str | None, where: str) -> Section | None:
    """Return the checksums of the save `save_id`, or None when the file knows none because others wrote it.

    Raises:
        CorruptCheckpointError: the file cannot be read, or belongs to other saves only although this one had its
            checksums written: another job has written into the same folder.
    """
    try:
        document = json.loads(data)
        if document["format_version"] != _FORMAT_VERSION:
            return None
        section = document["saves"].get(save_id)
        if section is not None:
            return {name: _file_record(record) for name, record in section.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is not readable as checksums: {error!r}") from error
    if save_id is not None and save_id.startswith(SAVE_ID_PREFIX):
        raise CorruptCheckpointError(
            f"{where} has no checksums of the save {save_id} that .metadata names: another job wrote into this "
            "folder at the same time, or a file was copied from elsewhere"
        )
    return None


def _file_record(record: dict[str, object]) -> FileChecksums:
    num_bytes, crc, items = record["bytes"], record["crc32c"], record["items"]
    if not isinstance(num_bytes, int) or not isinstance(crc, int) or not isinstance(items, list):
        raise TypeError("a shard file's record has values of the wrong type")
    return FileChecksums(num_bytes, crc, {(int(offset), int(length)): int(item) for offset, length, item in items})
