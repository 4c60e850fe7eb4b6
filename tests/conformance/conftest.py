"""Stores that are odder than those of the other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec.testing.folder_servers import FtpServer, RcloneServer
from support.crude import NoRenameOverFileSystem, OneAtATimeFileSystem
from support.stores import FolderStore, MemoryStore, Store, unique_name
from support.targets import InDirTarget, StoreTarget

ODD_KINDS = (
    "rclone",
    "ftp",
    "one_at_a_time",
    "no_rename_over",
    "simplecache_memory",
    "filecache_memory",
    "dir_memory",
)


@pytest.fixture(scope="session")
def rclone() -> Iterator[RcloneServer]:
    with RcloneServer(bucket="rclone-bucket") as server:
        yield server


@pytest.fixture(scope="session")
def ftp() -> Iterator[FtpServer]:
    with FtpServer() as server:
        yield server


@pytest.fixture(params=ODD_KINDS)
def odd_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreTarget]:
    """A fresh target of each odd kind in turn."""
    target = _make_target(request.param, request, tmp_path)
    yield target
    target.store.close()


def _make_target(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> StoreTarget:
    name = unique_name()
    if kind == "rclone":
        s3: RcloneServer = request.getfixturevalue("rclone")
        return StoreTarget(FolderStore(s3.folder / name, f"s3://{s3.bucket}/{name}", s3.storage_options()))
    if kind == "ftp":
        ftp: FtpServer = request.getfixturevalue("ftp")
        store: Store = FolderStore(ftp.folder / name, f"{ftp.base_url}/{name}", ftp.storage_options())
        # fsspec reads the rest of an ftp url after ? as a query.
        return StoreTarget(store, forbidden="?")
    if kind == "one_at_a_time":
        return _through(FolderStore(tmp_path / name, f"/{name}"), OneAtATimeFileSystem(str(tmp_path)))
    if kind == "no_rename_over":
        return _through(FolderStore(tmp_path / name, f"{tmp_path}/{name}"), NoRenameOverFileSystem())
    store = MemoryStore()
    wrapper, _, _ = kind.partition("_")
    if wrapper == "dir":
        return InDirTarget(store)
    store.url = f"{wrapper}::{store.url}"
    store.storage_options = {wrapper: {"cache_storage": str(tmp_path / "cache")}}
    return StoreTarget(store)


def _through(store: Store, filesystem: Any) -> StoreTarget:
    store.filesystem = filesystem
    return StoreTarget(store)
