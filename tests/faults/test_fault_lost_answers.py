"""The store carries a write out and its answer is lost: the save ends well, and never destroys what stands."""

from __future__ import annotations

import pytest

from dcp_fsspec import DcpFsspecError
from support.checkpoints import assert_loads, fails, folder_files, impatient, save
from support.faultproxy import FaultProxy, Lose, Status
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = pytest.mark.server

SHARD_BYTES = 64 << 10
OLD = {f"tensor{number}": random_tensor(15_000, seed=number) for number in range(3)}
NEW = {f"tensor{number}": random_tensor(15_000, seed=10 + number) for number in range(3)}
FILES = {"shard": "*/__0_1*.distcp", "checksums": "*/checksums*.json", "commit": "*/.metadata"}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("mode", ["first", "overwrite", "create_only"])
def test_lost_answer_to_any_write_does_not_fail_the_save(
    proxied_store: S3Store, proxy: FaultProxy, file: str, mode: str
) -> None:
    arguments = {**impatient(proxied_store.storage_options), "retry_seconds": 60}
    url = proxied_store.below("c")
    if mode == "overwrite":
        save(OLD, url, shard_bytes=SHARD_BYTES, **arguments)
    lost = proxy.add(Lose(), operation="PUT", key=FILES[file])
    save(NEW, url, shard_bytes=SHARD_BYTES, overwrite=mode != "create_only", **arguments)
    assert lost.fired == 1
    assert_loads(NEW, url, **arguments)
    assert len(folder_files(proxied_store, "c")) == 3 + 2, "a file too many is left"


@pytest.mark.parametrize("overwrite", [True, False])
def test_commit_whose_answers_are_all_lost_is_read_back_and_taken_for_done(
    proxied_store: S3Store, proxy: FaultProxy, overwrite: bool
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("c")
    lost = proxy.add(Lose(), operation="PUT", key=FILES["commit"], times=None)
    save(NEW, url, shard_bytes=SHARD_BYTES, overwrite=overwrite, **arguments)
    assert lost.fired >= 1
    assert_loads(NEW, url, **arguments)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("action", [Status(403, "AccessDenied"), Status(503, "ServiceUnavailable")], ids=["403", "503"])
def test_commit_of_unknown_outcome_that_cannot_be_read_back_is_an_error_and_stays_whole(
    proxied_store: S3Store, proxy: FaultProxy, overwrite: bool, action: Status
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("c")
    # A few answers are lost, for the retries beneath the package to meet their own success; then nothing can be read.
    lost = proxy.add(Lose(), operation="PUT", key=FILES["commit"], times=1)
    proxy.add(action, method="GET", key=FILES["commit"], when=lambda _: lost.fired > 0, times=None)
    proxy.add(action, method="PUT", key=FILES["commit"], when=lambda _: overwrite, times=None)
    with fails() as failure:
        save(NEW, url, shard_bytes=SHARD_BYTES, overwrite=overwrite, **arguments)
    assert isinstance(failure.causes[0], DcpFsspecError)
    failure.names(f"{url}/.metadata")
    # It had arrived, so what it refers to must be there.
    proxy.clear()
    assert_loads(NEW, url, **arguments)


def test_lost_answer_to_the_removal_of_an_old_file_does_not_fail_the_save(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    arguments = impatient(proxied_store.storage_options)
    url = proxied_store.below("c")
    save(OLD, url, shard_bytes=SHARD_BYTES, **arguments)
    proxy.add(Lose(), operation="DELETE", times=None)
    save(NEW, url, shard_bytes=SHARD_BYTES, **arguments)
    assert_loads(NEW, url, **arguments)
