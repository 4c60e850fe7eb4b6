"""s3torchconnector loads what we wrote, we load what it wrote, by two ranks and by one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.stores import Store
from support.tensors import assert_bits_equal, blank_like, state_of_everything
from support.worlds import Layout, assert_holds, blank, full_tensors, laid_out

pytestmark = pytest.mark.distributed

SHARD_BYTES = 128 << 10
ROWS = Layout([0, 1], (Shard(0),))


@contextlib.contextmanager
def _environment(storage_options: dict[str, Any]) -> Iterator[None]:
    """Point s3torchconnector at a server: its DCP classes take no endpoint and no keys."""
    variables = {
        "AWS_ENDPOINT_URL": storage_options["client_kwargs"]["endpoint_url"],
        "AWS_ACCESS_KEY_ID": storage_options["key"],
        "AWS_SECRET_ACCESS_KEY": storage_options["secret"],
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _plain() -> dict[str, Any]:
    return state_of_everything(large_bytes=512 << 10)


def _assert_ranks_load(reader: Any, path: str) -> None:
    full, plain = full_tensors(large_rows=400), _plain()
    loaded: dict[str, Any] = {"sharded": laid_out(blank(full), ROWS), "plain": blank_like(plain)}
    dcp.load(loaded, storage_reader=reader)
    assert_holds(loaded["sharded"], full, path)
    assert_bits_equal(loaded["plain"], plain, path)


def _exchange(rank: int, url: str, storage_options: dict[str, Any]) -> None:
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    state = {"sharded": laid_out(full_tensors(large_rows=400), ROWS), "plain": _plain()}
    theirs: dict[str, Any] = {"region": "us-east-1", "s3client_config": S3ClientConfig(force_path_style=True)}
    writer = FsspecStorageWriter(f"{url}/ours", shard_bytes=SHARD_BYTES, storage_options=storage_options)
    dcp.save(state, storage_writer=writer)
    with _environment(storage_options):
        dcp.save(state, storage_writer=S3StorageWriter(path=f"{url}/theirs", **theirs))
        dcp.save(state, storage_writer=S3StorageWriter(path=f"{url}/threads", thread_count=4, **theirs))
        dist.barrier()
        _assert_ranks_load(S3StorageReader(path=f"{url}/ours", **theirs), "ours by their reader")
        optimized = S3ReaderConstructor.dcp_optimized()
        reader = S3StorageReader(path=f"{url}/ours", reader_constructor=optimized, **theirs)
        _assert_ranks_load(reader, "ours by their reader for DCP")
    for name in ("theirs", "threads"):
        _assert_ranks_load(FsspecStorageReader(f"{url}/{name}", storage_options=storage_options), name)


@pytest.mark.parametrize("store", ["moto", pytest.param("seaweed", marks=pytest.mark.server)], indirect=True)
def test_s3torchconnector_and_we_read_each_other(store: Store, two_ranks: RankPool) -> None:
    values(two_ranks.run(_exchange, store.url, store.storage_options))
    full, plain = full_tensors(large_rows=400), _plain()
    for name in ("theirs", "threads"):
        loaded: dict[str, Any] = {"sharded": blank(full), "plain": blank_like(plain)}
        dcp.load(loaded, storage_reader=FsspecStorageReader(store.below(name), **store.arguments))
        assert_bits_equal(loaded, {"sharded": full, "plain": plain})
