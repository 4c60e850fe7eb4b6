"""B06 and B07: a save that fails says so, leaves nothing that looks like data, and harms no older checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcp_fsspec import FsspecStorageWriter, StorageWriteError
from support.checkpoints import assert_loads, fails, impatient, open_uploads, save, threads_of_ours
from support.faultproxy import CutUpload, FaultProxy, Status
from support.stores import FolderStore, MemoryStore, S3Store, Store
from support.tensors import random_tensor

OLD = {"w": random_tensor(40, 3), "n": 1}


class _FailingPlanner(DefaultSavePlanner):
    """Raises when asked for the data of one key."""

    def __init__(self, key: str, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self._key, self._error = key, error

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == self._key:
            raise self._error()
        return super().resolve_data(write_item)


def _five(num_elements: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((num_elements,), float(number)) for number in range(5)}


def _assert_only_old(store: Store, before: dict[str, int], url: str) -> None:
    """Nothing of the failed save is there, and the checkpoint from before is intact."""
    assert store.raw_list() == before
    assert threads_of_ours() == []
    if isinstance(store, S3Store):
        assert open_uploads(store) == []
    if before:
        assert_loads(OLD, url, **store.arguments)


@pytest.mark.parametrize("store", ["path", "memory", "seaweed", "obstore", "webdav"], indirect=True)
@pytest.mark.parametrize("standing", [False, True], ids=["first save", "overwrite"])
@pytest.mark.parametrize("shard_bytes", [64 << 10, None], ids=["file per tensor", "one file"])
def test_b06_data_that_cannot_be_had(store: Store, standing: bool, shard_bytes: int | None) -> None:
    """B06: the third of five tensors raises."""
    url = store.below("ckpt")
    if standing:
        save(OLD, url, **store.arguments)
    before = store.raw_list()
    writer = FsspecStorageWriter(url, **store.arguments, shard_bytes=shard_bytes)
    with fails() as failure:
        dcp.save(_five(15_000), storage_writer=writer, planner=_FailingPlanner("t2", lambda: OSError("no such page")))
    failure.names("no such page", "OSError")
    _assert_only_old(store, before, url)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["path", "seaweed"], indirect=True)
def test_b06_data_that_cannot_be_had_in_a_large_save(store: Store) -> None:
    """B06: more than 100 MB, of which most is on its way when the third tensor raises."""
    url = store.below("ckpt")
    save(OLD, url, **store.arguments)
    before = store.raw_list()
    writer = FsspecStorageWriter(url, **store.arguments)
    planner = _FailingPlanner("t2", lambda: OSError("no such page"))
    with fails() as failure:
        dcp.save(_five(5_500_000), storage_writer=writer, planner=planner)
    failure.names("no such page")
    _assert_only_old(store, before, url)


@pytest.mark.parametrize("store", ["path", "memory", "moto"], indirect=True)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_b06_an_interrupt_cleans_up_as_well(store: Store, error: type[BaseException]) -> None:
    """B06: not every way out is an `Exception`."""
    url = store.below("ckpt")
    save(OLD, url, **store.arguments)
    before = store.raw_list()
    writer = FsspecStorageWriter(url, **store.arguments, shard_bytes=64 << 10)
    with fails() as failure:
        dcp.save(_five(15_000), storage_writer=writer, planner=_FailingPlanner("t2", error))
    assert isinstance(failure.causes[0], error)
    _assert_only_old(store, before, url)


@pytest.mark.parametrize("name", ["*.distcp", "*/checksums*.json", "*/.metadata"])
@pytest.mark.parametrize("fault", [CutUpload(), Status(403, "AccessDenied")], ids=["cut", "denied"])
def test_b06_a_put_that_never_succeeds(
    proxied_store: S3Store, proxy: FaultProxy, name: str, fault: CutUpload | Status
) -> None:
    """B06: whichever write it is, the old checkpoint stays the one that loads, and the message names the object."""
    url = proxied_store.below("ckpt")
    save(OLD, url, **proxied_store.arguments)
    before = {name: proxied_store.raw_read(name) for name in proxied_store.raw_list()}
    rule = proxy.add(fault, operation="PUT", key=name, times=None)
    with fails() as failure:
        save(_five(15_000), url, **impatient(proxied_store.storage_options), shard_bytes=64 << 10)
    assert rule.fired
    failure.names("StorageWriteError", f"{url}/")
    after = {name: proxied_store.raw_read(name) for name in proxied_store.raw_list()}
    if name == "*/.metadata":
        # The answer, not the write, may be what failed: a commit that still arrives must find its files.
        after = {name: data for name, data in after.items() if name in before}
    assert after == before
    assert_loads(OLD, url, **proxied_store.arguments)


class _HalfWriting(LocalFileSystem):  # type: ignore[misc]
    """A disk that is full after half of the second file."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.puts = 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            with open(path, "wb") as file:
                file.write(value[: len(value) // 2])
            raise OSError(28, "No space left on device", path)
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.mark.parametrize("standing", [False, True], ids=["first save", "overwrite"])
def test_b06_a_file_written_in_part_is_removed(tmp_path: Any, standing: bool) -> None:
    """B06: a filesystem whose writes are not atomic has left half of a file."""
    store = FolderStore(tmp_path / "root", str(tmp_path / "root"))
    url = store.below("ckpt")
    if standing:
        save(OLD, url)
    before = store.raw_list()
    broken = _HalfWriting(skip_instance_cache=True)
    with fails() as failure:
        save(_five(15_000), url, filesystem=broken, shard_bytes=64 << 10)
    failure.names("StorageWriteError", f"{url}/__0_", "No space left")
    assert failure.causes[0].errno == 28  # type: ignore[attr-defined]
    _assert_only_old(store, before, url)


class _MainThreadOnly(MemoryFileSystem):  # type: ignore[misc]
    """Refuses to be written to from any thread but the main one."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("not in this thread")
        super().pipe_file(path, value, mode=mode, **kwargs)


def test_b07_a_failure_in_a_thread_is_the_failure_of_the_save() -> None:
    """B07."""
    store = MemoryStore()
    filesystem = _MainThreadOnly(skip_instance_cache=True)
    with fails() as failure:
        save(_five(20_000), store.below("ckpt"), filesystem=filesystem, shard_bytes=64 << 10, max_concurrency=3)
    assert isinstance(failure.causes[0], StorageWriteError)
    assert isinstance(failure.causes[0], OSError)
    failure.names("OSError: not in this thread", store.below("ckpt"))
    _assert_only_old(store, {}, "")


class _Forgetful(FsspecStorageWriter):
    """Loses the result of one item on the way to the coordinator."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).value()
        shortened: Future[list[WriteResult]] = Future()
        shortened.set_result(results[:-1])
        return shortened


@pytest.mark.parametrize("standing", [False, True], ids=["first save", "overwrite"])
def test_b07_a_lost_result_is_no_success(standing: bool) -> None:
    """B07: what was written is counted against what was planned before the commit."""
    store = MemoryStore()
    url = store.below("ckpt")
    if standing:
        save(OLD, url)
    before = store.raw_read("ckpt/.metadata") if standing else None
    with fails() as failure:
        dcp.save(_five(10), storage_writer=_Forgetful(url))
    failure.names("5 items", "4", url)
    assert ("ckpt/.metadata" in store.raw_list()) == standing
    if standing:
        assert store.raw_read("ckpt/.metadata") == before
        assert_loads(OLD, url)
    store.close()
