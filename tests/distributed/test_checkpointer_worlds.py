"""A job that goes on with another number of ranks than it was saved with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_fsspec import DistributedCheckpointer, PerRank, RandomState
from support.ranks import RankPool, values
from support.tensors import assert_bits_equal
from support.worlds import world

pytestmark = pytest.mark.distributed

ITERATIONS_PER_WORLD = 3
BATCH = 16


class Job:
    """A model sharded over all ranks, AdamW and a schedule, trained on data that depend on the iteration alone.

    Args:
        seed: of the first weights.
        split: each rank takes its part of a batch, so that gradients are added up in an order that depends on the
            number of ranks. Otherwise each rank takes all of it: the mean of 2 or 4 equal gradients is exact.
    """

    def __init__(self, seed: int, *, split: bool) -> None:
        torch.manual_seed(seed)
        self.split = split
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def train(self, first: int, last: int) -> list[float]:
        return [self._step(iteration) for iteration in range(first, last + 1)]

    def _step(self, iteration: int) -> float:
        batch = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(iteration))
        if self.split:
            batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def whole_state(self) -> Any:
        """Return what the job holds, with whole tensors. Collective."""

        def whole(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: whole(inner) for key, inner in value.items()}
            return value.full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return whole({"model": model, "optim": optimizer, "scheduler": self.scheduler.state_dict()})


def _go_on_in_other_worlds(rank: int, url: str, scratch: str, worlds: list[int], split: bool) -> dict[str, Any]:
    """Let worlds of different sizes go on one after the other; then train as long in one process, uninterrupted."""
    losses: list[float] = []
    lacking: dict[int, list[str]] = {}
    saved: Any = None
    for turn, num_ranks in enumerate(worlds):
        with world(rank, num_ranks, f"{scratch}/turn{turn}") as inside:
            if not inside:
                continue
            job = Job(seed=turn, split=split)
            checkpointer = DistributedCheckpointer(url, components={"rng": PerRank(RandomState())})
            start = checkpointer.load(job.model, job.optimizer, job.scheduler)
            assert start == turn * ITERATIONS_PER_WORLD
            if turn:
                loaded = job.whole_state()
                if saved is not None:
                    assert_bits_equal(loaded, saved, f"loaded on {num_ranks} ranks")
                lacking[num_ranks] = checkpointer.last_load_report.components["rng"].missing
            losses += job.train(start + 1, start + ITERATIONS_PER_WORLD)
            checkpointer.save(job.model, job.optimizer, job.scheduler, None, start + ITERATIONS_PER_WORLD)
            checkpointer.finalize()
            saved = job.whole_state()
    with world(rank, 1, f"{scratch}/alone") as inside:
        if not inside:
            return {"lacking": lacking}
        job = Job(seed=0, split=split)
        wanted = job.train(1, ITERATIONS_PER_WORLD * len(worlds))
        return {
            "losses": losses,
            "wanted losses": wanted,
            "state": saved,
            "wanted state": job.whole_state(),
            "lacking": lacking,
        }


@pytest.mark.parametrize("split", [False, True], ids=["no reduction differs", "reductions differ"])
def test_a_job_goes_on_with_2_then_4_then_1_ranks_as_if_it_had_not_been_interrupted(
    four_ranks: RankPool, tmp_path: Path, split: bool
) -> None:
    url = str(tmp_path / "job")
    outcomes = values(four_ranks.run(_go_on_in_other_worlds, url, str(tmp_path), [2, 4, 1], split))
    found = outcomes[0]
    if split:
        torch.testing.assert_close(found["losses"], found["wanted losses"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["state"]["model"], found["wanted state"]["model"], rtol=1e-3, atol=1e-4)
        assert found["state"]["scheduler"] == found["wanted state"]["scheduler"]
    else:
        assert found["losses"] == found["wanted losses"]
        assert_bits_equal(found["state"], found["wanted state"])
    # A rank that the checkpoint does not know keeps its own random numbers, and the report says so.
    assert [bool(outcome["lacking"].get(4)) for outcome in outcomes] == [False, False, True, True]
