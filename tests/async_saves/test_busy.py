"""One upload at a time: what `save` does meanwhile, who hears how it ended and when, what retention removes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dcp_fsspec import AsyncSaveError, KeepLatest
from dcp_fsspec.checkpointer.catalog import Catalog
from support.faultproxy import FaultProxy, Stall, Status
from support.jobs import BACKGROUND, Job
from support.stores import S3Store
from support.tensors import random_tensor


@pytest.fixture(params=BACKGROUND)
def job(request: pytest.FixtureRequest, proxied_store: S3Store) -> Iterator[Job]:
    made = Job(
        proxied_store.url,
        storage_options=proxied_store.storage_options,
        async_mode=request.param,
        on_busy="skip",
        retention=KeepLatest(2),
        state={"x": random_tensor(300)},
        writer_settings={"retry_seconds": 0},
    )
    yield made
    made.checkpointer.finalize()


def _poll_until_idle(job: Job) -> int:
    """Return how often `poll` said that an upload is under way."""
    tick, times = threading.Event(), 0
    while not job.checkpointer.poll():
        tick.wait(0.02)
        times += 1
    return times


def test_saves_are_skipped_while_an_upload_hangs_and_told_promptly_once_in_the_main_thread(
    job: Job, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    """Also retention: it never removes what the pointer names or what is being written."""
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*iter_000000001/box/*.distcp")
    assert job.checkpointer.poll()
    assert job.save(1)
    assert stall.arrived.wait(60)
    assert not job.checkpointer.poll()
    assert not job.save(2)
    assert not job.save(3)
    assert job.ears.told("end") == [1]
    stall.released.set()
    _poll_until_idle(job)
    assert job.ears.told("success") == [1]
    assert job.checkpointer.poll()
    for iteration in (4, 5, 6):
        assert job.save(iteration)
        _poll_until_idle(job)
    job.checkpointer.wait()
    assert job.ears.told("success") == [1, 4, 5, 6]
    assert job.ears.told("failure") == []
    assert job.ears.threads == {"MainThread"}
    assert job.checkpointer.last_outcome is not None
    assert job.checkpointer.last_outcome.iteration == 6
    catalog = Catalog(proxied_store.url, storage_options=proxied_store.storage_options)
    assert {name.partition("/")[0] for name in proxied_store.raw_list()} == {
        "iter_000000005",
        "iter_000000006",
        "latest_checkpoint.txt",
    }
    assert catalog.pointee() == 6
    _fail_one(job, proxy)
    _refuse_one(job)


def _fail_one(job: Job, proxy: FaultProxy) -> None:
    """A failure is heard once, by poll, and the next save is as any other."""
    proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*iter_000000007/*", times=None)
    job.save(7)
    with pytest.raises(AsyncSaveError, match="iteration 7"):
        _poll_until_idle(job)
    assert job.ears.told("failure") == [7]
    assert job.checkpointer.poll()
    job.save(8)
    _poll_until_idle(job)
    assert job.ears.told("success")[-1] == 8


def _refuse_one(job: Job) -> None:
    """A state that cannot be copied leaves nothing that looks busy."""
    kept, job.box.state = job.box.state, {"x": lambda: 0}
    with pytest.raises(Exception, match="'x'"):
        job.save(9)
    job.box.state = kept
    assert job.save(9)
    _poll_until_idle(job)
    assert job.ears.told("success")[-1] == 9


@pytest.mark.parametrize("job", ["async"], indirect=True)
def test_a_failed_staging_leaves_nothing_that_looks_busy(job: Job) -> None:
    uploader: Any = job.checkpointer._uploader
    reserve = uploader._staging.stager.arena.reserve
    uploader._staging.stager.arena.reserve = lambda num_bytes: reserve(1 << 60)
    with pytest.raises(OSError, match="no host memory"):
        job.save(1)
    uploader._staging.stager.arena.reserve = reserve
    assert job.checkpointer.poll()
    assert job.save(1)
    _poll_until_idle(job)
    assert job.ears.told("success") == [1]


def test_save_may_return_before_the_copy_is_complete(job: Job, proxy: FaultProxy) -> None:
    """On the CPU there is nothing to wait for; the calls are the same as on a GPU."""
    before = job.pictures()
    job.save(1, wait_for_staging=False)
    job.checkpointer.maybe_wait_for_staging()
    job.scribble()
    job.checkpointer.maybe_wait_for_staging()
    job.checkpointer.wait()
    fresh = Job(
        job.checkpointer.catalog.url,
        filesystem=job.checkpointer.catalog.store.fs,
        state={"x": torch.zeros(300)},
    )
    fresh.load()
    assert torch.equal(fresh.box.state["x"].view(torch.int32), before["box"]["x"].view(torch.int32))
