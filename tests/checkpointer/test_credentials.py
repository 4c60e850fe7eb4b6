"""A Cosmos credentials file: what becomes of it, and that it is followed when it changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec import ConfigurationError, CosmosCredentials, DistributedCheckpointer, KeepLatest
from dcp_fsspec.testing.servers import MotoServer
from support.faultproxy import FaultProxy
from support.stores import S3Store
from support.training import assert_same, make_job

OLD, NEW = "OLDKEYOLDKEYOLDKEY00", "NEWKEYNEWKEYNEWKEY00"


@pytest.fixture
def moto_proxy(moto_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto_server.endpoint_url) as running:
        yield running


def _issue(path: Path, key: str, proxy: FaultProxy) -> None:
    arguments = {
        "service_name": "s3",
        "aws_access_key_id": key,
        "aws_secret_access_key": f"secret-of-{key}",
        "endpoint_url": proxy.endpoint_url,
        "region_name": "us-east-1",
    }
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(arguments))
    os.replace(fresh, path)


def test_the_arguments_of_boto3_become_options_of_s3fs(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(
        json.dumps(
            {
                "aws_access_key_id": "k",
                "aws_secret_access_key": "s",
                "aws_session_token": "t",
                "endpoint_url": "http://127.0.0.1:1",
                "region_name": "r",
                "config": {"retries": {"max_attempts": 3}},
            }
        )
    )
    credentials = CosmosCredentials(path)
    assert dict(credentials) == {
        "key": "k",
        "secret": "s",
        "token": "t",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:1", "region_name": "r"},
        "config_kwargs": {"retries": {"max_attempts": 3}},
    }
    assert repr(credentials) == f"CosmosCredentials('{path}')"


@pytest.mark.parametrize("content", [None, "", "[]", "{", "\udcff"])
def test_a_file_that_is_none_is_refused_without_its_content(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "credentials"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigurationError, match=str(path)):
        CosmosCredentials(path)


def test_a_job_follows_the_file_from_one_save_to_the_next(
    moto_server: MotoServer, moto_client: Any, moto_proxy: FaultProxy, tmp_path: Path
) -> None:
    store = S3Store(moto_client, moto_server.bucket)
    path = tmp_path / "credentials"
    _issue(path, OLD, moto_proxy)
    job = make_job()
    checkpointer = DistributedCheckpointer(
        store.below("job"), storage_options=CosmosCredentials(path), retention=KeepLatest(1)
    )
    checkpointer.save(*job.parts, 10)
    checkpointer.wait()
    assert all(OLD in one.signature for one in moto_proxy.log)
    _issue(path, NEW, moto_proxy)
    moto_proxy.clear()
    checkpointer.save(*job.train(1).parts, 20)
    checkpointer.finalize()
    assert moto_proxy.log
    assert all(NEW in one.signature for one in moto_proxy.log)
    fresh = make_job(1)
    assert checkpointer.load(*fresh.parts) == 20
    assert_same(fresh, job.state())
    assert checkpointer.catalog.iterations() == [20]
    store.close()
