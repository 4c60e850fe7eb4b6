"""Train a model on any number of processes, with checkpoints on any store. Run it again, and it goes on.

    torchrun --nproc-per-node 2 examples/train.py --url s3://bucket/run/checkpoints

It may be killed at any moment. The next run of the same command, on as many processes, starts at the last committed
iteration and has the same losses as a run that was never killed, bit for bit: the checkpoint holds the model, the
optimizer, the schedule and, for each rank, its random numbers and its place in the data. On SIGTERM or SIGUSR1 it
finishes its iteration, saves, and ends.

Copy it: `train` is the loop, `Job` the state. Models are in `gpt.py` and, with pretrained weights, `minilm.py`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_fsspec import DistributedCheckpointer, KeepLatest, PerRank, PreemptionGuard, RandomState
from dcp_fsspec.checkpointer.checkpointer import AsyncMode


@dataclass(frozen=True)
class Settings:
    """The options of the command line; each may also be given by the environment, `TRAIN_ITERATIONS=100`."""

    url: str = "checkpoints"
    iterations: int = 100
    save_every: int = 20
    keep: int = 3
    async_mode: AsyncMode = "disabled"
    model: str = "gpt"
    batch_size: int = 8  # per rank
    seed: int = 0
    log: str = ""  # a file for the losses, one JSON object a line
    # JSON, as fsspec takes them. They may hold secrets: by the environment only.
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, arguments: Sequence[str] | None = None) -> Settings:
        """Read the command line, then the environment, then the defaults above."""
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        for one in fields(cls):
            if one.name != "storage_options":
                default = os.environ.get(f"TRAIN_{one.name.upper()}", one.default)
                parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default), default=default)
        options = json.loads(os.environ.get("TRAIN_STORAGE_OPTIONS", "{}"))
        return cls(**vars(parser.parse_args(arguments)), storage_options=options)


def train(settings: Settings) -> Job:
    """Train until `settings.iterations` are done, or until the job is told to end. Called by every rank."""
    job = Job(settings)
    start = job.load()
    with PreemptionGuard() as guard:
        for iteration in range(start + 1, settings.iterations + 1):
            loss = job.step()
            log(settings, iteration, loss)
            stop = guard.should_stop()
            if stop or iteration % settings.save_every == 0 or iteration == settings.iterations:
                job.save(iteration, loss)
            if stop:
                break
    job.checkpointer.finalize()
    return job


class Job:
    """All that changes while the model is trained, and the checkpoints of it."""

    def __init__(self, settings: Settings) -> None:
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(settings.seed)  # The same first weights on every rank.
        self.model, data = make_model(settings.model)
        self.model.to(self.device)
        if num_ranks > 1:
            mesh = init_device_mesh(self.device.type, (num_ranks,))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.model.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=settings.iterations)
        torch.manual_seed(settings.seed + 1 + rank)  # Dropout of its own on each rank.
        random.seed(settings.seed + 1 + rank)
        self.batches = ShuffledBatches(data, settings.batch_size, seed=settings.seed + 1 + rank)
        self.checkpointer = DistributedCheckpointer(
            settings.url,
            storage_options=settings.storage_options or None,
            async_mode=settings.async_mode,
            retention=KeepLatest(settings.keep),
            components={"rng": PerRank(RandomState()), "data": PerRank(self.batches)},
        )

    def load(self) -> int:
        """Load the latest checkpoint, if there is one, and return its iteration, else 0."""
        return self.checkpointer.load(self.model, self.optimizer, self.scheduler)

    def save(self, iteration: int, loss: float) -> None:
        self.checkpointer.save(self.model, self.optimizer, self.scheduler, None, iteration, metrics={"loss": loss})

    def step(self) -> float:
        """Train on one batch and return the loss, the mean over all ranks."""
        loss: Tensor = self.model(*(one.to(self.device) for one in next(self.batches)))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean.item()


class Data(Protocol):
    """What can be trained on: numbered examples."""

    def __len__(self) -> int: ...

    def batch(self, places: Tensor) -> tuple[Tensor, ...]:
        """Return the examples with these numbers, as the model takes them."""
        ...


class ShuffledBatches:
    """A rank's batches without end, in an order of its own. With its state, it goes on where it was."""

    def __init__(self, data: Data, batch_size: int, seed: int) -> None:
        self._data, self._batch_size = data, batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._left = torch.empty(0, dtype=torch.int64)  # what is still to come of this pass over the data

    def __next__(self) -> tuple[Tensor, ...]:
        if len(self._left) < self._batch_size:
            self._left = torch.randperm(len(self._data), generator=self._generator)
        places, self._left = self._left[: self._batch_size], self._left[self._batch_size :]
        return self._data.batch(places)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._left = state["left"]


def make_model(name: str) -> tuple[Any, Data]:
    """Return a model, with the layers to shard and its learning rate, and the data to train it on."""
    if name == "minilm":
        import minilm

        return minilm.PairSimilarity.pretrained(), minilm.Pairs()
    import gpt

    return gpt.GPT(), gpt.Text()


def log(settings: Settings, iteration: int, loss: float) -> None:
    """Print the loss on one rank, and add it to the log file if there is one."""
    if not is_first_rank():
        return
    print(f"iteration {iteration}: loss {loss:.6f}", flush=True)
    if settings.log:
        with open(settings.log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, "loss": loss}) + "\n")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def set_up() -> None:
    """Join the other ranks, if torchrun started several, and let one of them tell what the checkpointer does."""
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    logging.basicConfig(format="%(message)s")
    if is_first_rank():
        logging.getLogger("dcp_fsspec").setLevel(logging.INFO)


def main() -> None:
    """Train as one rank of torchrun, or alone."""
    settings = Settings.read()
    set_up()
    train(settings)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
