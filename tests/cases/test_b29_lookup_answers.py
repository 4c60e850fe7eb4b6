"""B29: "is there a checkpoint?" answered by 404, 403 or 503: never guessed."""

from __future__ import annotations

import pytest

from dcp_fsspec import CheckpointNotFoundError, StorageReadError
from support.checkpoints import assert_loads, fails, folder_files, impatient, load, save
from support.faultproxy import FaultProxy, Status
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = pytest.mark.server

OLD = {"tensor": random_tensor(500, seed=1)}
NEW = {"tensor": random_tensor(500, seed=2)}
DENIED = Status(403, "AccessDenied")
BUSY = Status(503, "ServiceUnavailable")


@pytest.mark.parametrize("action", [DENIED, BUSY], ids=["403", "503"])
def test_b29_load_that_is_refused_a_look_is_no_missing_checkpoint(
    proxied_store: S3Store, proxy: FaultProxy, action: Status
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("old")
    save(OLD, url, **arguments)
    for method in ("GET", "HEAD"):
        proxy.add(action, method=method, key="*/.metadata", times=None)
    with fails() as failure:
        load(OLD, url, **arguments)
    assert isinstance(failure.causes[0], StorageReadError)
    assert not isinstance(failure.causes[0], FileNotFoundError)
    failure.names(f"{url}/.metadata")
    if action is DENIED:
        failure.names("PermissionError", "rights")


def test_b29_load_that_is_answered_404_is_a_missing_checkpoint(proxied_store: S3Store) -> None:
    with fails() as failure:
        load(OLD, proxied_store.below("none"), **impatient(proxied_store.storage_options))
    assert isinstance(failure.causes[0], CheckpointNotFoundError)
    failure.names(proxied_store.below("none"))


@pytest.mark.parametrize("overwrite", [True, False])
def test_b29_save_that_cannot_look_because_of_503_touches_nothing(
    proxied_store: S3Store, proxy: FaultProxy, overwrite: bool
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("old")
    save(OLD, url, **arguments)
    before = folder_files(proxied_store, "old")
    proxy.clear()
    for method in ("GET", "HEAD"):
        proxy.add(BUSY, method=method, key="*/.metadata", times=None)
    with fails() as failure:
        save(NEW, url, overwrite=overwrite, **arguments)
    assert isinstance(failure.causes[0], StorageReadError)
    failure.names(f"{url}/.metadata")
    assert folder_files(proxied_store, "old") == before
    assert [exchange.key for exchange in proxy.log if exchange.method in ("PUT", "POST", "DELETE")] == []


def test_b29_save_that_is_denied_the_look_keeps_the_old_files_or_refuses(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("old")
    save(OLD, url, **arguments)
    before = folder_files(proxied_store, "old")
    for method in ("GET", "HEAD"):
        proxy.add(DENIED, method=method, key="*/.metadata", times=None)

    with fails() as failure:
        save(NEW, url, overwrite=False, **arguments)
    assert isinstance(failure.causes[0], StorageReadError)
    failure.names("rights")
    assert folder_files(proxied_store, "old") == before

    # S3 answers 403 for a missing object when listing is not allowed, so overwriting must go on, beside the old files.
    save(NEW, url, overwrite=True, **arguments)
    proxy.clear()
    assert_loads(NEW, url, **arguments)
    after = folder_files(proxied_store, "old")
    assert {name: after[name] for name in before if name.endswith(".distcp")} == {
        name: data for name, data in before.items() if name.endswith(".distcp")
    }
