"""Upload processes that die, stores that fail or hang: the trainers hear of it soon, and go on."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import pytest

from dcp_fsspec import AsyncSaveError
from dcp_fsspec.checkpointer.catalog import Catalog
from support.faultproxy import FaultProxy, Stall, Status
from support.jobs import Job, finalized, gone, kill, raised
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


def _die(rank: int, url: str, options: dict[str, Any], victim: int, moments: list[str], flags: str) -> dict[str, Any]:
    """Kill the process of one rank at each of `moments`."""
    log = _Log()
    logging.getLogger("dcp_fsspec").addHandler(log)
    told: dict[str, Any] = {}
    with finalized(_job(url, options)) as job:
        for iteration, moment in enumerate(moments, start=1):
            log.lines.clear()
            pid = job.worker.pid
            if rank == victim and moment != "uploading":
                kill(pid)  # At start it still imports torch.
            job.save(iteration)
            if moment == "uploading":
                if rank == victim:
                    _await_file(f"{flags}/arrived")
                    kill(pid)
                begin = time.monotonic()
                told["error"] = raised(lambda: job.save(100))
                told["seconds"] = time.monotonic() - begin
                told["failures"] = job.ears.told("failure")
                iteration += 1
                job.save(iteration)
            job.checkpointer.wait()
            told[moment] = job.worker.pid != pid, [line for line in log.lines if "started anew" in line]
        told["success"] = job.ears.told("success")
        last = job.worker.pid
    told["ended"] = gone(last)
    logging.getLogger("dcp_fsspec").removeHandler(log)
    return told


def _await_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 0), (4, 3)])
def test_h14_a_process_that_dies_is_replaced_and_no_rank_takes_its_save_for_done(
    num_ranks: int,
    victim: int,
    request: pytest.FixtureRequest,
    proxied_store: S3Store,
    proxy: FaultProxy,
    tmp_path: Any,
) -> None:
    """At start and idle it costs nothing, in an upload that one save: on all ranks alike."""
    stall = Stall()
    moments = ["starting", "idle", "uploading"] if num_ranks == 4 else ["uploading"]
    lost = len(moments)
    proxy.add(stall, operation="PUT", key=f"*iter_{lost:09d}/own/__{victim}_*.distcp")

    def watch() -> None:
        stall.arrived.wait(300)
        (tmp_path / "arrived").touch()

    threading.Thread(target=watch, daemon=True).start()
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[num_ranks])
    arguments = (proxied_store.url, proxied_store.storage_options, victim, moments, str(tmp_path))
    for told in values(pool.run(_die, *arguments, deadline_seconds=350)):
        for moment in moments:
            is_another, log = told[moment]
            assert is_another, moment
            assert len(log) == 1, (moment, log)
            assert moment == "uploading" or (f"rank {victim}" in log[0] and "SIGKILL" in log[0]), log
        assert isinstance(told["error"], AsyncSaveError), told
        assert all(word in str(told["error"]) for word in (f"iteration {lost}", f"rank {victim}", "SIGKILL")), told
        assert told["seconds"] < 60
        assert told["failures"] == [lost]
        assert told["success"] == [*range(1, lost), lost + 1]
        assert told["ended"]
    assert Catalog(proxied_store.url, storage_options=proxied_store.storage_options).pointee() == lost + 1
    assert [name for name in proxied_store.raw_list() if f"iter_{lost:09d}" in name] == []


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
        while _is_uploading(job, told):
            time.sleep(0.05)
        told["seconds"] = time.monotonic() - begin
        job.checkpointer._upload_timeout_seconds = 100.0
        uploader: Any = job.checkpointer._uploader
        uploader._timeout_seconds = 100.0
        job.save(3)
        job.checkpointer.wait()
        told["success"] = job.ears.told("success")
    return told


def _is_uploading(job: Job, told: dict[str, Any]) -> bool:
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
