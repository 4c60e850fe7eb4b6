"""The ranks of a measurement: how they meet, on what they compute, what they tell each other."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: Its number.
        size: How many there are.
        device: Where its tensors lie.
        num_nodes: Machines that take part.
    """

    rank: int
    size: int
    device: torch.device
    num_nodes: int

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def told(self, make: Callable[[], T]) -> T:
        """Return what rank 0 makes. Collective."""
        values = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def say(self, text: str) -> None:
        """Show progress, once for all ranks."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def meet(device: str) -> Iterator[Ranks]:
    """Form a process group of all that torchrun has started; without torchrun, of this process alone.

    Args:
        device: "cpu", "cuda", or "auto": a GPU for each rank where there are enough.

    Raises:
        SystemExit: there is no GPU for each rank.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and num_gpus < local_size:
        raise SystemExit(f"--device cuda: {local_size} ranks on this machine, and {num_gpus} GPUs")
    place = torch.device("cpu")
    backend = "gloo"
    if device != "cpu" and num_gpus >= local_size:
        place = torch.device("cuda", local_rank)
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory(prefix="dcp-fsspec-bench-") as folder:
        alone = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/rendezvous"}
        dist.init_process_group(backend, rank=rank, world_size=size, **alone)  # type: ignore[arg-type]
        # For the processes that upload in the background, and for torch's own.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        try:
            yield Ranks(rank, size, place, size // local_size)
        finally:
            dist.destroy_process_group()
