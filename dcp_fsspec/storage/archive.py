"""Look at an archive that ``torch.save`` made before ``torch.load`` opens it.

``torch.load(weights_only=True)`` runs no stranger's code. It inflates what is compressed, takes the sizes in the pickle
for true, and calls functions that allocate by a number. So the archive is opened here first, by the rules of the
format that torch writes: nothing compressed, nothing that overlaps, every storage as long as the pickle says, and
every tensor inside of its storage. What passes cannot take more memory than the archive has bytes.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from dcp_fsspec.storage.archive_pickle import preview

Buffer = bytes | bytearray | memoryview

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL_16, _FULL_32 = 0xFFFF, 0xFFFFFFFF
_EXTRA_ZIP64 = 1


class ArchiveError(ValueError):
    """It is not an archive that torch writes. Nothing was run, nothing was allocated."""


@dataclass(frozen=True)
class _Directory:
    """Where the list of entries lies, `stop` exclusive, and how many there are."""

    start: int
    stop: int
    num_entries: int


def check_archive(data: Buffer) -> None:
    """Make sure that ``torch.load(weights_only=True)`` of `data` can only do what its size allows.

    Raises:
        ArchiveError, ValueError, pickle.UnpicklingError: it is damaged, or made to exhaust its reader.
    """
    records = records_of(data)
    name = next(iter(records), "").partition("/")[0]
    program = records.get(f"{name}/data.pkl")
    if program is None:
        raise ArchiveError("it has no data.pkl")
    prefix = f"{name}/data/"
    sizes = {key.removeprefix(prefix): len(record) for key, record in records.items() if key.startswith(prefix)}
    preview(bytes(program), sizes)


def records_of(data: Buffer) -> Mapping[str, memoryview]:
    """Return the entries of an archive by name, without a copy.

    Torch's reader and others agree about these bytes: where the lists are, that names differ in more than case.

    Raises:
        ArchiveError: an entry is compressed, lies outside, or shares bytes with others.
    """
    view = memoryview(data).cast("B")
    try:
        directory = _directory(view)
        records, position = {}, directory.start
        for _ in range(directory.num_entries):
            name, record, position = _entry(view, position, directory)
            if name.lower() in records:
                raise ArchiveError(f"it has two entries {name!r}")
            records[name.lower()] = name, record
    except (struct.error, UnicodeDecodeError) as error:
        raise ArchiveError(f"it is damaged ({error})") from error
    if position != directory.stop:
        raise ArchiveError("its list of entries has another length than it says")
    if sum(len(record) for _, record in records.values()) > directory.start:
        raise ArchiveError("its entries share bytes")
    return dict(records.values())


def _directory(view: memoryview) -> _Directory:
    end_at = len(view) - _END.size
    if end_at < 0:
        raise ArchiveError("it is too short for an archive")
    mark, disk, first_disk, here, total, size, start, comment = _END.unpack_from(view, end_at)
    if mark != b"PK\5\6" or comment or disk or first_disk or here != total:
        raise ArchiveError("it does not end like an archive of torch")
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= 0 and bytes(view[locator_at : locator_at + 4]) == b"PK\6\7":
        end_at = locator_at - _END64.size
        if end_at < 0 or _LOCATOR64.unpack_from(view, locator_at)[2] != end_at:
            raise ArchiveError("its ends contradict each other")
        mark, _, _, _, disk, first_disk, here, total, size, start = _END64.unpack_from(view, end_at)
        if mark != b"PK\6\6" or disk or first_disk or here != total:
            raise ArchiveError("its ends contradict each other")
    elif total == _FULL_16 or _FULL_32 in (size, start):
        raise ArchiveError("its long end is missing")
    if start + size != end_at:
        raise ArchiveError("its list of entries is not where it says")
    return _Directory(start, end_at, total)


def _entry(view: memoryview, position: int, directory: _Directory) -> tuple[str, memoryview, int]:
    """Return name and content of the entry that is listed at `position`, and where the next one is listed."""
    fields = _ENTRY.unpack_from(view, position)
    mark, _, _, flags, method = fields[:5]
    packed, size, name_bytes, extra_bytes, comment_bytes = fields[8:13]
    local_at = fields[16]
    name_at = position + _ENTRY.size
    extra_at = name_at + name_bytes
    after = extra_at + extra_bytes + comment_bytes
    if mark != b"PK\1\2" or after > directory.stop:
        raise ArchiveError("its list of entries is damaged")
    name = bytes(view[name_at:extra_at]).decode()
    size, packed, local_at = _long(view[extra_at : extra_at + extra_bytes], size, packed, local_at)
    if method or size != packed or flags & 1 or "\0" in name:
        raise ArchiveError(f"its entry {name!r} is compressed or encrypted, which torch never does")
    local = _LOCAL.unpack_from(view, local_at) if local_at < directory.start else (b"",)
    if local[0] != b"PK\3\4":
        raise ArchiveError(f"its entry {name!r} is not where it says")
    start = local_at + _LOCAL.size + local[9] + local[10]
    if start + size > directory.start:
        raise ArchiveError(f"its entry {name!r} is said to have {size} bytes, which are not there")
    return name, view[start : start + size], after


def _long(extra: memoryview, *values: int) -> list[int]:
    """Replace those of `values` that did not fit into 32 bits by what is in the entry's extra field."""
    numbers: list[int] = []
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == _EXTRA_ZIP64:
            numbers = [number for (number,) in struct.iter_unpack("<Q", extra[position + 4 :][: length // 8 * 8])]
            break
        position += 4 + length
    given = iter(numbers)
    return [next(given, value) if value == _FULL_32 else value for value in values]
