"""Upload processes that die, stores that fail or hang: the trainers hear of it soon, and go on."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest

from dcp_fsspec import AsyncSaveError
from dcp_fsspec.checkpointer.catalog import Catalog
from support.faultproxy import FaultProxy, Stall, Status
from support.jobs import Job, finalized, gone, raised
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor

PROCESS = "async_with_pinned_mem"
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _job(url: str, options: dict[str, Any], **arguments: Any) -> Job:
    return Job(url, storage_options=options, async_mode=PROCESS, own={"x": random_tensor(500)}, **arguments)


def _die_at_start_and_idle(rank: int, url: str, options: dict[str, Any]) -> dict[str, Any]:
    log = _Log()
    logging.getLogger("dcp_fsspec").addHandler(log)
    told: dict[str, Any] = {}
    with finalized(_job(url, options)) as job:
        first = job.worker.pid
        if rank == 2:
            os.kill(first, signal.SIGKILL)  # It still imports torch.
        job.save(1)
        job.checkpointer.wait()
        told["at start"] = job.worker.pid != first, [line for line in log.lines if "SIGKILL" in line]
        second = job.worker.pid
        log.lines.clear()
        if rank == 1:
            os.kill(second, signal.SIGKILL)
        job.save(2)
        job.checkpointer.wait()
        told["idle"] = job.worker.pid != second, [line for line in log.lines if "SIGKILL" in line]
        told["success"] = job.ears.told("success")
        last = job.worker.pid
    told["ended"] = gone(last)
    logging.getLogger("dcp_fsspec").removeHandler(log)
    return told


def test_a_process_that_dies_at_start_or_idle_is_replaced_and_the_log_says_so(
    four_ranks: RankPool, seaweed_store: S3Store
) -> None:
    outcomes = four_ranks.run(_die_at_start_and_idle, seaweed_store.url, seaweed_store.storage_options)
    for told in values(outcomes):
        assert told["at start"][0]
        assert "rank 2" in told["at start"][1][0]
        assert told["idle"][0]
        assert "rank 1" in told["idle"][1][0]
        assert told["success"] == [1, 2]
        assert told["ended"]


def _die_in_upload(rank: int, url: str, options: dict[str, Any], victim: int, flags: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with finalized(_job(url, options)) as job:
        job.save(1)
        job.checkpointer.wait()
        job.own.state["x"] = random_tensor(900)
        job.save(2)
        if rank == victim:
            _await_file(f"{flags}/arrived")
            os.kill(job.worker.pid, signal.SIGKILL)
            open(f"{flags}/killed", "w").close()
        begin = time.monotonic()
        told["error"] = raised(lambda: job.save(3))
        told["seconds"] = time.monotonic() - begin
        told["failures"] = job.ears.told("failure")
        job.save(3)
        job.checkpointer.wait()
        told["success"] = job.ears.told("success")
    return told


def _await_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_process_that_dies_in_its_upload_fails_the_save_on_all_ranks_and_the_next_succeeds(
    victim: int, four_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy, tmp_path: Any
) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key=f"*iter_000000002/own/__{victim}_*.distcp")

    def watch() -> None:
        stall.arrived.wait(60)
        (tmp_path / "arrived").touch()

    import threading

    threading.Thread(target=watch, daemon=True).start()
    outcomes = four_ranks.run(
        _die_in_upload, proxied_store.url, proxied_store.storage_options, victim, str(tmp_path), deadline_seconds=120
    )
    for told in values(outcomes):
        assert isinstance(told["error"], AsyncSaveError), told
        assert "iteration 2" in str(told["error"])
        assert "SIGKILL" in str(told["error"])
        assert f"rank {victim}" in str(told["error"])
        assert told["seconds"] < 60
        assert told["failures"] == [2]
        assert told["success"] == [1, 3]
    catalog = Catalog(proxied_store.url, storage_options=proxied_store.storage_options)
    assert catalog.pointee() == 3
    left = [name for name in proxied_store.raw_list() if "iter_000000002" in name]
    assert left == []


def _fail_and_go_on(rank: int, url: str, options: dict[str, Any], mode: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    own = {"x": random_tensor(500)}
    arguments = {"storage_options": options, "async_mode": mode, "own": own, "writer_settings": {"retry_seconds": 0}}
    with finalized(Job(url, **arguments)) as job:
        told["errors"] = [raised(lambda: (job.save(2), job.checkpointer.wait()))]
        told["failures"] = job.ears.told("failure")
        job.save(3)
        job.checkpointer.wait()
        told["success"] = job.ears.told("success")
        if mode == PROCESS:
            told["worker"] = job.worker.pid
    return told


@pytest.mark.parametrize("mode", ["async", PROCESS])
def test_a_store_that_refuses_fails_the_save_on_all_ranks_by_its_url(
    mode: str, two_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*iter_000000002/own/__1_*.distcp", times=None)
    outcomes = two_ranks.run(_fail_and_go_on, proxied_store.url, proxied_store.storage_options, mode)
    for told in values(outcomes):
        error = told["errors"][0]
        assert isinstance(error, AsyncSaveError), told
        assert "iter_000000002/own" in str(error)
        assert "rank 1" in str(error)
        assert told["failures"] == [2]
        assert told["success"] == [3]
    assert [name for name in proxied_store.raw_list() if "iter_000000002" in name] == []


def _hang(rank: int, url: str, options: dict[str, Any], mode: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    own = {"x": random_tensor(500)}
    arguments = {"storage_options": options, "async_mode": mode, "own": own}
    with finalized(Job(url, upload_timeout_seconds=6, **arguments)) as job:
        job.save(2)
        begin = time.monotonic()
        while raised_by_poll(job, told):
            time.sleep(0.05)
        told["seconds"] = time.monotonic() - begin
        job.checkpointer._upload_timeout_seconds = 100.0
        uploader: Any = job.checkpointer._uploader
        uploader._timeout_seconds = 100.0
        job.save(3)
        job.checkpointer.wait()
        told["success"] = job.ears.told("success")
    return told


def raised_by_poll(job: Job, told: dict[str, Any]) -> bool:
    """Poll; return whether an upload is still under way."""
    try:
        return not job.checkpointer.poll()
    except AsyncSaveError as error:
        told["error"] = error
        return False


@pytest.mark.parametrize("mode", ["async", PROCESS])
def test_a_store_that_hangs_is_given_up_and_poll_says_so(
    mode: str, two_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Stall(), operation="PUT", key="*iter_000000002/own/__1_*.distcp", times=None)
    outcomes = two_ranks.run(_hang, proxied_store.url, proxied_store.storage_options, mode, deadline_seconds=120)
    for told in values(outcomes):
        assert "given up" in str(told["error"]), told
        assert "iteration 2" in str(told["error"])
        assert told["seconds"] < 60
        assert told["success"] == [3]
    proxy.clear()
