"""Ways in which a checkpointer with an upload process has lost work, each by the number that the design gives it.

One job with one upload process for most of them. H5 and H6 on a GPU are in ``test_gpu``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_fsspec import AsyncSaveError, IncompatibleStateError
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.snapshot import Snapshot, flat_state
from dcp_fsspec.checkpointer.staging import Stager
from dcp_fsspec.testing.servers import SeaweedServer
from support.faultproxy import FaultProxy, Stall, Status
from support.jobs import MODES, Job, kill, raised
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor

PROCESS = "async_with_pinned_mem"


def _job(store: S3Store, **arguments: Any) -> Job:
    return Job(
        store.url,
        storage_options=store.storage_options,
        async_mode=PROCESS,
        writer_settings={"retry_seconds": 0},
        **arguments,
    )


@pytest.fixture(scope="module")
def shared_job(seaweed: SeaweedServer, seaweed_client: Any, running_proxy: FaultProxy) -> Iterator[Job]:
    store = S3Store(seaweed_client, seaweed.bucket, seaweed.storage_options(endpoint_url=running_proxy.endpoint_url))
    made = _job(store)
    yield made
    made.checkpointer.finalize()
    store.close()


@pytest.fixture
def job(shared_job: Job, proxy: FaultProxy) -> Job:
    """The shared job, idle, with an empty state and fresh ears."""
    shared_job.box.state = {}
    shared_job.ears.heard.clear()
    return shared_job


_iterations = iter(range(1, 10_000))


def _saved(job: Job) -> int:
    """Save and wait; return the iteration."""
    iteration = next(_iterations)
    job.save(iteration)
    job.checkpointer.wait()
    return iteration


def _loaded(job: Job, iteration: int, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a fresh job finds in its box."""
    fresh = Job(job.checkpointer.catalog.url, filesystem=job.checkpointer.catalog.store.fs, state=like)
    assert fresh.load(iteration) == iteration
    return fresh.box.state


def test_h01_the_next_save_does_not_touch_what_is_still_uploading(job: Job, proxy: FaultProxy) -> None:
    """B09."""
    first, second = next(_iterations), next(_iterations)
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*/box/*.distcp")
    job.box.state = {"x": torch.full((999,), 1.0)}
    job.save(first)
    assert stall.arrived.wait(60)
    job.box.state["x"].fill_(2.0)
    threading.Timer(0.5, stall.released.set).start()
    job.save(second)
    assert job.ears.told("success") == [first]
    job.checkpointer.wait()
    for iteration, value in ((first, 1.0), (second, 2.0)):
        assert bool((_loaded(job, iteration)["x"] == value).all())


def test_h02_a_failed_write_does_not_end_the_process(job: Job, proxy: FaultProxy) -> None:
    pid = job.worker.pid
    rule = proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*/model/*", times=None)
    failed = next(_iterations)
    job.save(failed)
    with pytest.raises(AsyncSaveError, match=f"iteration {failed} .*AccessDenied|iteration {failed} "):
        job.checkpointer.wait()
    assert rule.fired
    proxy.clear()
    saved = _saved(job)
    assert job.worker.pid == pid
    assert job.ears.told("success") == [saved]


def test_h03_a_dead_process_is_noticed_and_replaced(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    _saved(job)
    pid = job.worker.pid
    kill(pid)
    saved = _saved(job)
    assert job.worker.pid != pid
    assert f"{pid} was killed by SIGKILL" in caplog.text
    assert "started anew" in caplog.text
    assert job.ears.told("success")[-1] == saved


def test_h04_a_failed_save_is_an_error_in_the_training_and_heard_by_the_callbacks(job: Job, proxy: FaultProxy) -> None:
    proxy.add(Status(403, "AccessDenied"), operation="PUT", key="*/model/*", times=None)
    failed, never = next(_iterations), next(_iterations)
    job.save(failed)
    with pytest.raises(AsyncSaveError) as caught:
        job.save(never)
    assert job.ears.told("failure") == [failed]
    assert job.ears.errors[-1] is caught.value
    assert f"iter_{failed:09d}/model" in str(caught.value)
    assert "in the upload process of rank 0:\nTraceback" in "".join(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
    assert never not in job.checkpointer.catalog.iterations()


def _stage_dtensors(rank: int) -> dict[str, Any]:
    """Stage DTensors without dimensions and on a part of the ranks; return what aliases the job's tensors."""
    whole = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    part = DeviceMesh("cpu", [1])
    state = {
        "scalar": distribute_tensor(torch.tensor(3.0), whole, [Replicate()], src_data_rank=None),
        "part": distribute_tensor(torch.ones(4), part, [Shard(0)], src_data_rank=None),
    }
    stager = Stager(shared=False)
    staged = stager.stage(Snapshot(1, {"model": flat_state(state, "model")})).components["model"].values
    for one in state.values():
        assert isinstance(one, DTensor)
        one.to_local().zero_()
    return {key: [type(one) is torch.Tensor and one.tolist() for one in value.tensors] for key, value in staged.items()}


@pytest.mark.distributed
def test_h06_a_dtensor_without_dimensions_is_copied(two_ranks: RankPool) -> None:
    """And one whose mesh leaves out this rank has no part here."""
    first, second = values(two_ranks.run(_stage_dtensors))
    assert first == {"scalar": [3.0]}
    assert second == {"scalar": [3.0], "part": [[1.0] * 4]}


def test_h07_keys_shapes_and_types_may_change_between_saves(job: Job) -> None:
    states: list[dict[str, Any]] = [
        {"a": torch.ones(3)},
        {"a": torch.ones(5, 2), "b": torch.zeros(70_000)},
        {"b": torch.zeros(2, dtype=torch.int8), "c": 3},
        {"c": torch.ones(1)},
    ]
    for state in states:
        job.box.state = state
        loaded = _loaded(job, _saved(job))
        assert set(loaded) == set(state)
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(loaded[key]), torch.as_tensor(value))


def test_h08_a_value_that_cannot_be_pickled_is_refused_in_save(job: Job, proxy: FaultProxy) -> None:
    job.box.state = {"deep": {"hook": lambda: 0}}
    proxy.clear()
    with pytest.raises(IncompatibleStateError, match=r"box: 'deep\.hook'"):
        job.save(next(_iterations))
    assert proxy.log == []
    job.box.state = {}
    _saved(job)


def test_h09_no_launcher_and_no_port_of_it_is_needed(job: Job) -> None:
    """B45 has the ports of a launcher that are taken."""
    assert "MASTER_PORT" not in os.environ
    _saved(job)


def test_h10_the_process_has_no_gpu(job: Job) -> None:
    assert job.worker.environ()["CUDA_VISIBLE_DEVICES"] == ""


def test_h11_an_upload_that_ends_while_finalize_waits_is_told(job: Job, proxy: FaultProxy) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*/commit.json")
    iteration = next(_iterations)
    job.save(iteration)
    assert stall.arrived.wait(60)
    threading.Timer(0.5, stall.released.set).start()
    job.checkpointer.finalize()
    assert job.ears.told("success") == [iteration]


@pytest.mark.parametrize("when", ["idle", "uploading"])
def test_h12_a_process_that_is_stopped_does_not_stop_the_training(
    when: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    """Not even a request that is too large for the socket does: it is never read."""
    stall = Stall()
    job = _job(proxied_store)
    uploader: Any = job.checkpointer._uploader
    job.save(1)
    job.checkpointer.wait()
    worker = job.worker.pid
    if when == "idle":
        os.kill(worker, signal.SIGSTOP)
        job.box.state = {"large": "x" * (8 << 20)}
        _short_patience(uploader)
        job.save(2)
    else:
        proxy.add(stall, operation="PUT", key="*iter_000000002/*")
        job.save(2)
        assert stall.arrived.wait(60)
        os.kill(worker, signal.SIGSTOP)
        uploader._deadline._timeout_seconds = uploader._deadline.seconds + 1
    with pytest.raises(AsyncSaveError, match="iteration 2"):
        job.checkpointer.finalize()
    assert job.ears.told("failure") == [2]
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def _short_patience(uploader: Any) -> None:
    """Give up a message after a second."""
    import socket
    import struct

    with socket.socket(fileno=os.dup(uploader._process._connection.fileno())) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))


def test_h13_success_is_told_by_poll_as_soon_as_it_is_known(job: Job) -> None:
    iteration = next(_iterations)
    job.save(iteration)
    tick = threading.Event()
    while not job.checkpointer.poll():
        tick.wait(0.02)
    assert job.ears.told("success") == [iteration]


def test_h16_a_callback_may_take_away_the_trainer_state(job: Job) -> None:
    class Thief:
        def on_save_checkpoint(self, model: Any, state_dict: dict[str, Any]) -> None:
            state_dict["trainer"][0].clear()

    callbacks: Any = job.checkpointer._callbacks
    kept, callbacks._callbacks = callbacks._callbacks, (*callbacks._callbacks, Thief())
    iteration = _saved(job)
    callbacks._callbacks = kept
    assert job.ears.told("success") == [iteration]
    assert job.checkpointer.catalog.pointee() == iteration


def test_h17_staging_memory_is_one_copy_of_the_local_state(job: Job) -> None:
    """B40. Tensors that are the same memory count once."""
    x = random_tensor(1 << 20)
    job.box.state = {"x": x, "same": x, "again": {"view": x.view(-1)}, "y": random_tensor(1 << 18)}
    _saved(job)
    uploader: Any = job.checkpointer._uploader
    wanted = x.nbytes + (1 << 20)
    others = sum(one.nbytes for one in job.model.state_dict().values()) + 64 * 20
    assert wanted <= uploader._staging.stager.arena.num_bytes <= 1.03 * (wanted + others) + 4096


def _bad_profile_on_one_rank(rank: int, url: str, options: dict[str, Any], mode: str) -> dict[str, Any]:
    given = {**options, "profile": "no-such-profile", "key": None, "secret": None} if rank == 1 else options
    job = Job(url, storage_options=given, async_mode=mode, upload_timeout_seconds=60)
    error = raised(lambda: (job.save(1), job.checkpointer.wait()))
    job.checkpointer.finalize()
    return {"error": error, "failures": job.ears.told("failure")}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_h18_what_fails_on_one_rank_alone_is_told_on_all_with_its_rank(
    mode: str, two_ranks: RankPool, seaweed_store: S3Store
) -> None:
    outcomes = two_ranks.run(
        _bad_profile_on_one_rank, seaweed_store.url, seaweed_store.storage_options, mode, deadline_seconds=50
    )
    for told in values(outcomes):
        assert "no-such-profile" in str(told["error"]), told
        assert "rank 1" in str(told["error"])
        assert told["failures"] == [1]
    assert Catalog(seaweed_store.url, storage_options=seaweed_store.storage_options).pointee() is None


def test_h19_every_log_message_can_be_formatted(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "dcp_fsspec"):
        iteration = _saved(job)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("dcp_fsspec"))
    assert f"iteration {iteration} saved" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_h20_all_modes_work_without_a_gpu(job: Job, tmp_path: Any) -> None:
    for mode in MODES[:2]:
        other = Job(str(tmp_path / mode), async_mode=mode)
        other.save(1)
        other.checkpointer.finalize()
        assert other.ears.told("success") == [1]
    _saved(job)
