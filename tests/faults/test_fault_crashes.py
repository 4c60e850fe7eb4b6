"""A crash at any write: the checkpoint that stands is the old one or the new one, whole and checked."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import CheckpointNotFoundError
from dcp_fsspec.testing.servers import MotoServer
from support.checkpoints import assert_loads, fails, folder_files, load, save
from support.stores import FolderStore, S3Store, Store
from support.tensors import random_tensor
from support.victim import DIED, run_victim

SHARD_BYTES = 64 << 10
OLD: dict[str, Any] = {f"tensor{number}": random_tensor(15_000, seed=number) for number in range(3)}
NEW: dict[str, Any] = {f"tensor{number}": random_tensor(15_000, seed=10 + number) for number in range(2)}


class Crash(BaseException):
    """The process is gone; nothing of it runs on, clean-up included."""


class MortalFilesystem(MemoryFileSystem):
    """A store of its own whose client dies at the n-th change.

    Args:
        files: what the store holds; shared with later clients.
        dies_at: number of the change, from 1, that is the last one.
        arrives: whether the store still carries that one out.
    """

    cachable = False

    def __init__(self, files: dict[str, Any], dies_at: int | None = None, *, arrives: bool = False) -> None:
        super().__init__()
        self.store, self.pseudo_dirs = files, [""]
        self.num_changes = 0
        self._dies_at, self._arrives, self._dead = dies_at, arrives, False

    def _change(self, carry_out: Any) -> None:
        self._live()
        self.num_changes += 1
        if self.num_changes == self._dies_at:
            self._dead = True
            if self._arrives:
                carry_out()
        self._live()
        carry_out()

    def _live(self) -> None:
        if self._dead:
            raise Crash

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._change(lambda: super(MortalFilesystem, self).pipe_file(path, value, mode=mode, **kwargs))

    def rm_file(self, path: str) -> None:
        self._change(lambda: super(MortalFilesystem, self).rm_file(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self._live()
        return super().cat_file(path, start=start, end=end, **kwargs)


def _changes_of_a_save(state: dict[str, Any], files: dict[str, Any]) -> int:
    filesystem = MortalFilesystem(files)
    save(state, "/c", shard_bytes=SHARD_BYTES, filesystem=filesystem, max_concurrency=1)
    return filesystem.num_changes


def _crash(state: dict[str, Any], files: dict[str, Any], dies_at: int, *, arrives: bool, overwrite: bool) -> None:
    filesystem = MortalFilesystem(files, dies_at, arrives=arrives)
    with pytest.raises((CheckpointException, Crash)):
        save(state, "/c", shard_bytes=SHARD_BYTES, filesystem=filesystem, max_concurrency=1, overwrite=overwrite)


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "arrived"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_crash_at_any_change_of_a_first_save_leaves_no_checkpoint_or_all_of_it(arrives: bool, overwrite: bool) -> None:
    num_changes = _changes_of_a_save(NEW, {})
    assert num_changes == 2 + 2
    for dies_at in range(1, num_changes + 1):
        files: dict[str, Any] = {}
        _crash(NEW, files, dies_at, arrives=arrives, overwrite=overwrite)
        if arrives and dies_at == num_changes:
            assert_loads(NEW, "/c", filesystem=MortalFilesystem(files))
            continue
        with fails() as failure:
            load(NEW, "/c", filesystem=MortalFilesystem(files))
        assert isinstance(failure.causes[0], CheckpointNotFoundError)
        # The next attempt is not hindered by what was left.
        save(NEW, "/c", filesystem=MortalFilesystem(files), shard_bytes=SHARD_BYTES, overwrite=overwrite)
        assert_loads(NEW, "/c", filesystem=MortalFilesystem(files))


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "arrived"])
def test_crash_at_any_change_of_an_overwrite_leaves_the_old_checkpoint_or_the_new_one(arrives: bool) -> None:
    files: dict[str, Any] = {}
    _changes_of_a_save(OLD, files)
    num_changes = _changes_of_a_save(NEW, files)
    assert num_changes == (2 + 2) + (3 + 1)
    num_new = 0
    for dies_at in range(1, num_changes + 1):
        files = {}
        _changes_of_a_save(OLD, files)
        _crash(NEW, files, dies_at, arrives=arrives, overwrite=True)
        committed = dies_at > 4 or (arrives and dies_at == 4)
        num_new += committed
        assert_loads(NEW if committed else OLD, "/c", filesystem=MortalFilesystem(files))
        save(NEW, "/c", filesystem=MortalFilesystem(files), shard_bytes=SHARD_BYTES)
        assert_loads(NEW, "/c", filesystem=MortalFilesystem(files))
    assert num_new == 4 + arrives


def test_process_that_dies_between_checksums_and_commit_leaves_the_old_checkpoint_checked(
    tmp_path: Path, moto_server: MotoServer, moto_client: Any
) -> None:
    stores: list[Store] = [
        FolderStore(tmp_path / "root", str(tmp_path / "root")),
        S3Store(moto_client, moto_server.bucket, moto_server.storage_options()),
    ]
    for store in stores:
        save(OLD, store.below("c"), shard_bytes=SHARD_BYTES, **store.arguments)
    before = [folder_files(store, "c") for store in stores]

    moment = {"kind": "die", "at": "/.metadata", "num_tensors": 2}
    scenarios = [{**moment, "url": store.below("c"), "storage_options": store.storage_options} for store in stores]
    outcome = run_victim(*scenarios)

    assert [report["exit"] for report in outcome.reports] == [DIED, DIED], outcome.output
    for store, old in zip(stores, before, strict=True):
        after = folder_files(store, "c")
        assert old.items() <= after.items()
        assert len(after) >= len(old) + 2 + 1, "it died before the new files were there"
        assert_loads(OLD, store.below("c"), **store.arguments)
        save(NEW, store.below("c"), shard_bytes=SHARD_BYTES, **store.arguments)
        assert_loads(NEW, store.below("c"), **store.arguments)


def _full_at_commit(filesystem: Any) -> Any:
    """Let there be no room for `.metadata`, neither written nor moved to its name."""
    pipe_file, mv = filesystem.pipe_file, filesystem.mv

    def refuse(path: str) -> None:
        if path.endswith("/.metadata"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def pipe(path: str, value: bytes, **options: Any) -> None:
        refuse(path)
        pipe_file(path, value, **options)

    def move(source: str, target: str, **options: Any) -> None:
        if ".old-" not in source:  # what only stepped aside may come back
            refuse(target)
        mv(source, target, **options)

    filesystem.pipe_file, filesystem.mv = pipe, move
    return filesystem


class OtherLocal(LocalFileSystem):
    """A local filesystem that the package does not know, so it keeps to its methods."""

    cachable = False


def _filesystem(store: Store) -> Any:
    if store.storage_options:
        return fsspec.filesystem("s3", skip_instance_cache=True, **store.storage_options)
    return OtherLocal() if store.url.startswith("/") else fsspec.filesystem("memory", skip_instance_cache=True)


@pytest.mark.parametrize("store", ["path", "memory", "moto"], indirect=True)
@pytest.mark.parametrize("overwrite", [True, False])
def test_no_room_for_the_commit_is_an_error_and_the_old_checkpoint_stays_checked(store: Store, overwrite: bool) -> None:
    url = store.below("c")
    if overwrite:
        save(OLD, url, shard_bytes=SHARD_BYTES, filesystem=_filesystem(store))
    with fails() as failure:
        full = _full_at_commit(_filesystem(store))
        save(NEW, url, shard_bytes=SHARD_BYTES, filesystem=full, overwrite=overwrite, retry_seconds=0)
    failure.names(f"{url}/.metadata", "No space left")
    assert [name for name in store.raw_list() if "tmp" in name or ".old-" in name] == []
    if overwrite:
        assert_loads(OLD, url, filesystem=_filesystem(store))
    else:
        assert "c/.metadata" not in store.raw_list()
    save(NEW, url, shard_bytes=SHARD_BYTES, filesystem=_filesystem(store), overwrite=overwrite)
    assert_loads(NEW, url, filesystem=_filesystem(store))
