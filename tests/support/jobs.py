"""Small training jobs that save in the background, and what they and their upload processes leave."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_fsspec.checkpointer.checkpointer import DistributedCheckpointer
from dcp_fsspec.checkpointer.state import PerRank
from support.tensors import random_tensor

MODES = ("disabled", "async", "async_with_pinned_mem")
BACKGROUND = MODES[1:]


class Box:
    """A stateful object that holds any state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Ears:
    """A callback that writes down what it hears, with the thread that told it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.errors: list[BaseException] = []
        self.threads: set[str] = set()

    def on_save_checkpoint_success(self, iteration: int, elapsed_time: float) -> None:
        assert elapsed_time >= 0
        self._hear("success", iteration)

    def on_save_checkpoint_failure(self, iteration: int, error: BaseException) -> None:
        self.errors.append(error)
        self._hear("failure", iteration)

    def on_save_checkpoint_end(self, model: Any, iteration: int) -> None:
        assert model is None
        self._hear("end", iteration)

    def _hear(self, what: str, iteration: int) -> None:
        import threading

        self.threads.add(threading.current_thread().name)
        self.heard.append((what, iteration))

    def told(self, what: str) -> list[int]:
        """Return the iterations of one kind of message, in order."""
        return [iteration for kind, iteration in self.heard if kind == what]


class Job:
    """A model with its optimizer, and a checkpointer for it.

    Args:
        url: Of the checkpoints folder.
        arguments: For the checkpointer.
        state: A further component of which all ranks have the same.
        own: A further component of which each rank has its own.
        width: Of the model.
    """

    def __init__(
        self,
        url: str,
        *,
        state: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        width: int = 4,
        **arguments: Any,
    ) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(width, width)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
        self.box, self.own = Box(state or {}), Box(own or {})
        self.ears = Ears()
        components: dict[str, Any] = {"box": self.box, "own": PerRank(self.own)}
        self.checkpointer = DistributedCheckpointer(
            url, components=components, callbacks=[self.ears], **{"upload_timeout_seconds": 100.0, **arguments}
        )

    def train(self) -> None:
        """Do one step, in place."""
        self.model(torch.ones(1, self.model.in_features)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, iteration: int, **arguments: Any) -> bool:
        return self.checkpointer.save(self.model, self.optimizer, self.scheduler, None, iteration, **arguments)

    def load(self, iteration: int | None = None) -> int:
        return self.checkpointer.load(self.model, self.optimizer, self.scheduler, iteration=iteration)

    def pictures(self) -> dict[str, Any]:
        """Return copies of all that a save takes."""
        return {
            "model": {key: value.detach().clone() for key, value in self.model.state_dict().items()},
            "optimizer": [
                {key: torch.as_tensor(value).clone() for key, value in one.items()}
                for one in self.optimizer.state.values()
            ],
            "box": copied(self.box.state),
            "own": copied(self.own.state),
        }

    def scribble(self) -> None:
        """Overwrite in place all that a save takes."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7)
            for one in self.optimizer.state.values():
                for value in one.values():
                    value.fill_(7)
        scribble(self.box.state)
        scribble(self.own.state)

    @property
    def worker(self) -> psutil.Process:
        """The upload process of this rank."""
        uploader: Any = self.checkpointer._uploader
        return psutil.Process(uploader._process.process.pid)


def copied(value: Any) -> Any:
    """Return a deep copy that is made of plain tensors, its keys in order: ranks do not agree on one."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().clone()
    if isinstance(value, dict):
        return {key: copied(value[key]) for key in sorted(value)}
    return [copied(one) for one in value] if isinstance(value, list) else value


def scribble(value: Any) -> None:
    """Overwrite tensors, and the values of dicts and lists, in place."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(pairs):
        if isinstance(one, torch.Tensor):
            with torch.no_grad():
                (one.to_local() if hasattr(one, "to_local") else one).zero_()
        elif isinstance(one, dict | list):
            scribble(one)
        elif isinstance(one, int | float | str):
            value[key] = type(one)()


def spread_state(seed: int, size: int) -> dict[str, Any]:
    """Return a state that all ranks hold together: sharded, replicated, of no dimension, tied, and Python values."""
    state: dict[str, Any] = {
        "plain": random_tensor(50, 7, seed=seed),
        "scalar": random_tensor(seed=seed + 1),
        "leaf": random_tensor(3, seed=seed + 2).requires_grad_(),
        "step": seed,
        "nested": {"text": f"x{seed}", "list": [seed, {"deep": seed}]},
        "shared": random_tensor(5, seed=seed + 3).share_memory_(),  # type: ignore[no-untyped-call]
    }
    state["tied"] = state["plain"]
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (size,))
        state["rows"] = distribute_tensor(random_tensor(11, 3, seed=seed + 4), mesh, [Shard(0)], src_data_rank=None)
        state["one"] = distribute_tensor(random_tensor(seed=seed + 5), mesh, src_data_rank=None)
    return state


@contextlib.contextmanager
def finalized(job: Job) -> Iterator[Job]:
    """End the job's checkpointer, whatever happens."""
    try:
        yield job
    finally:
        job.checkpointer.finalize()


def raised(call: Callable[[], Any]) -> BaseException | None:
    """Return what `call` raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def gone(pid: int, timeout_seconds: float = 30.0) -> bool:
    """Wait until a process has ended; tell whether it has."""
    try:
        psutil.Process(pid).wait(timeout_seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def kill(pid: int) -> None:
    """Kill a child process and wait until it is dead, without taking its exit status from its parent's code."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def children() -> list[int]:
    """Return the child processes of this one that are no helpers of Python's own."""
    own = psutil.Process().children(recursive=True)
    return [one.pid for one in own if "dcp_fsspec.checkpointer.worker" in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def num_saves(default: int) -> int:
    """Return how many saves the long tests make: ``DCP_FSSPEC_TEST_NUM_SAVES``, or few."""
    return int(os.environ.get("DCP_FSSPEC_TEST_NUM_SAVES", default))
