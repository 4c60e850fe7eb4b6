"""B03, B44 with uploads in the background: the pointer names what is complete, and never goes back."""

from __future__ import annotations

import threading

import pytest

from dcp_fsspec import AsyncSaveError
from support.faultproxy import FaultProxy, Stall
from support.jobs import BACKGROUND, Job, finalized, kill
from support.stores import S3Store
from support.tensors import random_tensor


def _pointer(store: S3Store) -> bytes:
    return store.raw_read("latest_checkpoint.txt")


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b03_the_pointer_moves_when_all_is_complete(mode: str, proxied_store: S3Store, proxy: FaultProxy) -> None:
    job = Job(
        proxied_store.url, storage_options=proxied_store.storage_options, async_mode=mode, state={"x": random_tensor(9)}
    )
    with finalized(job):
        job.save(10)
        job.checkpointer.wait()
        for key in ("*iter_000000020/box/*.distcp", "*iter_000000020/own/.metadata", "*iter_000000020/commit.json"):
            proxy.clear()
            stall = Stall()
            proxy.add(stall, operation="PUT", key=key)
            job.save(20)
            assert stall.arrived.wait(60)
            assert _pointer(proxied_store) == b"iter_000000010\n"
            if mode == "async" or key.endswith("commit.json"):
                break
            kill(job.worker.pid)
            with pytest.raises(AsyncSaveError):
                job.checkpointer.wait()
            assert Job(proxied_store.url, storage_options=proxied_store.storage_options).load() == 10
        stall.released.set()
        job.checkpointer.wait()
        assert _pointer(proxied_store) == b"iter_000000020\n"
        writes = [one.key.partition("/")[2] for one in proxy.log if one.method == "PUT"]
        assert writes[-2:] == ["iter_000000020/commit.json", "latest_checkpoint.txt"]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b44_an_older_save_that_ends_later_does_not_move_the_pointer_back(
    mode: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*iter_000000010/*.distcp")
    arguments = {"storage_options": proxied_store.storage_options}
    with finalized(Job(proxied_store.url, async_mode=mode, **arguments)) as job:
        job.save(10)
        assert stall.arrived.wait(60)
        # The last save of the training, by another checkpointer, at once.
        Job(proxied_store.url, **arguments).save(20)
        stall.released.set()
        job.checkpointer.wait()
        assert _pointer(proxied_store) == b"iter_000000020\n"
        proxy.clear()
        stall = Stall()
        proxy.add(stall, operation="PUT", key="*iter_000000030/*.distcp")
        job.save(30)
        assert stall.arrived.wait(60)
        threading.Timer(0.3, stall.released.set).start()
        job.save(40)
        job.checkpointer.wait()
    assert _pointer(proxied_store) == b"iter_000000040\n"
    catalog = job.checkpointer.catalog
    assert [one for one in (10, 20, 30, 40) if catalog.record(one) is None] == []
