"""B30: stores that reject checksum headers are served with botocore's own setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter, StorageWriteError
from support.checkpoints import FEW_RETRIES, assert_loads, fails, save
from support.faultproxy import FaultProxy, Status
from support.faults import Exchange
from support.stores import S3Store
from support.tensors import assert_bits_equal, blank_like, random_tensor

pytestmark = pytest.mark.server

STATE = {"tensor": random_tensor(30_000, seed=1), "step": 5}
OLD_STORE = Status(400, "InvalidArgument")
SETTING = {**FEW_RETRIES, "request_checksum_calculation": "when_required"}


def _has_checksum(exchange: Exchange) -> bool:
    return any(name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")) for name in exchange.headers)


def _as_options(options: dict[str, Any]) -> dict[str, Any]:
    return {"storage_options": options}


def _as_filesystem(options: dict[str, Any]) -> dict[str, Any]:
    return {"filesystem": fsspec.filesystem("s3", **options)}


@pytest.mark.parametrize("given", [_as_options, _as_filesystem], ids=["options", "filesystem"])
def test_b30_with_the_setting_no_checksum_header_is_sent_also_after_reset(
    proxied_store: S3Store, proxy: FaultProxy, given: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    refused = proxy.add(OLD_STORE, method="PUT", when=_has_checksum, times=None)
    arguments = given({**(proxied_store.storage_options or {}), "config_kwargs": SETTING})
    writer = FsspecStorageWriter(proxied_store.below("first"), **arguments)
    reader = FsspecStorageReader(proxied_store.below("first"), **arguments)
    for name in ("first", "second", "second"):
        loaded = blank_like(STATE)
        dcp.save(STATE, storage_writer=writer, checkpoint_id=proxied_store.below(name))
        dcp.load(loaded, storage_reader=reader, checkpoint_id=proxied_store.below(name))
        assert_bits_equal(loaded, STATE)
        assert_loads(STATE, proxied_store.below(name), **arguments)
    assert refused.fired == 0
    assert len(proxy.requests("PUT")) == 3 * 3


def test_b30_without_the_setting_the_refusal_is_loud_and_leaves_nothing(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    refused = proxy.add(OLD_STORE, method="PUT", when=_has_checksum, times=None)
    url = proxied_store.below("first")
    with fails() as failure:
        save(STATE, url, storage_options=proxied_store.storage_options)
    assert refused.fired >= 1
    assert isinstance(failure.causes[0], StorageWriteError)
    failure.names(f"{url}/__0_0.distcp")
    assert proxied_store.raw_list() == {}
