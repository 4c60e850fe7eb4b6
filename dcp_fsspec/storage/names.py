"""How DCP calls the files of a checkpoint. Pure, and quick to import."""

import re
import zlib
from collections.abc import Iterable

FILE_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"
_SPREAD = re.compile("[0-9a-f]{2}")


def file_name(rank: int | None = None) -> str:
    """Return the name of the metadata file, or of the one that `rank` wrote without collectives."""
    return FILE_NAME if rank is None else f"__{rank}{FILE_NAME}"


def spread(name: str) -> str:
    """Return `name` below one of 256 folders that it tells: neighbours get keys that begin differently."""
    return f"{zlib.crc32(name.encode()) >> 24:02x}/{name}"


def unspread(folder: str) -> str:
    """Return the checkpoint's folder of a shard file in `folder`, which may be one that `spread` has added."""
    above, _, last = folder.rpartition("/")
    return above if _SPREAD.fullmatch(last) else folder


def folders_of(names: Iterable[str]) -> list[str]:
    """Return the folders below the checkpoint's own in which files lie, without that one."""
    return sorted({name.rpartition("/")[0] for name in names} - {""})
