"""Requests that go past the filesystem: where they work, where they do not, and what becomes of their connections."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import pytest

from dcp_fsspec.storage import direct
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.signing import signer_of
from support.checkpoints import assert_loads, save
from support.faultproxy import Cut, FaultProxy, Status
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = pytest.mark.server

STATE = {f"tensor{number}": random_tensor(20_000, seed=number) for number in range(6)}
SHARD_BYTES = 64 << 10


def _signed(proxy: FaultProxy, operation: str) -> list[bool]:
    """Tell of each request whether its signature was in the url."""
    return ["X-Amz-Signature" in exchange.query for exchange in proxy.requests(operation)]


def test_shard_files_go_up_and_come_down_by_signed_requests(proxied_store: S3Store, proxy: FaultProxy) -> None:
    options = {"storage_options": proxied_store.storage_options}
    save(STATE, proxied_store.below("c"), shard_bytes=SHARD_BYTES, **options)
    assert_loads(STATE, proxied_store.below("c"), **options)
    assert _signed(proxy, "PUT").count(True) >= len(STATE)
    assert any(_signed(proxy, "GET"))


def test_store_that_takes_no_signed_urls_is_served_through_the_filesystem(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    options = {"storage_options": proxied_store.storage_options}
    proxy.add(
        Status(403, "AccessDenied"), method=None, when=lambda exchange: "X-Amz-Signature" in exchange.query, times=None
    )
    save(STATE, proxied_store.below("c"), shard_bytes=SHARD_BYTES, max_concurrency=1, **options)
    assert_loads(STATE, proxied_store.below("c"), **options)
    assert _signed(proxy, "PUT").count(True) == 1, "asked again after it was clear"


def _hang_up() -> None:
    """End all connections that lie idle, as a store does after a while."""
    for _, _, connection in direct._idle._kept:
        with contextlib.suppress(OSError):  # Its server is gone already.
            connection.sock.shutdown(socket.SHUT_RDWR)


def test_connection_that_the_store_closed_meanwhile_costs_no_retry(proxied_store: S3Store) -> None:
    store = Store(proxied_store.below("c"), proxied_store.storage_options)
    data = os.urandom(100_000)
    store.swap("a", data)
    _hang_up()
    assert bytes(store.read_range("a", 10, 90_000)) == data[10:90_000]
    _hang_up()
    store.swap("b", data)
    assert store.read("b") == data
    assert store.num_retries == 0


def test_body_that_is_cut_is_read_again(proxied_store: S3Store, proxy: FaultProxy) -> None:
    store = Store(proxied_store.below("c"), proxied_store.storage_options)
    data = os.urandom(100_000)
    store.swap("a", data)
    proxy.add(Cut(), operation="GET", key="*/a", times=1)
    assert bytes(store.read_range("a", 0, 100_000)) == data
    assert store.num_retries == 1


@pytest.mark.parametrize("sizes", [[0], [1, 2, 3], [70_000], [5, 70_000, 5, 5, 70_000, 5], [60_000] * 12])
def test_pieces_of_a_body_are_all_of_its_bytes_in_order(sizes: list[int]) -> None:
    buffers = [os.urandom(size) for size in sizes]
    pieces = [bytes(piece) for piece in direct._pieces(buffers)]
    assert b"".join(pieces) == b"".join(buffers)
    assert all(pieces)
    assert len(pieces) <= len(sizes)


@pytest.mark.parametrize(
    "more",
    [
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"requester_pays": True},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
    ],
)
def test_options_that_take_more_than_a_signature_are_left_to_the_filesystem(more: dict[str, Any]) -> None:
    import s3fs

    assert signer_of(s3fs.S3FileSystem(key="key", secret="secret", skip_instance_cache=True)) is not None
    assert signer_of(s3fs.S3FileSystem(key="key", secret="secret", skip_instance_cache=True, **more)) is None


def test_signed_url_is_not_shown() -> None:
    signed = direct.Signed("http://127.0.0.1/b/k?X-Amz-Signature=secret")
    assert "secret" not in repr(signed)
