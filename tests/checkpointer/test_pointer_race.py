"""Another job moves the pointer between this one's look at it and its write: what that job wrote is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_fsspec import Catalog
from dcp_fsspec.checkpointer import contents
from dcp_fsspec.storage import conditional
from dcp_fsspec.storage.conditional import exchange
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from support.faultproxy import FaultProxy
from support.stores import FolderStore, MemoryStore, S3Store, Store
from support.training import write_iteration

WITHOUT_LOCKS = ["memory", "moto", "seaweed", "obstore", "webdav", "azure", "gcs"]


def _catalog(store: Store) -> Catalog:
    return Catalog(store.below("job"), **store.arguments)


def _fill(store: Store, *iterations: int, pointee: int | None) -> None:
    for iteration in iterations:
        write_iteration(store, f"job/iter_{iteration:09d}")
    if pointee is not None:
        store.raw_write("job/latest_checkpoint.txt", f"iter_{pointee:09d}\n".encode())


@contextmanager
def _meanwhile(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> Iterator[None]:
    """Call `action` once, after the next job has read the pointer and before it writes it."""
    replace = conditional.Exchange.replace

    def interrupted(self: conditional.Exchange, data: bytes) -> bool:
        monkeypatch.setattr(conditional.Exchange, "replace", replace)
        action()
        return replace(self, data)

    monkeypatch.setattr(conditional.Exchange, "replace", interrupted)
    yield
    assert conditional.Exchange.replace is replace, "nothing was replaced"


@pytest.mark.parametrize("store", WITHOUT_LOCKS, indirect=True)
@pytest.mark.parametrize("pointee", [10, None])
def test_a_pointer_that_another_job_moves_at_the_same_moment_does_not_go_back(
    store: Store, pointee: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(store, 10, 20, pointee=pointee)

    def other_job() -> None:
        _fill(store, 30, pointee=None)
        assert _catalog(store).advance(30)

    with _meanwhile(monkeypatch, other_job):
        assert not _catalog(store).advance(20)
    assert _catalog(store).pointee() == 30


@pytest.mark.parametrize("store", WITHOUT_LOCKS, indirect=True)
def test_an_earlier_iteration_that_another_job_advances_to_at_the_same_moment_does_not_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(store, 10, 20, 30, pointee=10)
    with _meanwhile(monkeypatch, lambda: _catalog(store).advance(20)):
        assert _catalog(store).advance(30)
    assert _catalog(store).pointee() == 30


@pytest.mark.parametrize("store", WITHOUT_LOCKS, indirect=True)
def test_later_iterations_that_were_abandoned_are_not_taken_for_those_of_another_job(store: Store) -> None:
    _fill(store, 10, 20, 30, pointee=10)
    catalog = _catalog(store)
    catalog.begin(15)
    _fill(store, 15, pointee=None)
    assert catalog.advance(15)
    assert catalog.pointee() == 15
    assert _catalog(store).advance(20)
    assert catalog.pointee() == 20


def test_a_job_that_saves_while_another_has_committed_and_not_yet_advanced_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    _fill(store, 10, 20, pointee=10)
    slow, fast = _catalog(store), _catalog(store)
    slow.begin(25)
    fast.begin(30)
    _fill(store, 25, 30, pointee=None)
    with _meanwhile(monkeypatch, lambda: fast.advance(30)):
        assert not slow.advance(25)
    assert slow.pointee() == 30


def test_a_folder_is_locked_from_the_look_to_the_write(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, str(tmp_path))
    _fill(store, 10, 20, 30, pointee=10)
    catalog = _catalog(store)
    outcome: list[bool] = []
    other = threading.Thread(target=lambda: outcome.append(_catalog(store).advance(20)))
    with exchange(catalog.store, "latest_checkpoint.txt") as pointer:
        assert pointer.is_guarded
        assert contents.pointer_says(pointer.read() or b"") == "iter_000000010"
        quick = Catalog(store.below("job"), retry_seconds=0)
        with exchange(quick.store, "latest_checkpoint.txt") as second:
            assert not second.is_guarded
        other.start()
        assert pointer.replace(b"iter_000000030\n")
    other.join(60)
    assert outcome == [False]
    assert catalog.pointee() == 30


def test_a_folder_that_cannot_be_locked_is_looked_at_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(9, "as on some network filesystems")

    monkeypatch.setattr(conditional.fcntl, "flock", refuse)
    store = FolderStore(tmp_path, str(tmp_path))
    _fill(store, 10, 20, pointee=10)

    def other_job() -> None:
        _fill(store, 30, pointee=None)
        _catalog(store).advance(30)

    with _meanwhile(monkeypatch, other_job):
        assert not _catalog(store).advance(20)
    assert _catalog(store).pointee() == 30


def test_the_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, str(tmp_path))
    _fill(store, 10, pointee=None)
    assert _catalog(store).advance(10)
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"iter_000000010", "latest_checkpoint.txt"}


@pytest.mark.parametrize("store", ["path", "moto", "seaweed", "obstore"], indirect=True)
def test_many_jobs_that_move_the_pointer_at_once_leave_it_at_the_latest(store: Store) -> None:
    _fill(store, *range(1, 13), pointee=None)
    start = threading.Barrier(3)

    def job(first: int) -> None:
        catalog = _catalog(store)
        start.wait(60)
        for iteration in range(first, 13, 3):
            catalog.advance(iteration)
            assert (catalog.pointee() or 0) >= iteration

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(job, (1, 2, 3))) == [None] * 3
    assert _catalog(store).pointee() == 12


def test_a_server_that_does_not_know_conditions_is_served_without(proxied_store: S3Store, proxy: FaultProxy) -> None:
    _fill(proxied_store, 10, 20, pointee=10)
    # 412 although nothing has changed: what some servers answer to a tag in quotes.
    faulty = FaultyFileSystem(fsspec.filesystem("s3", **proxied_store.storage_options or {}))
    error = OSError(22, "PreconditionFailed")
    error.__cause__ = _ClientError(412)
    faulty.inject("pipe_file", Fail(error), path="*/latest_checkpoint.txt")
    catalog = Catalog(proxied_store.below("job"), filesystem=faulty)
    assert catalog.advance(20)
    assert catalog.pointee() == 20
    # Nor one that says so.
    proxied_store.raw_write("job/latest_checkpoint.txt", b"iter_000000010\n")
    error = OSError(5, "NotImplemented")
    error.__cause__ = _ClientError(501)
    faulty.inject("pipe_file", Fail(error), path="*/latest_checkpoint.txt")
    assert Catalog(proxied_store.below("job"), filesystem=faulty).advance(20)
    assert catalog.pointee() == 20


class _ClientError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {}}


@pytest.mark.parametrize("pointee", [10, None])
def test_a_pointer_whose_write_was_carried_out_without_an_answer_is_where_it_should_be(
    proxied_store: S3Store, pointee: int | None
) -> None:
    _fill(proxied_store, 10, 20, pointee=pointee)
    faulty = FaultyFileSystem(fsspec.filesystem("s3", **proxied_store.storage_options or {}))
    faulty.inject("pipe_file", Fail(TimeoutError("lost"), carried_out=True), path="*/latest_checkpoint.txt")
    catalog = Catalog(proxied_store.below("job"), filesystem=faulty)
    assert catalog.advance(20)
    assert catalog.pointee() == 20
