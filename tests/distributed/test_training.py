"""A sharded model and its optimizer, as trainers save them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.tensors import assert_bits_equal, blank_like
from support.worlds import world

pytestmark = pytest.mark.distributed


class Job:
    """A model sharded over all ranks, AdamW and a schedule, trained on data that depend on the iteration alone."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_world_size())
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)
        self.iteration = 0

    def train(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            generator = torch.Generator().manual_seed(self.iteration)
            loss = self.model(torch.randn(16, 7, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.iteration += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        values = {"iteration": self.iteration, "scheduler": self.scheduler.state_dict()}
        return {"model": model, "optimizer": optimizer, **values}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.iteration = state["iteration"]

    def whole_state(self) -> Any:
        """Return the state with whole tensors. Collective."""

        def whole(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: whole(inner) for key, inner in value.items()}
            if isinstance(value, torch.distributed.tensor.DTensor):
                return value.full_tensor().clone()
            return copy.deepcopy(value)

        return whole(self.state())


def _train_in_turns(rank: int, url: str, scratch: str, worlds: list[int]) -> dict[int, Any]:
    """Let worlds of different sizes carry on one after the other; each saves what the next one loads."""
    saved: dict[int, Any] = {}
    for turn, num_ranks in enumerate(worlds):
        with world(rank, num_ranks, f"{scratch}/turn{turn}") as inside:
            if not inside:
                continue
            job = Job()
            if turn:
                state = job.state()
                dcp.load(state, storage_reader=FsspecStorageReader(f"{url}/{turn - 1}"))
                job.load(state)
                loaded = job.whole_state()
                if turn - 1 in saved:
                    assert_bits_equal(loaded, saved[turn - 1], f"turn {turn}")
            job.train(3)
            saved[turn] = job.whole_state()
            dcp.save(job.state(), storage_writer=FsspecStorageWriter(f"{url}/{turn}", shard_bytes=64 << 10))
    return saved


def test_a_sharded_job_carries_on_with_other_numbers_of_ranks(four_ranks: RankPool, tmp_path: Path) -> None:
    """B13: model, optimizer, schedule and iteration."""
    url = str(tmp_path / "job")
    saved = values(four_ranks.run(_train_in_turns, url, str(tmp_path), [4, 2, 3, 1]))[0]
    assert [state["iteration"] for state in saved.values()] == [3, 6, 9, 12]
    for turn, wanted in saved.items():
        for reader in (FsspecStorageReader(f"{url}/{turn}"), FileSystemReader(f"{url}/{turn}")):
            loaded = blank_like(wanted)
            dcp.load(loaded, storage_reader=reader)
            assert_bits_equal(loaded, wanted, f"turn {turn}")
