"""B28: credentials that expire during a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_fsspec import FsspecStorageWriter, StorageWriteError
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.object_listing import list_times
from dcp_fsspec.storage.streaming import PART_BYTES
from dcp_fsspec.testing.servers import MotoServer
from support.checkpoints import FEW_RETRIES, assert_loads, fails
from support.faultproxy import FaultProxy, Status
from support.faults import Exchange
from support.stores import S3Store
from support.tensors import random_tensor

OLD_KEY, NEW_KEY = "OLDKEYOLDKEYOLDKEY00", "NEWKEYNEWKEYNEWKEY00"
EXPIRED = Status(400, "ExpiredToken")
STATE = {f"tensor{number}": random_tensor(15_000, seed=number) for number in range(4)}


@pytest.fixture
def moto_proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    """A proxy in front of a server that takes every access key."""
    with FaultProxy(moto_server.endpoint_url) as running:
        yield running


@pytest.fixture
def moto_store(moto_server: MotoServer, moto_client: Any) -> Iterator[S3Store]:
    store = S3Store(moto_client, moto_server.bucket)
    yield store
    store.close()


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which botocore finds credentials that options do not name."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    _issue(path, OLD_KEY)
    return path


def _issue(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret-of-{key}\n")


def _signed_by(exchange: Exchange, key: str) -> bool:
    return f"Credential={key}/" in exchange.signature


def _options(proxy: FaultProxy, **more: str) -> dict[str, Any]:
    client = {"endpoint_url": proxy.endpoint_url, "region_name": "us-east-1"}
    return {"client_kwargs": client, "config_kwargs": FEW_RETRIES, **more}


def test_b28_save_goes_on_with_credentials_that_were_renewed_meanwhile(
    moto_store: S3Store, moto_proxy: FaultProxy, credentials: Path
) -> None:
    expired = False

    def expires(exchange: Exchange) -> bool:
        nonlocal expired
        if not expired and exchange.method == "PUT":
            expired = True
            _issue(credentials, NEW_KEY)
        return expired and _signed_by(exchange, OLD_KEY)

    refused = moto_proxy.add(EXPIRED, when=expires, times=None)
    arguments = {"storage_options": _options(moto_proxy)}
    writer = FsspecStorageWriter(moto_store.below("a"), shard_bytes=64 << 10, **arguments)
    dcp.save(STATE, storage_writer=writer)

    assert refused.fired >= 1
    assert_loads(STATE, moto_store.below("a"), **arguments)
    assert all(_signed_by(put, NEW_KEY) for put in moto_proxy.requests("PUT") if put.fault is None)
    dcp.save(STATE, storage_writer=writer, checkpoint_id=moto_store.below("b"))
    assert_loads(STATE, moto_store.below("b"), **arguments)


def test_b28_expired_credentials_are_called_so_and_the_next_save_after_renewal_works(
    moto_store: S3Store, moto_proxy: FaultProxy, credentials: Path
) -> None:
    moto_proxy.add(EXPIRED, when=lambda exchange: _signed_by(exchange, OLD_KEY), times=None)
    writer = FsspecStorageWriter(moto_store.below("a"), storage_options=_options(moto_proxy))
    with fails() as failure:
        dcp.save(STATE, storage_writer=writer)
    assert "expired" in failure.text.lower()
    failure.names(moto_store.below("a"))
    assert moto_store.raw_list() == {}

    _issue(credentials, NEW_KEY)
    dcp.save(STATE, storage_writer=writer)
    assert_loads(STATE, moto_store.below("a"), storage_options=_options(moto_proxy))


def test_b28_explicit_keys_cannot_be_renewed_and_fail_loudly_until_new_ones_are_passed(
    moto_store: S3Store, moto_proxy: FaultProxy
) -> None:
    url = moto_store.below("a")
    expired = moto_proxy.add(EXPIRED, method="PUT", when=lambda exchange: _signed_by(exchange, OLD_KEY), times=None)
    old = _options(moto_proxy, key=OLD_KEY, secret="secret-of-the-old-key")
    with fails() as failure:
        dcp.save(STATE, storage_writer=FsspecStorageWriter(url, storage_options=old))
    assert isinstance(failure.causes[0], StorageWriteError)
    assert "expired" in failure.text.lower()
    failure.names(f"{url}/__0_0.distcp")
    assert expired.fired <= 4, "two sessions, each once by a signed request and once through the filesystem"
    assert OLD_KEY not in failure.text
    assert "secret-of" not in failure.text
    assert moto_store.raw_list() == {}

    new = {"storage_options": _options(moto_proxy, key=NEW_KEY, secret="secret-of-the-new-key")}
    dcp.save(STATE, storage_writer=FsspecStorageWriter(url, **new))
    assert_loads(STATE, url, **new)


@pytest.mark.parametrize("how", ["list_files", "list_folder", "quickly", "publish_stream"])
def test_b28_whatever_is_under_way_goes_on_with_the_new_credentials(
    how: str, moto_store: S3Store, moto_proxy: FaultProxy, credentials: Path
) -> None:
    moto_store.raw_write("a/x", b"123")
    store = Store(moto_store.below("a"), _options(moto_proxy))
    assert store.list_files() == {"x": 3}
    _issue(credentials, NEW_KEY)
    refused = moto_proxy.add(EXPIRED, when=lambda exchange: _signed_by(exchange, OLD_KEY), times=None)
    if how == "publish_stream":
        store.publish_stream("y", [bytes(PART_BYTES), b"1"], PART_BYTES + 1)
        assert moto_store.raw_list()["a/y"] == PART_BYTES + 1
    else:
        ways = {"list_files": store.list_files, "list_folder": store.list_folder, "quickly": lambda: list_times(store)}
        assert list(ways[how]()) == ["x"]
    assert refused.fired >= 1
