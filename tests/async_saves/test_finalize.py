"""`finalize`: twice, from one rank only, after a failure, without any save; it returns, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_fsspec import AsyncSaveError
from support.faultproxy import FaultProxy, Status
from support.jobs import BACKGROUND, MODES, Job, children, raised
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor


def _finalize_in_all_ways(rank: int, folder: str, mode: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    begin = time.monotonic()
    job = Job(f"{folder}/none", async_mode=mode)
    job.checkpointer.finalize()
    told["no save"] = time.monotonic() - begin
    job.checkpointer.finalize()
    dist.barrier()
    job = Job(f"{folder}/some", async_mode=mode, own={"x": random_tensor(1000, seed=rank)})
    for iteration in (1, 2):
        job.save(iteration)
        # As a progress bar's callback does on the first rank, before the trainer does on all.
        if rank == 0:
            job.checkpointer.finalize()
        job.checkpointer.finalize()
    told["heard"] = [job.ears.told(kind) for kind in ("success", "failure", "end")]
    told["threads"] = job.ears.threads
    told["children"] = children()
    return told


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_finalize_returns_however_often_and_wherever_it_is_called(
    mode: str, two_ranks: RankPool, tmp_path: Path
) -> None:
    for told in values(two_ranks.run(_finalize_in_all_ways, str(tmp_path), mode)):
        assert told["no save"] < 60
        assert told["heard"] == [[1, 2], [], [1, 2]]
        assert told["threads"] == {"MainThread"}
        assert told["children"] == []


def _finalize_after_failure(rank: int, url: str, options: dict[str, Any], mode: str) -> dict[str, Any]:
    arguments = {"storage_options": options, "async_mode": mode, "writer_settings": {"retry_seconds": 0}}
    job = Job(url, own={"x": random_tensor(1000, seed=rank)}, **arguments)
    job.save(4)
    told: dict[str, Any] = {"first": raised(job.checkpointer.finalize), "second": raised(job.checkpointer.finalize)}
    told["heard"] = [job.ears.told(kind) for kind in ("success", "failure")]
    told["children"] = children()
    job.save(5)
    job.checkpointer.finalize()
    told["afterwards"] = job.ears.told("success")
    return told


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", BACKGROUND)
def test_finalize_tells_a_failure_once_and_on_every_rank(
    mode: str, two_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*iter_000000004/own/__1_*.distcp", times=None)
    outcomes = two_ranks.run(_finalize_after_failure, proxied_store.url, proxied_store.storage_options, mode)
    for told in values(outcomes):
        assert isinstance(told["first"], AsyncSaveError)
        assert "iteration 4" in str(told["first"])
        assert told["second"] is None
        assert told["heard"] == [[], [4]]
        assert told["children"] == []
        assert told["afterwards"] == [5]
