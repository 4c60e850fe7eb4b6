"""Fixtures that all tests share: servers, and a fresh store of every kind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from dcp_fsspec.testing.cloud_servers import AzuriteServer, GcsServer
from dcp_fsspec.testing.servers import MotoServer, SeaweedServer, WebdavServer
from support.faultproxy import FaultProxy
from support.ranks import RankPool
from support.stores import (
    AzureStore,
    FolderStore,
    GcsStore,
    MemoryStore,
    S3Store,
    Store,
    obstore_filesystem,
    unique_name,
)

STORE_KINDS = ("path", "file", "memory", "moto", "seaweed", "obstore", "webdav", "azure", "gcs")

# Read when gcsfs is imported; see `GcsServer`.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure() -> None:
    """Be interruptible: a shell that starts its commands in the background has them ignore Ctrl-C, tests included."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long.txt."""
    lines = (Path(__file__).parent / "long.txt").read_text().splitlines()
    long = {f"tests/{line}" for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in long:
            item.add_marker("long")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Put back how much the package logs: the command line changes it, and may run in the process of a test."""
    logger = logging.getLogger("dcp_fsspec")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """One real S3 server for the whole run."""
    with SeaweedServer(bucket="test-bucket") as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    with MotoServer(bucket="moto-bucket") as server:
        yield server


@pytest.fixture(scope="session")
def webdav() -> Iterator[WebdavServer]:
    with WebdavServer() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    if shutil.which("azurite-blob") is None:
        pytest.skip("no Azure emulator: `npm install azurite`, and put node_modules/.bin on the path")
    with AzuriteServer(bucket="test-container") as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    with GcsServer(bucket="test-bucket") as server:
        yield server


@pytest.fixture(scope="session")
def seaweed_client(seaweed: SeaweedServer) -> Any:
    """One boto3 client for all raw access to the real S3 server; making one takes a while."""
    return seaweed.boto3_client()


@pytest.fixture(scope="session")
def moto_client(moto_server: MotoServer) -> Any:
    return moto_server.boto3_client()


@pytest.fixture
def seaweed_store(seaweed: SeaweedServer, seaweed_client: Any) -> Iterator[S3Store]:
    """A fresh prefix on the real S3 server, through s3fs."""
    store = S3Store(seaweed_client, seaweed.bucket, seaweed.storage_options())
    yield store
    store.close()


@pytest.fixture(scope="session")
def running_proxy(seaweed: SeaweedServer) -> Iterator[FaultProxy]:
    """One proxy for the whole run: each address of its own would cost every client a session of its own."""
    with FaultProxy(seaweed.endpoint_url) as running:
        yield running


@pytest.fixture
def proxy(running_proxy: FaultProxy) -> Iterator[FaultProxy]:
    """A fault proxy in front of the real S3 server, without rules and with an empty log."""
    running_proxy.clear()
    yield running_proxy
    running_proxy.clear()


@pytest.fixture
def proxied_store(seaweed: SeaweedServer, seaweed_client: Any, proxy: FaultProxy) -> Iterator[S3Store]:
    """A fresh prefix on the real S3 server, through s3fs and `proxy`; raw access goes around the proxy."""
    options = seaweed.storage_options(endpoint_url=proxy.endpoint_url)
    store = S3Store(seaweed_client, seaweed.bucket, options)
    yield store
    store.close()


@pytest.fixture(params=STORE_KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store of each kind in turn; `parametrize("store", [...], indirect=True)` chooses kinds."""
    made = _make_store(request.param, request, tmp_path)
    yield made
    made.close()


def _make_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if kind == "path":
        return FolderStore(tmp_path / "root", str(tmp_path / "root"))
    if kind == "file":
        return FolderStore(tmp_path / "root", f"file://{tmp_path}/root")
    if kind == "memory":
        return MemoryStore()
    if kind == "webdav":
        server: WebdavServer = request.getfixturevalue("webdav")
        name = unique_name()
        return FolderStore(server.folder / name, f"webdav://{name}", server.storage_options())
    if kind == "azure":
        azurite: AzuriteServer = request.getfixturevalue("azurite")
        return AzureStore(azurite.container_client(), azurite.storage_options())
    if kind == "gcs":
        gcs: GcsServer = request.getfixturevalue("gcs")
        return GcsStore(gcs.endpoint_url, gcs.bucket, gcs.storage_options())
    names = ("moto_server", "moto_client") if kind == "moto" else ("seaweed", "seaweed_client")
    s3, client = (request.getfixturevalue(name) for name in names)
    if kind == "obstore":
        filesystem = obstore_filesystem(s3.endpoint_url, s3.access_key, s3.secret_key)
        return S3Store(client, s3.bucket, filesystem=filesystem)
    return S3Store(client, s3.bucket, s3.storage_options())


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes that stay for the whole run: `two_ranks.run(function, *arguments)`."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four processes that stay for the whole run."""
    with RankPool(4) as pool:
        yield pool
