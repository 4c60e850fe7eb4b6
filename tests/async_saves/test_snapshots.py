"""What is stored is the state at the call of ``save``, however soon it changes afterwards and however slow the store.

``DCP_FSSPEC_TEST_NUM_SAVES=50`` makes as many saves back to back as the promise is given for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.faultproxy import Delay, FaultProxy
from support.jobs import MODES, Job, finalized, num_saves, spread_state
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import assert_bits_equal, random_tensor


def _save_and_scribble(rank: int, url: str, options: dict[str, Any], mode: str, saves: int, jitter: bool) -> int:
    size = dist.get_world_size()
    arguments = {"storage_options": options, "async_mode": mode}
    pictures = {}
    job = Job(url, state=spread_state(0, size), own={"draw": random_tensor(9, seed=rank)}, **arguments)
    with finalized(job):
        for iteration in range(1, saves + 1):
            job.train()
            job.box.state = spread_state(100 * iteration, size)
            job.own.state["draw"].copy_(random_tensor(9, seed=1000 * iteration + rank))
            pictures[iteration] = job.pictures()
            if jitter:
                time.sleep(random.Random(rank + 7 * iteration).random() / 20)
            job.save(iteration)
            job.scribble()
        job.checkpointer.wait()
        assert job.ears.told("success") == list(range(1, saves + 1))
    fresh = Job(url, storage_options=options, state=spread_state(1, size), own={"draw": torch.zeros(9)})
    for iteration, picture in pictures.items():
        assert fresh.load(iteration) == iteration
        assert_bits_equal(fresh.pictures(), picture, f"{iteration}")
    return len(pictures)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_change_right_after_save_never_shows(
    mode: str, num_ranks: int, request: pytest.FixtureRequest, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Delay(0.05), operation="PUT", key="*.distcp", times=None)
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[num_ranks])
    saves = num_saves(3)
    arguments = (proxied_store.url, proxied_store.storage_options, mode, saves, num_ranks > 1)
    outcomes = pool.run(_save_and_scribble, *arguments, deadline_seconds=160.0 if saves < 20 else 1200.0)
    assert set(values(outcomes)) == {saves}
