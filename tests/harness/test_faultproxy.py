"""The fault proxy does to requests what it says, in front of a server that verifies signatures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import botocore.exceptions
import fsspec
import pytest
from botocore.config import Config

from dcp_fsspec.testing.servers import SeaweedServer
from support.faultproxy import Corrupt, Cut, CutUpload, FaultProxy, Lose, Reset, Stall, Status
from support.stores import S3Store

DATA = bytes(range(256)) * 12_000  # 3 MB


@pytest.fixture
def client(seaweed: SeaweedServer, proxy: FaultProxy) -> Any:
    """A client that does not retry, so that every fault shows."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=proxy.endpoint_url,
        aws_access_key_id=seaweed.access_key,
        aws_secret_access_key=seaweed.secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def test_signed_requests_pass_unchanged(proxied_store: S3Store, proxy: FaultProxy) -> None:
    filesystem = fsspec.filesystem("s3", **proxied_store.storage_options)
    path = f"{proxied_store.bucket}/{proxied_store.prefix}/a b+c%20é"
    filesystem.pipe_file(path, DATA)
    assert filesystem.cat_file(path, start=1000, end=2_000_000) == DATA[1000:2_000_000]
    assert proxied_store.raw_read("a b+c%20é") == DATA
    assert filesystem.ls(f"{proxied_store.bucket}/{proxied_store.prefix}", refresh=True) == [path]
    (put,) = proxy.requests("PUT")
    (get,) = proxy.requests("GET")
    assert (put.key, put.request_bytes, put.status) == (f"{proxied_store.prefix}/a b+c%20é", len(DATA), 200)
    assert (get.range, get.response_bytes, get.status) == ("bytes=1000-1999999", 1_999_000, 206)
    assert proxy.requests("LIST")


def test_multipart_operations_are_told_apart(proxied_store: S3Store, proxy: FaultProxy) -> None:
    filesystem = fsspec.filesystem("s3", **proxied_store.storage_options)
    with filesystem.open(f"{proxied_store.bucket}/{proxied_store.prefix}/big", "wb", block_size=5 << 20) as file:
        file.write(DATA * 4)
    assert proxied_store.raw_read("big") == DATA * 4
    assert len(proxy.requests("CREATE_MPU")) == len(proxy.requests("COMPLETE_MPU")) == 1
    assert sum(part.request_bytes for part in proxy.requests("PART")) == len(DATA) * 4


def test_unforwarded_faults_leave_nothing(proxied_store: S3Store, proxy: FaultProxy, client: Any) -> None:
    key = f"{proxied_store.prefix}/x"
    for action in (Status(503, "SlowDown"), Reset(), CutUpload()):
        rule = proxy.add(action, operation="PUT", key=key)
        with pytest.raises((botocore.exceptions.ClientError, botocore.exceptions.HTTPClientError)) as caught:
            client.put_object(Bucket=proxied_store.bucket, Key=key, Body=DATA)
        assert rule.fired == 1
        if isinstance(action, Status):
            assert caught.value.response["Error"]["Code"] == "SlowDown"
    assert proxied_store.raw_list() == {}


def test_lost_answer_leaves_the_object(proxied_store: S3Store, proxy: FaultProxy, client: Any) -> None:
    proxy.add(Lose(), operation="PUT")
    with pytest.raises(botocore.exceptions.HTTPClientError):
        client.put_object(Bucket=proxied_store.bucket, Key=f"{proxied_store.prefix}/x", Body=DATA)
    assert proxied_store.raw_read("x") == DATA
    (exchange,) = proxy.log
    assert (exchange.status, exchange.fault) == (None, "Lose")


def test_answers_are_cut_and_corrupted(proxied_store: S3Store, proxy: FaultProxy, client: Any) -> None:
    proxied_store.raw_write("x", DATA)

    def get() -> bytes:
        answer = client.get_object(
            Bucket=proxied_store.bucket, Key=f"{proxied_store.prefix}/x", Range="bytes=10-2000009"
        )
        return bytes(answer["Body"].read())

    proxy.add(Corrupt(offset=5), operation="GET", skip=1)
    wanted = DATA[10:2_000_010]
    assert get() == wanted
    assert [at for at, (a, b) in enumerate(zip(get(), wanted, strict=True)) if a != b] == [5]
    proxy.add(Cut(), operation="GET")
    with pytest.raises(botocore.exceptions.BotoCoreError):
        get()
    assert proxy.log[-1].response_bytes == 1_000_000
    assert get() == wanted


def test_stalled_request_goes_on_when_released(proxied_store: S3Store, proxy: FaultProxy, client: Any) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT")
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(client.put_object, Bucket=proxied_store.bucket, Key=f"{proxied_store.prefix}/x", Body=b"1")
        assert stall.arrived.wait(20)
        assert not put.done()
        assert proxied_store.raw_list() == {}
        stall.released.set()
        put.result(20)
    assert proxied_store.raw_list() == {"x": 1}
