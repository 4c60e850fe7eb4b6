"""What each kind of filesystem can be trusted with, in one table.

fsspec gives every store the same methods, not the same promises. How to publish, commit and read follows from
the row of the table; nothing else in the package asks which filesystem it talks to.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dcp_fsspec.storage.clients import goes_direct, streams


@dataclass(frozen=True)
class Capabilities:
    """One row of the table.

    Attributes:
        local: A folder of this machine, written through the operating system.
        atomic_put: ``pipe_file`` makes the whole object appear at once or not at all.
        create_only: ``pipe_file(mode="create")`` refuses an existing object in the same request. A store may
            still ignore it in silence, so a look comes before it in any case.
        ranges: ``cat_file(start, end)`` transfers no more than it was asked for.
        threads: The plain synchronous calls may be made from many threads.
        moves: ``mv`` is the filesystem's own rename, takes names literally, and needs no copy.
        of_process: What is written is seen by this process alone.
        folders: Folders have to be made before files can be put in them. Never true of a store with buckets:
            making a "folder" there could create a bucket.
        forbidden: Characters that names cannot have: the client would read them as something else.
        shard_bytes: Size at which shard files do best.
        max_concurrency: Requests in flight that do best.
        read_concurrency: The same of reads, where it differs.
        write_copies: How many copies of its data a write holds while it is sent.
        read_copies: How many copies of its data a read holds besides the memory that it fills.
        read_options: Passed to each ``cat_file`` of a whole object.
        removes_many: ``rm`` of a list removes up to a thousand objects in one request.
        copies: ``cp_file`` copies within the store, so that nothing passes through this machine.
        multipart: It speaks S3's multipart uploads, through ``call_s3``.
        matches_tags: ``info`` tells the object's ``ETag``, and ``pipe_file`` takes it as ``IfMatch``: then it replaces
            nothing else. A store may still ignore that.
        takes_crc32c: ``pipe_file`` takes the content's CRC32C, which the store then compares with what arrived.
    """

    local: bool = False
    atomic_put: bool = False
    create_only: bool = False
    ranges: bool = True
    threads: bool = True
    moves: bool = False
    of_process: bool = False
    folders: bool = True
    forbidden: str = ""
    shard_bytes: int = 8 << 20
    max_concurrency: int = 32
    read_concurrency: int | None = None
    write_copies: int = 2
    read_copies: int = 1
    read_options: Mapping[str, Any] = field(default_factory=dict)
    removes_many: bool = False
    copies: bool = False
    multipart: bool = False
    matches_tags: bool = False
    takes_crc32c: bool = False

    def threads_for(self, max_concurrency: int | None, *, reading: bool = False) -> int:
        """Return how many threads to use when the caller asks for `max_concurrency`, or for what does best."""
        best = self.read_concurrency if reading and self.read_concurrency else self.max_concurrency
        return (max_concurrency or best) if self.threads else 1


_OBJECT_STORE = Capabilities(atomic_put=True, create_only=True, folders=False)

_BY_PACKAGE: Mapping[str, Capabilities] = {
    # s3fs asks for the size first unless told that one request will do.
    "s3fs": replace(
        _OBJECT_STORE,
        read_options={"max_concurrency": 1},
        removes_many=True,
        copies=True,
        multipart=True,
        matches_tags=True,
        takes_crc32c=True,
    ),
    "gcsfs": replace(_OBJECT_STORE, copies=True),
    "adlfs": _OBJECT_STORE,
    # obstore's fsspec layer takes mode="create" and overwrites. By its common methods, more than 5 MiB go up in several
    # requests, and what comes down is copied from Rust's memory into Python's.
    "obstore": replace(
        _OBJECT_STORE, create_only=False, copies=True, shard_bytes=9 << 19, write_copies=1, read_copies=2
    ),
    "ossfs": replace(_OBJECT_STORE, create_only=False),
    "ocifs": replace(_OBJECT_STORE, create_only=False),
    "tosfs": replace(_OBJECT_STORE, create_only=False),
    "webdav4": Capabilities(max_concurrency=8, forbidden="%?#"),
    # sshfs takes start and end and returns the whole file.
    "sshfs": Capabilities(ranges=False, threads=False, max_concurrency=1),
}

_STREAMED: Mapping[str, dict[str, Any]] = {
    "s3fs": {"write_copies": 0, "read_copies": 0},
    "obstore": {"write_copies": 0},
}
"""What changes where buffers go up and down without a copy; see `clients`."""
_DIRECT: Mapping[str, Any] = {"write_copies": 0, "read_copies": 0, "shard_bytes": 8 << 20, "read_concurrency": 64}
"""What changes where they go past the filesystem. A read in flight holds no memory but its target then."""

_LOCAL = Capabilities(
    local=True,
    atomic_put=True,
    create_only=True,
    shard_bytes=256 << 20,
    max_concurrency=4,
    write_copies=0,
    read_copies=0,
)
_MEMORY = replace(_OBJECT_STORE, max_concurrency=4, of_process=True)
_UNKNOWN_ASYNC = Capabilities()
_UNKNOWN_SYNC = Capabilities(threads=False, max_concurrency=1)


def capabilities_of(fs: AbstractFileSystem) -> Capabilities:
    """Look `fs` up; what is not in the table gets the most careful row that fits."""
    if isinstance(fs, DirFileSystem):
        # A subclass (plain ones are looked through): its own methods, the promises of what is behind it.
        inner = capabilities_of(fs.fs)
        return Capabilities(max_concurrency=4, moves=True) if inner.local else inner
    row = replace(_row_of(fs), **_STREAMED.get(streams(fs), {}))
    if goes_direct(fs):
        row = replace(row, **_DIRECT)
    # webdav4's own mv hands on to the one of fsspec.
    own_mv = type(fs).mv is not AbstractFileSystem.mv and not type(fs).__module__.startswith("webdav4")
    return replace(row, moves=own_mv, read_options=_known_options(fs, row.read_options))


def _known_options(fs: AbstractFileSystem, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what an older version of the filesystem does not know."""
    known = inspect.signature(getattr(fs, "_cat_file", fs.cat_file)).parameters
    return {name: value for name, value in options.items() if name in known}


def _row_of(fs: AbstractFileSystem) -> Capabilities:
    if type(fs) is LocalFileSystem:
        return _LOCAL
    if isinstance(fs, LocalFileSystem):
        # A subclass may have changed anything: keep to its own methods.
        return Capabilities(max_concurrency=4)
    if isinstance(fs, MemoryFileSystem):
        return _MEMORY
    # A subclass of a known class, wherever it is defined, is as good as that class.
    for cls in type(fs).__mro__:
        known = _BY_PACKAGE.get(cls.__module__.partition(".")[0])
        if known:
            return known
    return _UNKNOWN_ASYNC if isinstance(fs, AsyncFileSystem) else _UNKNOWN_SYNC


def look_through(fs: AbstractFileSystem, path: str, *, chained: bool) -> tuple[AbstractFileSystem, str]:
    """Look through wrappers to the store behind them.

    A cache (``simplecache::`` and its kin) answers with what it saw last, which after an overwrite is a mix of two
    checkpoints; and the ranges read here are each needed once.

    Args:
        fs: A filesystem, wrapped or not.
        path: A path on it.
        chained: It was made from a chained url; of ``dir::URL``, fsspec gives the folder twice.
    """
    while True:
        if isinstance(fs, CachingFileSystem):
            fs = fs.fs
            path = fs._strip_protocol(path)
        elif type(fs) is DirFileSystem:
            path = fs.path if chained and path == fs.path else fs._join(path)
            fs = fs.fs
        else:
            return fs, path
