"""B31: no object comes near the limits of an S3 upload: 5 GiB a PUT, 10,000 parts, parts of at least 5 MiB."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_fsspec import ConfigurationError, FsspecStorageWriter
from dcp_fsspec.storage.splitting import item_bytes, pack, split_plan
from support.checkpoints import assert_loads, open_uploads, save
from support.faultproxy import FaultProxy, Status
from support.stores import S3Store

MIB, GIB = 1 << 20, 1 << 30


def _plan(*sizes: int, dtype: torch.dtype = torch.float32) -> SavePlan:
    """Return the plan of one huge tensor of which nothing exists."""
    shape = torch.Size(sizes)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=shape)
    return SavePlan([WriteItem(MetadataIndex("huge", chunk.offsets), WriteItemType.TENSOR, tensor_data=data)])


@pytest.mark.parametrize(
    ("sizes", "shard_bytes"),
    [
        ((600 * GIB // 4,), 64 * MIB),
        ((3, 200 * GIB // 4), 4 * GIB),
    ],
    ids=["flat", "three rows"],
)
def test_b31_600_gib_fit_in_files_that_one_upload_can_carry(sizes: tuple[int, ...], shard_bytes: int) -> None:
    """B31: however large a tensor and however it is shaped, pieces and files stay small and nothing is lost."""
    plan = split_plan(_plan(*sizes), shard_bytes, replicated=False)
    pieces = [item_bytes(item) for item in plan.items]
    assert sum(pieces) == 600 * GIB
    assert max(pieces) <= 16 * MIB
    files = [sum(pieces[number] for number in members) for members in pack(pieces, shard_bytes)]
    assert sum(files) == 600 * GIB
    assert max(files) <= shard_bytes
    assert math.ceil(max(files) / (5 * MIB)) <= 10_000
    assert max(files) < 5 * GIB


@pytest.mark.parametrize("shard_bytes", [0, -1, 1024, 5 * GIB, 1 << 40])
def test_b31_a_size_that_cannot_work_is_refused_before_any_data(shard_bytes: int) -> None:
    """B31."""
    with pytest.raises(ConfigurationError, match="shard_bytes"):
        FsspecStorageWriter("memory://x", shard_bytes=shard_bytes)


@pytest.mark.parametrize("block_bytes", [None, MIB], ids=["default", "block size of 1 MiB"])
def test_b31_60_mib_go_up_without_parts(proxied_store: S3Store, proxy: FaultProxy, block_bytes: int | None) -> None:
    """B31: one PUT a file, each a few MiB, so that part numbers and minimal parts do not come in.

    A block size that is too small for streamed writes is of no consequence then.
    """
    options = dict(proxied_store.storage_options or {})
    if block_bytes:
        options["default_block_size"] = block_bytes
    state = {"w": torch.arange(60 * MIB // 8)}
    proxy.add(Status(400, "InvalidArgument"), operation="PART", times=None)
    save(state, proxied_store.below("ckpt"), storage_options=options)
    assert not proxy.requests("CREATE_MPU")
    puts = proxy.requests("PUT", "*.distcp")
    assert len(puts) == len({put.key for put in puts}) >= 8
    assert max(put.request_bytes for put in puts) <= 9 * MIB
    assert_loads(state, proxied_store.below("ckpt"), storage_options=options)


@pytest.mark.slow
def test_b31_parts_of_a_large_file_are_large_and_few(proxied_store: S3Store, proxy: FaultProxy) -> None:
    """B31: who asks for large files gets multipart uploads, complete, within the limits and correct."""
    state = {"w": torch.arange(104 * MIB // 8)}
    save(state, proxied_store.below("ckpt"), **proxied_store.arguments, shard_bytes=128 * MIB)
    parts = proxy.requests("PART")
    if parts:  # else the filesystem sends it in one PUT, which is as good
        smallest = sorted(parts, key=lambda part: int(part.query["partNumber"]))[:-1]
        assert min(part.request_bytes for part in smallest) >= 5 * MIB
        assert len(proxy.requests("COMPLETE_MPU")) == 1
    assert open_uploads(proxied_store) == []
    assert [name for name in proxied_store.raw_list() if name.endswith(".distcp")] == ["ckpt/__0_0.distcp"]
    assert_loads(state, proxied_store.below("ckpt"), **proxied_store.arguments)
