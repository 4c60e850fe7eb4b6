"""B43: the commit works on filesystems that do not rename over a file, and copies no data where renaming is copying."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_fsspec import DcpFsspecError, FsspecStorageReader, FsspecStorageWriter
from support.checkpoints import assert_loads, fails, save
from support.faultproxy import FaultProxy
from support.stores import FolderStore, MemoryStore, S3Store, Store
from support.tensors import assert_bits_equal, blank_like, random_tensor

FIRST = {"w": random_tensor(50, 3), "n": 1}
SECOND = {"w": random_tensor(60, 3, seed=1), "n": 2, "more": random_tensor(2)}


class _Local(LocalFileSystem):  # type: ignore[misc]
    """A local filesystem of somebody else: only its own methods may be used."""

    cachable = False


class _NeverOver(_Local):
    """As HDFS: a rename onto an existing file is refused."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if os.path.exists(self._strip_protocol(path2)):
            raise FileExistsError(17, "the target exists", path2)
        super().mv(path1, path2, **kwargs)


class _NeverOverOddly(_NeverOver):
    """The same, told by an exception of its own kind."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        try:
            super().mv(path1, path2, **kwargs)
        except FileExistsError as error:
            raise RuntimeError("409 Conflict") from error


class _Copying(_Local):
    """A rename is a copy, and the original cannot be removed afterwards."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        shutil.copyfile(self._strip_protocol(path1), self._strip_protocol(path2))
        raise PermissionError(13, "cannot delete the source", path1)


class _NoRename(_Local):
    """No rename at all from the moment that `broken` is set."""

    broken = False

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.broken:
            raise PermissionError(13, "no renaming here", path1)
        super().mv(path1, path2, **kwargs)


class _NoRenameOver(_NoRename):
    """A rename onto a file fails, and so does the one that would put the new file in the place made free."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.broken and ".tmp-" in str(path1):
            raise OSError(5, "Input/output error", path1)
        super().mv(path1, path2, **kwargs)


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "root", str(tmp_path / "root"))


def _plain_names(store: Store) -> bool:
    """Whether nothing but a checkpoint's own files is there: no temporary file, no copy set aside."""
    return all(
        name.endswith((".distcp", ".json", "/.metadata")) and ".tmp" not in name and ".old" not in name
        for name in store.raw_list()
    )


@pytest.mark.parametrize("kind", [_Local, _NeverOver, _NeverOverOddly, _Copying])
def test_b43_saving_twice_in_one_folder(folder: FolderStore, kind: Callable[[], LocalFileSystem]) -> None:
    """B43: whatever `mv` does, the second save replaces the first, and nothing else remains."""
    url = folder.below("ckpt")
    for state in (FIRST, SECOND, FIRST):
        save(state, url, filesystem=kind())
        assert _plain_names(folder), folder.raw_list()
        assert len(folder.raw_list()) == 3
        assert_loads(state, url, filesystem=kind())
        assert_loads(state, url)


@pytest.mark.parametrize("kind", [_NoRename, _NoRenameOver])
def test_b43_a_rename_that_fails_for_good_leaves_the_old_checkpoint(
    folder: FolderStore, kind: Callable[[], _NoRename]
) -> None:
    """B43: the save fails, and no attempt to work around the rename has cost the checkpoint that stood there."""
    url, filesystem = folder.below("ckpt"), kind()
    save(FIRST, url, filesystem=filesystem)
    before = {name: folder.raw_read(name) for name in folder.raw_list()}
    filesystem.broken = True
    with fails() as failure:
        save(SECOND, url, filesystem=filesystem)
    failure.names("StorageWriteError", url)
    assert {name: folder.raw_read(name) for name in before} == before
    assert not any(".tmp-" in name or ".old-" in name for name in folder.raw_list())
    assert_loads(FIRST, url)
    filesystem.broken = False
    save(SECOND, url, filesystem=filesystem)
    assert_loads(SECOND, url)


def test_b43_what_an_interrupted_save_left_does_not_confuse_a_load_or_a_save(folder: FolderStore) -> None:
    """B43: temporary files of our own and of stock writers."""
    url = folder.below("ckpt")
    save(FIRST, url)
    for name in (
        ".metadata.tmp",
        ".metadata.tmp-0a1b2c3d",
        ".metadata.old-1",
        "__0_0.distcp.tmp-00",
        "checksums.json.tmp-1",
    ):
        folder.raw_write(f"ckpt/{name}", b"half")
    assert_loads(FIRST, url)
    loaded = blank_like(FIRST)
    dcp.load(loaded, storage_reader=FsspecReader(url))
    assert_bits_equal(loaded, FIRST)
    save(SECOND, url)
    assert_loads(SECOND, url)


CHAINS = ("simplecache::{url}", "filecache::{url}", "blockcache::{url}")


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("store", ["memory", "file", "seaweed"], indirect=True)
def test_b43_a_cache_before_a_store(store: Store, chain: str, tmp_path: Path) -> None:
    """B43: the checkpoint is in the store itself, and what is loaded is what stands there now."""
    url = chain.format(url=store.below("ckpt"))
    outer = chain.partition("::")[0]
    options: dict[str, Any] = {outer: {"cache_storage": str(tmp_path / "cache")}}
    if store.storage_options:
        options["s3"] = store.storage_options
    for state in (FIRST, SECOND, FIRST):
        save(state, url, storage_options=options)
        assert_loads(state, url, storage_options=options)
        assert_loads(state, store.below("ckpt"), **store.arguments)
        assert len(store.raw_list()) == 3
        # Another process, without the cache.
        save(SECOND, store.below("ckpt"), **store.arguments)
        assert_loads(SECOND, url, storage_options=options)


@pytest.mark.parametrize("store", ["memory", "file", "seaweed"], indirect=True)
def test_b43_one_folder_of_a_store(store: Store) -> None:
    """B43: `dir::`, as a url and as a filesystem; the files lie where the url behind it says."""
    options = {"s3": store.storage_options} if store.storage_options else None
    url = f"dir::{store.below('chained')}"
    for state in (FIRST, SECOND):
        save(state, url, storage_options=options)
        assert_loads(state, url, storage_options=options)
        assert_loads(state, store.below("chained"), **store.arguments)
    assert len(store.raw_list()) == 3
    assert _plain_names(store)
    save(FIRST, store.below("chained"), **store.arguments)
    assert_loads(FIRST, url, storage_options=options)

    whole, root = fsspec.core.url_to_fs(store.url, **(store.storage_options or {}))
    inside = DirFileSystem(root, whole)
    for state in (FIRST, SECOND):
        save(state, "passed/ckpt", filesystem=inside)
        assert_loads(state, "passed/ckpt", filesystem=inside)
        assert_loads(state, store.below("passed/ckpt"), **store.arguments)


def test_b43_stock_reads_what_went_through_a_chain() -> None:
    """B43: without the chain."""
    store = MemoryStore()
    for chain in ("dir", "simplecache"):
        url = store.below(chain)
        save(FIRST, f"{chain}::{url}")
        loaded = blank_like(FIRST)
        dcp.load(loaded, storage_reader=FsspecReader(url))
        assert_bits_equal(loaded, FIRST)
    store.close()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_b43_an_archive_is_read_and_not_written(folder: FolderStore, kind: str) -> None:
    """B43: a chain that cannot be written is refused by an error that names the url."""
    save(FIRST, folder.below("ckpt"))
    archive = shutil.make_archive(str(folder.folder / "archive"), kind, folder.folder, "ckpt")
    before = Path(archive).read_bytes()
    assert_loads(FIRST, f"{kind}://ckpt::{archive}")
    assert_loads(FIRST, f"{kind}://ckpt::file://{archive}")
    for url in (f"{kind}://ckpt::{archive}", f"{kind}://new::{archive}"):
        with fails() as failure:
            save(SECOND, url)
        failure.names(url)
        assert isinstance(failure.causes[0], DcpFsspecError)
    assert Path(archive).read_bytes() == before
    missing = f"{kind}://ckpt::{archive}.missing"
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(DcpFsspecError) as caught:
            end(missing)
        assert missing in str(caught.value)


def test_b43_object_stores_are_asked_for_no_copy(proxied_store: S3Store, proxy: FaultProxy) -> None:
    """B43: three saves in one folder and one elsewhere: puts and deletes, no copy, no rename, no multipart."""
    state = {"w": torch.arange(3 << 20, dtype=torch.uint8), "n": 1}
    writer = FsspecStorageWriter(proxied_store.below("ckpt"), **proxied_store.arguments, shard_bytes=1 << 20)
    for _ in range(3):
        dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=writer, checkpoint_id=proxied_store.below("other"))
    done = {exchange.operation for exchange in proxy.log}
    assert done <= {"PUT", "GET", "HEAD", "DELETE"}, done
    assert not proxy.requests("COPY")
    assert not [exchange for exchange in proxy.log if ".tmp" in exchange.key]
    assert len(proxy.requests("PUT", "*/.metadata")) == 4
    sent = sum(put.request_bytes for put in proxy.requests("PUT"))
    assert sent < 4 * (3 << 20) * 1.05
    reader = FsspecStorageReader(proxied_store.below("ckpt"), **proxied_store.arguments)
    proxy.clear()
    loaded = blank_like(state)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, state)
    assert {exchange.operation for exchange in proxy.log} <= {"GET", "HEAD"}
