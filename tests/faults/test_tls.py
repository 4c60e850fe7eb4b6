"""A store behind https: it serves as one behind http does, and a stranger in its place is named at once."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from crc32c import crc32c

from dcp_fsspec import StorageReadError, StorageWriteError
from dcp_fsspec.storage import direct
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.retry import passes
from dcp_fsspec.storage.translation import Translator
from dcp_fsspec.testing.servers import SeaweedServer
from support.checkpoints import assert_loads, save
from support.stores import unique_name
from support.tensors import random_tensor

pytestmark = pytest.mark.server

STATE = {f"tensor{number}": random_tensor(200_000, seed=number) for number in range(6)}


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    with SeaweedServer(bucket="behind-tls", tls=True) as running:
        yield running


@pytest.fixture
def url(server: SeaweedServer) -> str:
    return f"s3://{server.bucket}/{unique_name()}"


def _without_trust(server: SeaweedServer) -> dict[str, Any]:
    options = server.storage_options()
    options["client_kwargs"].pop("verify")
    return options


def test_saves_and_loads_go_past_the_filesystem_over_tls_too(server: SeaweedServer, url: str) -> None:
    options = {"storage_options": server.storage_options()}
    save(STATE, url, shard_bytes=1 << 20, **options)
    assert_loads(STATE, url, **options)
    assert ("https", server.endpoint_url.removeprefix("https://")) in {kept[1][:2] for kept in direct._idle._kept}


def test_certificate_that_nobody_vouches_for_is_final_and_says_what_to_do(
    server: SeaweedServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Store(url, server.storage_options()), Store(url, _without_trust(server))
    data = b"data"
    ours.publish("old", [data], crc32c(data))
    with caplog.at_level(logging.INFO, "dcp_fsspec"):
        with pytest.raises(StorageWriteError, match=r'certificate is not trusted.*"verify".*AWS_CA_BUNDLE'):
            theirs.publish("new", [data], crc32c(data))
        with pytest.raises(StorageReadError, match="certificate is not trusted"):
            theirs.read("old")
    assert "trying again" not in caplog.text
    assert set(ours.list_files()) == {"old"}


@pytest.mark.parametrize(
    "failure", [ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), ConnectionResetError("reset")]
)
def test_other_failures_say_nothing_of_trust_and_pass(failure: OSError) -> None:
    """Also while a certificate is being handled: of another store, or of another way to the same one."""

    def fail() -> None:
        try:
            raise ssl.SSLCertVerificationError(1, "self-signed certificate")
        except ssl.SSLCertVerificationError:
            raise failure  # noqa: B904

    with pytest.raises(StorageReadError) as caught, Translator(()).translated("read", "s3://b/k"):
        fail()
    assert "trusted" not in str(caught.value)
    assert failure.__context__ is not None
    assert passes(failure) == isinstance(failure, ConnectionResetError)
