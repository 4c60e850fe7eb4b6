"""Replace a small file only if it is still what was read, where the store can tell.

::

    with exchange(store, "pointer.txt") as file:
        now = file.read()
        ...                             # decide
        if not file.replace(wanted):    # somebody else was faster: read and decide again

A folder of this machine is locked meanwhile; S3 compares the tag of what was read with that of what stands there.
Other stores have nothing of the kind in fsspec: there, `Exchange.is_guarded` is false, and only a file that did not
exist is not replaced by mistake.
"""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from typing import Any, Protocol

from dcp_fsspec.errors import CheckpointExistsError, CheckpointNotFoundError, DcpFsspecError, StorageWriteError
from dcp_fsspec.storage.clients import streams
from dcp_fsspec.storage.filesystem import Store

logger = logging.getLogger(__name__)

_CONFLICT = 409
_NOT_UNDERSTOOD = (400, 501)


class Exchange:
    """One file, read and then perhaps replaced; see `exchange`.

    Attributes:
        is_guarded: A change that somebody else makes between `read` and `replace` is never lost.
    """

    def __init__(self, store: Store, name: str, way: "_Way", *, locked: bool) -> None:
        self._store = store
        self._name = name
        self._way = way
        self._version: Any = None
        self.is_guarded = locked or not isinstance(way, _Plain)

    def read(self) -> bytes | None:
        """Return what the file holds, None if there is none.

        Raises:
            StorageReadError: that could not be found out.
        """
        store, name = self._store, self._name
        try:
            data, self._version = self._way.read(store, name)
        except CheckpointNotFoundError:
            self._version = None
            return None
        return data

    def replace(self, data: bytes) -> bool:
        """Write the file, and return True; or return False, because it may no longer be what `read` has returned.

        False with `is_guarded` turned false: the store does not understand conditions, do without.

        Raises:
            StorageWriteError: the file is as it was.
        """
        store, name, version = self._store, self._name, self._version
        try:
            self._way.write(store, name, data, version)
        except (CheckpointExistsError, StorageWriteError) as error:
            return self._settle(data, error)
        return True

    def _settle(self, data: bytes, failure: DcpFsspecError) -> bool:
        """Find out what a write has done whose condition was not met, or whose answer was lost."""
        before, status = self._version, _status(failure)
        if self._store.holds(self._name, data, failure):
            return True
        if isinstance(failure, CheckpointExistsError):
            self.read()
            if before is not None and self._version == before:
                self.is_guarded = False  # Refused although nothing has changed.
        elif status in _NOT_UNDERSTOOD:
            self.is_guarded = False
        elif status != _CONFLICT:
            raise failure
        return False


@contextlib.contextmanager
def exchange(store: Store, name: str, *, conditions: bool = True) -> Iterator[Exchange]:
    """Give an `Exchange` of the file `name`, and hold what protects it. The folder must exist.

    Args:
        store: The folder.
        name: The file.
        conditions: Ask the store for conditions if it is one that should know them.
    """
    with contextlib.ExitStack() as stack:
        locked = store.capabilities.local and stack.enter_context(_locked(store))
        yield Exchange(store, name, _way_of(store) if conditions else _Plain(), locked=locked)


def guards(store: Store) -> bool:
    """Tell whether an `exchange` in the folder is usually guarded."""
    return store.capabilities.local or not isinstance(_way_of(store), _Plain)


@contextlib.contextmanager
def _locked(store: Store) -> Iterator[bool]:
    """Lock the folder itself, so that no lock file stays behind; the lock of a process that dies goes with it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = store.writing("", lambda: os.open(store.root, flags))
    try:
        yield _lock(store, descriptor)
    finally:
        with contextlib.suppress(OSError):
            # A process forked meanwhile shares the descriptor: closing it here would not be enough.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(store: Store, descriptor: int) -> bool:
    """Return whether the folder could be locked: network filesystems cannot, and a stopped process may hold it."""
    try:
        store.writing("", lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except DcpFsspecError as error:
        logger.debug("%s is not locked: %s", store.url, error)
        return False
    return True


class _Way(Protocol):
    """How a store reads a file together with its version, and writes on condition of a version (None: no file)."""

    def read(self, store: Store, name: str) -> tuple[bytes, Any]: ...

    def write(self, store: Store, name: str, data: bytes, version: Any) -> None: ...


def _way_of(store: Store) -> _Way:
    if store.capabilities.matches_tags:
        return _S3fs()
    return _Obstore() if streams(store.fs) == "obstore" else _Plain()


class _Plain:
    """No versions, so nothing is compared, except where there was no file."""

    def read(self, store: Store, name: str) -> tuple[bytes, Any]:
        return store.read(name), True

    def write(self, store: Store, name: str, data: bytes, version: Any) -> None:
        store.swap(name, data, create_only=version is None)


class _S3fs:
    def read(self, store: Store, name: str) -> tuple[bytes, Any]:
        store.fs.invalidate_cache(store.root)
        # The tag first: if the file changes in between, it is the tag that is outdated, and the write is refused.
        tag = store.reading(name, lambda: store.fs.info(store.path(name)).get("ETag"))
        return store.read(name), tag

    def write(self, store: Store, name: str, data: bytes, version: Any) -> None:
        condition = {"mode": "create"} if version is None else {"IfMatch": version}
        store.writing(name, lambda: store.fs.pipe_file(store.path(name), data, **condition))


class _Obstore:
    """By the store behind the fsspec layer, which knows no conditions; see `clients`."""

    def read(self, store: Store, name: str) -> tuple[bytes, Any]:
        def get() -> tuple[bytes, Any]:
            bucket, path = store.fs._split_path(store.path(name))
            answer = store.fs._construct_store(bucket).get(path)
            known = {key: answer.meta[key] for key in ("e_tag", "version") if answer.meta[key] is not None}
            return bytes(answer.bytes()), known

        return store.reading(name, get)

    def write(self, store: Store, name: str, data: bytes, version: Any) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> None:
            bucket, key = store.fs._split_path(store.path(name))
            try:
                mode = "create" if version is None else version
                store.fs._construct_store(bucket).put(key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError) as error:
                raise FileExistsError(f"{store.path(name)} has changed") from error

        store.writing(name, put)


def _status(error: BaseException | None) -> int | None:
    """Return the status that a store has answered with, if one of the causes of `error` knows it."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status
        error = error.__cause__
    return None
