"""How files of one folder are removed: on the way out with an error, or on purpose, many at once."""

import contextlib
import functools
import logging
from collections.abc import Iterable

from dcp_fsspec.errors import DcpFsspecError
from dcp_fsspec.storage.connection import Connection
from dcp_fsspec.storage.transfer import Job, Transfer
from dcp_fsspec.storage.translation import NO_SUCH_FILE

logger = logging.getLogger(__name__)

_REMOVED_AT_ONCE = 1000
"""What S3 takes in one request."""


class Removing(Connection):
    """A folder from which files can be removed; see `Store`."""

    def remove_all(self, names: Iterable[str], why: str) -> None:
        """Remove files on the way out, in parallel and with little patience. What stays is logged, with `why`.

        One that is gone already is fine. When the store does not answer, the rest is left: nothing refers to it.
        """
        left = sorted(names)
        transfer = Transfer(self.capabilities.threads_for(None), budget_bytes=1 << 62)
        try:
            transfer.run(Job(0, functools.partial(self._remove_now, name)) for name in left)
        except DcpFsspecError as error:
            logger.warning("%s: %s: of %d files, some stay: %s", self.url, why, len(left), error)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in few requests where the filesystem can remove many in one. Those gone already are fine.

        Raises:
            StorageWriteError: not all could be removed.
        """
        left = list(names)
        # A list is taken literally unless it looks like a pattern.
        if self.capabilities.removes_many and not any(set("*?[") & set(self.path(name)) for name in left):
            for begin in range(0, len(left), _REMOVED_AT_ONCE):
                batch = [self.path(name) for name in left[begin : begin + _REMOVED_AT_ONCE]]
                self.writing("", functools.partial(self._remove_batch, batch))
            return
        transfer = Transfer(self.capabilities.threads_for(None), budget_bytes=1 << 62)
        transfer.run(Job(0, functools.partial(self._remove_patiently, name)) for name in left)

    def _remove_batch(self, paths: list[str]) -> None:
        with contextlib.suppress(*NO_SUCH_FILE):
            self.fs.rm(paths)

    def _remove_patiently(self, name: str) -> None:
        self.writing(name, lambda: self._remove_file(name))

    def remove_folder(self) -> None:
        """Remove the folder, which is empty, where the filesystem has folders. A failure is logged."""
        if not (self.capabilities.local or self.capabilities.folders):
            return
        try:
            self.writing("", lambda: self._remove_tree())
        except DcpFsspecError as error:
            logger.warning("the emptied folder stays: %s", error)

    def _remove_tree(self) -> None:
        """Remove the empty folder and the empty folders in it, innermost first."""
        self.fs.invalidate_cache()
        with contextlib.suppress(*NO_SUCH_FILE):
            folders = [path for path, _, _ in self.fs.walk(self.root)]
            for path in sorted(folders, key=len, reverse=True):
                self.fs.rmdir(path)

    def _remove_now(self, name: str) -> None:
        try:
            with self._errors.translated("write", self._where(name)):
                self._clean_up.call(self._where(name), lambda: self._remove(name))
        except DcpFsspecError:
            # Not every filesystem says in its own words that there was nothing to remove.
            with contextlib.suppress(Exception):
                if not self._exists(name):
                    return
            raise

    def _remove(self, name: str) -> None:
        with self._lock:
            self._requests += 1
        self._remove_file(name)

    def _remove_file(self, name: str) -> None:
        with contextlib.suppress(*NO_SUCH_FILE):
            # rm_file takes the path literally, where rm would read [, ? and * as a pattern.
            self.fs.rm_file(self.path(name))

    def discard(self, name: str) -> None:
        """Remove what a failed operation left, on the way out with its error. A failure is logged."""
        self.remove_all([name], "left behind by a failed save")

    def _exists(self, name: str) -> bool:
        self.fs.invalidate_cache(self.root)
        return bool(self.fs.exists(self.path(name)))
