"""Files in one folder of any filesystem: publish whole objects, read them or ranges of them, list, remove.

A `Store` is one checkpoint folder. It calls fsspec's methods; `connection` says what becomes of each call.
"""

import base64
import errno
import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpFsspecError,
    StorageReadError,
    StorageWriteError,
)
from dcp_fsspec.storage import local
from dcp_fsspec.storage.checksums import crc_of
from dcp_fsspec.storage.moving import move_over
from dcp_fsspec.storage.removing import Removing
from dcp_fsspec.storage.retry import passes
from dcp_fsspec.storage.scratch import MAX_SCRATCH_BYTES
from dcp_fsspec.storage.streaming import (
    Source,
    abort_upload,
    modified_at,
    open_uploads,
    part_bytes_for,
    regrouped,
    upload_in_parts,
    write_stream,
)
from dcp_fsspec.storage.translation import NO_SUCH_FILE

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

_TEMPORARY_SUFFIX = ".tmp-"


class Store(Removing):
    """One checkpoint folder on any filesystem. Safe to use from many threads, to pickle and to fork."""

    # Reading -----------------------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        """Return the whole file `name`, never from a cache.

        Raises:
            CheckpointNotFoundError: there is no such file, folder or bucket.
            StorageReadError: anything else.
        """
        if self.capabilities.local:
            return self.reading(name, lambda: local.read(self.path(name)))
        return self.reading(name, lambda: self._cat(name, **self.capabilities.read_options))

    def read_range(self, name: str, start: int, stop: int) -> Buffer:
        """Return the bytes [start, stop) of the file `name`, `stop` exclusive, exactly that many.

        Raises what `read_into` raises.
        """
        if stop - start > MAX_SCRATCH_BYTES:
            return self.reading(name, lambda: self._large(name, start, stop))
        view = memoryview(bytearray(stop - start))
        self.read_into(name, start, [view])
        return view

    def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, with the bytes of the file `name` from byte `start` on.

        Raises:
            CheckpointNotFoundError: there is no such file.
            CorruptCheckpointError: it ends before the views are full.
            StorageReadError: anything else.
        """
        stop = start + sum(map(len, views))
        if stop > start:
            self.reading(name, lambda: self._exactly(name, start, stop, lambda: self._fill(name, start, views)))

    def _fill(self, name: str, start: int, views: Sequence[memoryview]) -> int:
        path = self.path(name)
        if self.capabilities.local:
            return local.read_into(path, start, views)
        self._forget(path)
        return self.client.read_into(path, start, views)

    def _large(self, name: str, start: int, stop: int) -> Buffer:
        """Read what may be absurdly large; nothing is allocated for bytes that are not there."""
        data: Buffer = b""

        def fetch() -> int:
            nonlocal data
            if self.capabilities.local:
                data = local.read_range(self.path(name), start, stop)
            else:
                data = self._cat(name, start=start, end=stop)
                # One that ignores ranges returns the whole file.
                data = memoryview(data)[start:stop] if len(data) > stop - start else data
            return len(data)

        self._exactly(name, start, stop, fetch)
        return data

    def _exactly(self, name: str, start: int, stop: int, fetch: Callable[[], int]) -> None:
        try:
            num_bytes = fetch()
        except Exception as error:
            if not passes(error) and not isinstance(error, FileNotFoundError | PermissionError):
                # Perhaps the range lies beyond the end, for which each library has an error of its own.
                self._check_size(name, stop)
            raise
        if num_bytes < stop - start:
            self._check_size(name, stop)
            raise EOFError(f"wanted {stop - start} bytes from byte {start}, got {num_bytes}")

    def _check_size(self, name: str, stop: int) -> None:
        self.fs.invalidate_cache(self.root)
        size = self.fs.info(self.path(name))["size"]
        if size < stop:
            raise CorruptCheckpointError(
                f"{self.url_of(name)} is cut short: it has {size} bytes, .metadata says at least {stop}. "
                "Use another copy or an older checkpoint."
            )

    def _cat(self, name: str, **options: Any) -> bytes:
        path = self.path(name)
        self._forget(path)
        data: bytes = self.fs.cat_file(path, **options)
        return data

    def _forget(self, path: str) -> None:
        """Some filesystems remember the size or the listing from before another process wrote."""
        self.fs.invalidate_cache(path.rpartition("/")[0])

    def list_files(self) -> dict[str, int]:
        """Return the names (relative to the folder) and sizes in bytes of all files below the folder."""
        return {name: int(info["size"]) for name, info in self._find().items()}

    def list_times(self) -> dict[str, tuple[int, float | None]]:
        """Return size and time of the last change, seconds since 1970, of all files below; None: it is not known."""
        return {name: (int(info["size"]), modified_at(info)) for name, info in self._find().items()}

    def _find(self) -> dict[str, dict[str, Any]]:
        prefix = self.root.rstrip("/") + "/" if self.root else ""

        def find() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.root, detail=True)
            except NO_SUCH_FILE:
                return {}
            return {
                path.removeprefix(prefix): info
                for path, info in found.items()
                if info["type"] == "file" and path.startswith(prefix) and path != prefix
            }

        return self.reading("", find)

    def list_folder(self) -> dict[str, bool]:
        """Return the names of what lies directly in the folder; True for those that are folders themselves.

        An empty one if there is no folder. Some object stores list a folder for a while after it was emptied.
        """
        prefix = self.root.rstrip("/") + "/" if self.root else ""

        def ls() -> dict[str, bool]:
            self.fs.invalidate_cache(self.root)
            try:
                found = self.fs.ls(self.root, detail=True)
            except (*NO_SUCH_FILE, NotADirectoryError):
                return {}
            entries = {info["name"].rstrip("/").removeprefix(prefix): info["type"] == "directory" for info in found}
            # Of a file, and of a marker object for the folder itself, ls returns that very entry.
            return {name: is_folder for name, is_folder in entries.items() if name and "/" not in name}

        return self.reading("", ls)

    def exists(self, name: str) -> bool:
        """Tell whether there is a file `name`.

        Raises:
            StorageReadError: that could not be found out; no permission is not the same as no file.
        """
        return self.reading(name, lambda: self._exists(name))

    def size(self, name: str) -> int | None:
        """Return the size of the file `name` in bytes, None if there is no such file.

        Raises:
            StorageReadError: that could not be found out.
        """

        def info() -> int | None:
            self.fs.invalidate_cache(self.root)
            try:
                return int(self.fs.info(self.path(name))["size"])
            except NO_SUCH_FILE:
                return None

        return self.reading(name, info)

    # Writing -----------------------------------------------------------------------------------------

    def prepare(self, folders: Sequence[str] = ()) -> None:
        """Make the folder, and `folders` in it, where the filesystem has folders.

        Called by each rank before it writes.
        """
        for path in (self.root, *map(self.path, folders)):
            if self.capabilities.local:
                self.writing("", functools.partial(local.make_folder, path))
            elif self.capabilities.folders:
                self.writing("", functools.partial(self._make_folder, path))

    def _make_folder(self, path: str) -> None:
        try:
            self.fs.makedirs(path, exist_ok=True)
        except Exception:
            # Not every filesystem is content with a folder that another rank makes at the same moment.
            self.fs.invalidate_cache()
            if not self.fs.isdir(path):
                raise

    def publish(self, name: str, buffers: Sequence[Buffer], crc: int) -> None:
        """Make one file of `buffers`, whose CRC32C is `crc`, in one write. Called from any thread.

        Where the filesystem can do no better, a failed write may leave a piece of the file; it has been removed
        again when the error is raised, and nothing refers to it.

        Raises:
            StorageWriteError: nothing was published.
            CheckpointNotFoundError: the bucket does not exist.
        """
        try:
            self.writing(name, lambda: self._put(name, buffers, crc))
        except BaseException:
            if not self.capabilities.atomic_put:
                self.discard(name)
            raise

    def publish_stream(self, name: str, chunks: Iterable[Buffer], num_bytes: int) -> None:
        """Make one file of `chunks`, `num_bytes` in all, holding only a few of them in memory at a time.

        What raises while it makes `chunks` ends the write, and is raised as it is.

        Raises:
            StorageWriteError: nothing was published; see `publish`.
            CheckpointNotFoundError: the bucket does not exist.
        """
        source = Source(chunks, num_bytes)
        try:
            self._stream(name, source)
        except BaseException:
            if source.failure is not None:
                raise source.failure from None
            raise

    def _stream(self, name: str, source: Source) -> None:
        path, part_bytes = self.path(name), part_bytes_for(source.num_bytes)
        with self._errors.translated("write", self._where(name)):
            if self.capabilities.local:
                local.publish_stream(path, ([chunk] for chunk in source))
            elif source.num_bytes <= part_bytes:
                data = b"".join(regrouped(source, part_bytes))
                self.publish(name, [data], crc_of([data]))
            elif self.capabilities.multipart:
                tried = functools.partial(self._tried, name)
                checksums = self._checksums_wanted()
                upload_in_parts(self._call_s3, path, source, part_bytes, checksums=checksums, tried=tried)
            else:
                try:
                    write_stream(self.fs, path, source)
                except BaseException:
                    self.discard(name)
                    raise

    def _call_s3(self, method: str, **arguments: Any) -> Any:
        return self.fs.call_s3(method, **arguments)

    def copies_from(self, other: "Store") -> bool:
        """Tell whether the store can copy files of `other` to this folder by itself."""
        return self.capabilities.copies and (self.fs is other.fs or self.fs == other.fs)

    def copy_file(self, other: "Store", name: str) -> None:
        """Copy the file `name` of `other` to the same name here, within the store; see `copies_from`.

        Raises:
            CheckpointNotFoundError: there is no such file, or no bucket to copy it to.
            StorageWriteError: nothing was published.
        """
        self.writing(name, lambda: self.fs.cp_file(other.path(name), self.path(name)))

    def open_uploads(self) -> list[tuple[str, str, float | None]]:
        """Return path, id and time (seconds since 1970) of multipart uploads below that were never completed.

        None where the store has no such thing.
        """
        if not self.capabilities.multipart:
            return []
        return self.reading("", lambda: open_uploads(self.fs, self.root))

    def abort_upload(self, path: str, upload_id: str) -> None:
        """Remove an open upload; see `open_uploads`."""
        self.writing("", lambda: abort_upload(self.fs, path, upload_id))

    def swap(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Publish the small file `name`, over an older one. Readers see the old or the new one, never a mix.

        Args:
            name: File name in the folder.
            data: The whole content. It should hold something unique, so that it can be told from another's.
            create_only: Refuse to replace an existing file.

        Raises:
            CheckpointExistsError: `create_only`, and there is one of other content.
            StorageWriteError: the old file, if there was one, is intact.
        """
        try:
            self.writing(name, lambda: self._swap(name, data, create_only))
        except (StorageWriteError, CheckpointExistsError) as error:
            # The answer may have been lost on the way back, and a retry then meets its own success.
            if self.holds(name, data, error):
                logger.info("%s: the write had succeeded although an error was reported", self.url_of(name))
                return
            raise

    def holds(self, name: str, data: bytes, failure: DcpFsspecError) -> bool:
        """Tell whether the file `name` holds `data` after all.

        Raises:
            StorageWriteError: that cannot be found out, so what `failure` says is not certain either.
        """
        try:
            return self.read(name) == data
        except CheckpointNotFoundError:
            return False
        except StorageReadError as unread:
            raise StorageWriteError(
                f"{failure}; whether the write took place all the same is unknown, reading it back failed: {unread}"
            ) from failure

    def _swap(self, name: str, data: bytes, create_only: bool) -> None:
        if create_only and not (self.capabilities.create_only or self.capabilities.local):
            if self._exists(name):
                raise FileExistsError(errno.EEXIST, "exists already", self.path(name))
            create_only = False
        if self.capabilities.atomic_put:
            self._put(name, [data], crc_of([data]), create_only=create_only)
            return
        temporary = f"{name}{_TEMPORARY_SUFFIX}{secrets.token_hex(4)}"
        try:
            self._put(temporary, [data], crc_of([data]))
            move_over(self.fs, self.path(temporary), self.path(name), data, own_mv=self.capabilities.moves)
        except BaseException:
            self.discard(temporary)
            raise

    def _put(self, name: str, buffers: Sequence[Buffer], crc: int, *, create_only: bool = False) -> None:
        path = self.path(name)
        if self.capabilities.local:
            local.publish(path, buffers, create_only=create_only)
            return
        options: dict[str, Any] = {"mode": "create"} if create_only else {}
        if self.capabilities.takes_crc32c and self._checksums_wanted():
            options["ChecksumCRC32C"] = base64.b64encode(crc.to_bytes(4, "big")).decode()
        self.client.put(path, buffers, **options)

    def _checksums_wanted(self) -> bool:
        """Some stores reject checksum headers; this is the setting by which botocore leaves its own ones out."""
        configured = getattr(self.fs, "config_kwargs", {}).get("request_checksum_calculation")
        return configured != "when_required"

    def flush(self, folders: Sequence[str] = ()) -> None:
        """Make the names of files published here and in `folders` durable.

        Called once a rank after its last publish.
        """
        if self.capabilities.local:
            for path in (self.root, *map(self.path, folders)):
                self.writing("", functools.partial(local.sync_folder, path))
