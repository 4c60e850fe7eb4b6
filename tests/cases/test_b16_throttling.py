"""B16: throttling and short faults of the server pass; lasting ones end, and say where."""

from __future__ import annotations

import pytest

from dcp_fsspec import StorageReadError, StorageWriteError
from support.checkpoints import assert_loads, fails, folder_files, impatient, load, save, threads_of_ours
from support.faultproxy import FaultProxy, Reset, Status
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = pytest.mark.server

SHARD_BYTES = 64 << 10
STATE = {f"tensor{number}": random_tensor(15_000, seed=number) for number in range(4)}


def test_b16_short_faults_of_many_kinds_are_survived_by_save_and_load(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    # With less patience beneath it than by default, the package has to bear more; and the waits are shorter.
    arguments = {**impatient(proxied_store.storage_options), "retry_seconds": 60}
    save(STATE, proxied_store.below("calm"), shard_bytes=SHARD_BYTES, **arguments)
    throttled = proxy.add(Status(503, "SlowDown"), operation="PUT", key="*/stormy/__0_0.distcp", times=8)
    broken = proxy.add(Status(500, "InternalError"), operation="PUT", key="*/stormy/__0_1.distcp", times=3)
    reset = proxy.add(Reset(), operation="PUT", key="*/stormy/__0_2.distcp", times=2)

    url = proxied_store.below("stormy")
    save(STATE, url, shard_bytes=SHARD_BYTES, **arguments)

    assert (throttled.fired, broken.fired, reset.fired) == (8, 3, 2)
    files, calm = folder_files(proxied_store, "stormy"), folder_files(proxied_store, "calm")
    assert files.keys() == calm.keys()
    shards = [name for name in files if name.endswith(".distcp")]
    assert len(shards) == 4
    assert {name: files[name] for name in shards} == {name: calm[name] for name in shards}

    slow = proxy.add(Status(503, "SlowDown"), operation="GET", key="*/stormy/__0_3.distcp", times=3)
    assert_loads(STATE, url, **arguments)
    assert slow.fired == 3


def test_b16_denied_access_is_not_tried_again(proxied_store: S3Store, proxy: FaultProxy) -> None:
    arguments = {"storage_options": proxied_store.storage_options}
    url = proxied_store.below("denied")
    denied = proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*/__0_0.distcp", times=None)
    with fails() as failure:
        save(STATE, url, **arguments)
    assert denied.fired == 2, "once signed, once through the filesystem, whose error it is"
    failure.names(f"{url}/__0_0.distcp", "StorageWriteError", "PermissionError")

    proxy.clear()
    save(STATE, url, **arguments)
    denied = proxy.add(Status(403, "AccessDenied"), operation="GET", key="*/__0_0.distcp", times=None)
    with fails() as failure:
        load(STATE, url, **arguments)
    assert denied.fired == 2, "once signed, once through the filesystem, whose error it is"
    failure.names(f"{url}/__0_0.distcp", "StorageReadError", "PermissionError")


@pytest.mark.parametrize(("seconds", "least"), [(0, 1), (3, 3)])
def test_b16_endless_throttling_ends_by_the_configured_limit_and_names_the_object(
    proxied_store: S3Store, proxy: FaultProxy, seconds: float, least: int
) -> None:
    arguments = {**impatient(proxied_store.storage_options), "retry_seconds": seconds}
    url = proxied_store.below("throttled")
    rule = proxy.add(Status(503, "ServiceUnavailable"), operation="PUT", key="*/__0_1.distcp", times=None)
    with fails() as failure:
        save(STATE, url, shard_bytes=SHARD_BYTES, **arguments)
    assert isinstance(failure.causes[0], StorageWriteError)
    failure.names(f"{url}/__0_1.distcp")
    assert rule.fired >= least
    assert (rule.fired == 1) == (seconds == 0)
    assert proxied_store.raw_list() == {}
    assert threads_of_ours() == []

    proxy.clear()
    save(STATE, url, shard_bytes=SHARD_BYTES, **arguments)
    proxy.add(Status(503, "ServiceUnavailable"), operation="GET", key="*/__0_1.distcp", times=None)
    with fails() as failure:
        load(STATE, url, **arguments)
    assert isinstance(failure.causes[0], StorageReadError)
    failure.names(f"{url}/__0_1.distcp")


def test_b16_final_error_of_one_file_ends_the_retries_of_the_others(proxied_store: S3Store, proxy: FaultProxy) -> None:
    # An hour of patience: that this ends at all shows that the other file's retries were called off.
    arguments = {**impatient(proxied_store.storage_options), "retry_seconds": 3600}
    url = proxied_store.below("both")
    throttled = proxy.add(Status(503, "ServiceUnavailable"), operation="PUT", key="*/__0_0.distcp", times=None)
    # Whichever file comes first, the one is refused while the other is being tried again.
    other = {"operation": "PUT", "key": "*/__0_3.distcp", "times": None}
    proxy.add(Status(503, "ServiceUnavailable"), when=lambda _: throttled.fired == 0, **other)
    proxy.add(Status(403, "AccessDenied"), when=lambda _: throttled.fired > 0, **other)
    with fails() as failure:
        save(STATE, url, shard_bytes=SHARD_BYTES, **arguments)
    failure.names(f"{url}/__0_3.distcp", "PermissionError")
    assert [name for name in proxied_store.raw_list() if name.endswith(".metadata")] == []
