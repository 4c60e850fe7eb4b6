"""Small training jobs, and their checkpoints as other software writes them: with stock torch alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from dcp_fsspec import DistributedCheckpointer
from support.stores import Store
from support.tensors import assert_bits_equal

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(torch.nn.Module):
    """A model whose keys begin with ``net.``, as those of diffusion models do."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(batch)
        return result


@dataclass
class Job:
    """What a trainer hands to a checkpointer."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    grad_scaler: Any

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        """The first four arguments of `save` and `load`."""
        return self.model, self.optimizer, self.scheduler, self.grad_scaler

    def train(self, num_steps: int) -> Job:
        """Take steps on data that are always the same."""
        generator = torch.Generator().manual_seed(7)
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(5, 4, generator=generator)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def state(self) -> dict[str, Any]:
        """Everything that must come back, copied."""
        state = {
            "model": dict(self.model.state_dict()),
            "optim": self.optimizer.state_dict(),
            "scheduler": dict(self.scheduler.state_dict()),
            "scaler": self.grad_scaler.state_dict() if self.grad_scaler is not None else None,
        }
        copied: dict[str, Any] = _copied(state)
        return copied


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value


def make_job(seed: int = 0, num_steps: int = 0, *, lr: float = 0.1, model: torch.nn.Module | None = None) -> Job:
    """Return a job of random weights, trained for some steps."""
    torch.manual_seed(seed)
    model = model if model is not None else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return Job(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=8.0)).train(num_steps)


def assert_same(job: Job, wanted: dict[str, Any]) -> None:
    """Compare a job with the `state` of another, bit for bit."""
    assert_bits_equal(job.state(), wanted)


def checkpointer_at(store: Store, name: str = "job", **arguments: Any) -> DistributedCheckpointer:
    """Return a checkpointer below a test store."""
    return DistributedCheckpointer(store.below(name), **store.arguments, **arguments)


def save_by_cosmos_rules(
    root: Path, iteration: int, job: Job, *, extra: dict[str, dict[str, Any]] | None = None, without: str = ""
) -> None:
    """Write an iteration and the pointer as the Cosmos checkpointer does: one stock DCP checkpoint per component."""
    components = {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(job.model, job.optimizer, options=FLAT),
        "scheduler": job.scheduler.state_dict(),
        "trainer": {"grad_scaler": job.grad_scaler.state_dict(), "iteration": iteration},
        **(extra or {}),
    }
    for name, state in components.items():
        if name != without:
            stock_save(state, root / f"iter_{iteration:09d}" / name)
    (root / "latest_checkpoint.txt").write_text(f"iter_{iteration:09d}\n")


def stock_save(state: dict[str, Any], folder: Path) -> None:
    """Save by stock torch to a local folder."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder)), planner=planner)


def stock_load(like: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load by stock torch from a local folder, strictly."""
    dcp.load(like, storage_reader=dcp.FileSystemReader(str(folder)))
    return like


def write_iteration(
    store: Store,
    folder: str,
    *,
    marks: tuple[str, ...] = ("model", "optim", "scheduler", "trainer"),
    commit: bool = True,
) -> None:
    """Put the files of an iteration into a store by hand: enough for all decisions, of no use for a load.

    Args:
        store: Where.
        folder: The iteration's, below the store's root, such as ``job/iter_000000010``.
        marks: The components that have a ``.metadata``; all four have a shard file.
        commit: With a commit record.
    """
    for component in ("model", "optim", "scheduler", "trainer"):
        store.raw_write(f"{folder}/{component}/__0_0_0123abcd.distcp", b"shard")
        if component in marks:
            store.raw_write(f"{folder}/{component}/.metadata", b"metadata")
    if commit:
        record = {
            "format_version": 1,
            "iteration": int(folder.rpartition("_")[2]),
            "utc_time": "2026-01-01T00:00:00+00:00",
            "world_size": 1,
            "torch_version": "2",
            "package_version": "1",
            "components": {},
            "metrics": {},
            "metadata": {},
        }
        store.raw_write(f"{folder}/commit.json", json.dumps(record).encode())


class Recorder:
    """A callback that writes down which hooks were called, with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def hooks(self) -> list[str]:
        """The names, in order."""
        return [name for name, _ in self.calls]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, {"args": args, **kwargs}))


class Raising:
    """A callback that raises in one hook."""

    def __init__(self, hook: str, error: BaseException) -> None:
        self.hook, self.error = hook, error

    def __getattr__(self, name: str) -> Any:
        if name != self.__dict__.get("hook"):
            raise AttributeError(name)
        return self._raise

    def _raise(self, *args: Any, **kwargs: Any) -> None:
        raise self.error
