"""B41, B45: the upload beside the training, and its plumbing: ports, descriptors, first calls, ends."""

from __future__ import annotations

import json
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from support.faultproxy import Delay, FaultProxy, Stall
from support.jobs import BACKGROUND, Job, children, finalized, num_saves
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor
from support.torchrun import torchrun


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b41_save_returns_before_anything_is_written(mode: str, proxied_store: S3Store, proxy: FaultProxy) -> None:
    """With 5,000 small tensors, to a store that answers nothing."""
    state = {f"x{number}": torch.ones(4) for number in range(5000)}
    stall = Stall()
    with finalized(
        Job(proxied_store.url, storage_options=proxied_store.storage_options, async_mode=mode, state=state)
    ) as job:
        proxy.add(stall)
        job.save(1)
        assert stall.arrived.wait(60)
        assert not job.checkpointer.poll()
        assert [one for one in proxy.log if one.method == "PUT"] == []
        stall.released.set()
        job.checkpointer.wait()
        if mode == "async_with_pinned_mem":
            assert job.worker.nice() > psutil.Process().nice()
            assert job.worker.ionice().value == 7
            group = Path(f"/proc/{job.worker.pid}/autogroup")
            assert not group.exists() or not group.read_text() or group.read_text().endswith(" nice 10\n")


def _collectives_of_the_training(rank: int, url: str, options: dict[str, Any], mode: str, order: int) -> list[int]:
    """Train by collectives in an order that would mix with any collective of the upload on the same group."""
    with finalized(Job(url, storage_options=options, async_mode=mode, own={"x": random_tensor(100)})) as job:
        sums = []
        for iteration in (1, 2):
            job.save(iteration)
            for number in range(order):
                total = torch.tensor(rank + number)
                dist.all_reduce(total)
                sums.append(int(total))
            job.checkpointer.wait()
        assert job.ears.told("success") == [1, 2]
    return sums


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", BACKGROUND)
def test_b41_the_upload_uses_no_group_of_the_training(
    mode: str, two_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Delay(0.05), times=None)
    outcomes = two_ranks.run(_collectives_of_the_training, proxied_store.url, proxied_store.storage_options, mode, 200)
    for sums in values(outcomes):
        assert sums == [1 + 2 * number for number in range(200)] * 2


_TAKEN_PORTS = """
import json, os, socket, sys
import torch, torch.distributed as dist
url, options = sys.argv[1], json.loads(sys.argv[2])
dist.init_process_group("gloo")
taken = []
if dist.get_rank() == 0:
    for offset in (1, 2, 3):
        taken.append(socket.socket())
        try:
            taken[-1].bind(("", int(os.environ["MASTER_PORT"]) + offset))
            taken[-1].listen()
        except OSError:
            pass  # taken by others, which is as good
dist.barrier()
from dcp_fsspec import DistributedCheckpointer
torch.manual_seed(1)
model = torch.nn.Linear(3, 3)
two = [
    DistributedCheckpointer(f"{url}/{name}", storage_options=options, async_mode="async_with_pinned_mem")
    for name in ("a", "b")
]
for one in two:
    one.save(model, None, None, None, 1)
for one in two:
    one.finalize()
print("both saved", [one.last_outcome.record is not None for one in two], flush=True)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_h09_b45_taken_ports_and_two_checkpointers_in_one_job(seaweed_store: S3Store) -> None:
    ended = torchrun(_TAKEN_PORTS, seaweed_store.url, json.dumps(seaweed_store.storage_options), num_ranks=2)
    assert ended.returncode == 0, ended.output
    assert ended.output.count("both saved [True, True]") == 2, ended.output


def test_b45_thousands_of_shared_tensors_need_few_descriptors(seaweed_store: S3Store) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    state = {f"x{number}": torch.full((10,), float(number)) for number in range(3000)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, used + 100), limits[1]))
    try:
        arguments = {"storage_options": seaweed_store.storage_options}
        with finalized(Job(seaweed_store.url, async_mode="async_with_pinned_mem", state=state, **arguments)) as job:
            for iteration in (1, 2):
                job.save(iteration)
            job.checkpointer.wait()
            assert job.ears.told("success") == [1, 2]
            fresh = Job(seaweed_store.url, **arguments)
            fresh.load()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(torch.equal(fresh.box.state[key], value) for key, value in state.items())


def _first_calls(rank: int, url: str, options: dict[str, Any], mode: str, repetitions: int) -> list[int]:
    """Make a checkpointer and two saves back to back, again and again, the ranks apart by chance."""
    delays = random.Random(rank)
    for repetition in range(repetitions):
        with finalized(Job(f"{url}/{repetition}", storage_options=options, async_mode=mode)) as job:
            for iteration in (1, 2):
                time.sleep(delays.random() / 10)
                job.save(iteration)
            job.checkpointer.wait()
            assert job.ears.told("success") == [1, 2]
    return children()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", BACKGROUND)
def test_b45_first_calls_do_not_wait_for_each_other(mode: str, two_ranks: RankPool, seaweed_store: S3Store) -> None:
    """``DCP_FSSPEC_TEST_NUM_SAVES=20`` repeats it as often as the case asks for."""
    outcomes = two_ranks.run(
        _first_calls, seaweed_store.url, seaweed_store.storage_options, mode, num_saves(2), deadline_seconds=800
    )
    assert values(outcomes) == [[], []]


def _one_rank_of_the_group_saves(rank: int, url: str, options: dict[str, Any], mode: str) -> list[int]:
    """Let two jobs of two ranks each save at the same time, each with a group of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    arguments = {"storage_options": options, "process_group": groups[mine], "own": {"x": random_tensor(50, seed=rank)}}
    heard = []
    with finalized(Job(f"{url}/{mine}", async_mode=mode, **arguments)) as job:
        for iteration in range(1, 3 + mine):
            job.save(iteration)
        job.checkpointer.wait()
        heard = job.ears.told("success")
    return heard


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mode", BACKGROUND)
def test_b45_ranks_outside_of_the_group_have_no_part(mode: str, four_ranks: RankPool, seaweed_store: S3Store) -> None:
    outcomes = four_ranks.run(
        _one_rank_of_the_group_saves, seaweed_store.url, seaweed_store.storage_options, mode, deadline_seconds=80
    )
    assert values(outcomes) == [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]


def test_b45_no_thread_of_an_upload_is_left(seaweed_store: S3Store) -> None:
    with finalized(Job(seaweed_store.url, storage_options=seaweed_store.storage_options, async_mode="async")) as job:
        job.save(1)
    assert not [one for one in threading.enumerate() if one.name.startswith("dcp_fsspec_upload")]
