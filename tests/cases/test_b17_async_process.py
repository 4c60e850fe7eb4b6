"""B02, B17, B36, B38: saves by `dcp.async_save` in a process of their own, on two ranks.

One test, because every rank has to start that process once, and that takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_fsspec import FsspecStorageWriter
from dcp_fsspec.testing.servers import SeaweedServer
from support.checkpoints import assert_loads
from support.ranks import RankPool, values
from support.stores import S3Store, obstore_filesystem
from support.tensors import random_tensor, state_of_all_dtypes, state_of_all_shapes


def _full() -> dict[str, torch.Tensor]:
    return {"rows": random_tensor(7, 5), "one": random_tensor(1, seed=1), "large": random_tensor(900, 700, seed=2)}


def _odd() -> dict[str, Any]:
    return {**state_of_all_dtypes(), **state_of_all_shapes(), "n": 5, "nested": {"text": "x"}}


def _spread() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in _full().items()}
    assert all(isinstance(tensor, DTensor) for tensor in sharded.values())
    return sharded


def _save(state: dict[str, Any], writer: FsspecStorageWriter, **arguments: Any) -> str:
    """Return what went wrong; nothing after a success."""
    saving = dcp.async_save(
        state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **arguments
    )
    assert isinstance(saving, Future)
    try:
        saving.result(90)
    except BaseException as error:  # torch's own is no Exception
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _daemon_ended() -> Iterator[None]:
    """Let torch's upload process, which would outlive the process group of this run, end with it."""
    try:
        yield
    finally:
        executor._CHECKPOINT_PROCESS = None


def _save_everywhere(rank: int, folder: str, root: str, s3: dict[str, Any], obstore: tuple[str, ...]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with _daemon_ended():
        writer = FsspecStorageWriter(f"{root}/options", storage_options=s3, shard_bytes=1 << 20)
        report["options"] = _save(_spread(), writer)
        report["another place"] = _save(_spread(), writer, checkpoint_id=f"{root}/another")
        report["memory"] = _save(_spread(), FsspecStorageWriter("memory://process/ckpt"))
        report["memory instance"] = _save(_spread(), FsspecStorageWriter("process/x", filesystem=MemoryFileSystem()))
        report["unwritable"] = _save(_spread(), FsspecStorageWriter("/proc/nope/ckpt"))
        passed = fsspec.filesystem("s3", **s3)
        report["filesystem"] = _save(_spread(), FsspecStorageWriter(f"{root}/filesystem", filesystem=passed))
        rust = obstore_filesystem(*obstore)
        report["obstore"] = _save(_spread(), FsspecStorageWriter(f"{root}/obstore", filesystem=rust))
        report["path"] = _save(_spread(), FsspecStorageWriter(f"{folder}/path"))
        stager = DefaultStager(StagingOptions(False, True, False, False))  # by shared memory
        report["shared memory"] = _save(_odd(), FsspecStorageWriter(f"{folder}/odd"), async_stager=stager)
        stager.close()
        report["left in memory"] = [path for path in MemoryFileSystem.store if path.startswith("/process/")]
    return report


@pytest.mark.slow
@pytest.mark.distributed
def test_b17_saves_in_a_process_of_their_own(
    two_ranks: RankPool, seaweed: SeaweedServer, seaweed_store: S3Store, tmp_path: Path
) -> None:
    """B02: options and filesystems arrive there. B17: memory, which does not, is refused. B36, B38: every tensor."""
    obstore = (seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    reports = values(
        two_ranks.run(_save_everywhere, str(tmp_path), seaweed_store.url, seaweed_store.storage_options, obstore)
    )
    for report in reports:
        for refused in ("memory", "memory instance"):
            text = report.pop(refused)
            assert "ConfigurationError" in text, text
            assert "process" in text, text
        text = report.pop("unwritable")
        assert "/proc/nope/ckpt" in text, text
        assert report.pop("left in memory") == []
        assert all(text == "" for text in report.values()), "\n".join(map(str, report.items()))
    for name in ("options", "another", "filesystem", "obstore"):
        assert_loads(_full(), seaweed_store.below(name), **seaweed_store.arguments)
    assert_loads(_full(), str(tmp_path / "path"))
    assert_loads(_odd(), str(tmp_path / "odd"))
