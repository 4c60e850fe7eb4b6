"""Filesystems as they are found in the wild, each with a weakness, over a folder of this machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem


class OneAtATimeFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Breaks when two threads use it, ignores ranges, and has the fewest methods with which fsspec can live.

    As over ssh: one connection, whole files only.

    Args:
        folder: where the files lie.
    """

    protocol = "oneatatime"
    cachable = False
    root_marker = "/"

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder = folder
        self._busy = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two threads talk on one connection")
        try:
            yield
        finally:
            self._busy.release()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("oneatatime://").strip("/")

    def _real(self, path: str) -> Path:
        return Path(self.folder + self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        with self._alone():
            real = self._real(path)
            found = sorted(real.iterdir()) if real.is_dir() else [real]
            infos = [self._info(one) for one in found]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        with self._alone():
            return self._info(self._real(path))

    def _info(self, real: Path) -> dict[str, Any]:
        status = real.stat()
        kind = "directory" if real.is_dir() else "file"
        return {"name": str(real).removeprefix(self.folder) or "/", "size": status.st_size, "type": kind}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        with self._alone():
            return self._real(path).read_bytes()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self._alone():
            self._real(path).write_bytes(value)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return open(self._real(path), mode)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self._alone():
            os.makedirs(self._real(path), exist_ok=exist_ok)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        self.makedirs(path, exist_ok=create_parents)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        with self._alone():
            os.replace(self._real(path1), self._real(path2))

    def rm_file(self, path: str) -> None:
        with self._alone():
            self._real(path).unlink()

    def rmdir(self, path: str) -> None:
        with self._alone():
            shutil.rmtree(self._real(path))


class NoRenameOverFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Refuses to rename onto a file that exists, as HDFS does."""

    protocol = "norenameover"

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        os.rename(self._strip_protocol(path1), self._strip_protocol(path2))
