"""Worlds of fewer ranks than a `RankPool` has, and one state laid out in many ways over their ranks."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from support.tensors import assert_bits_equal, random_tensor

_TIMEOUT = datetime.timedelta(seconds=60)


@contextlib.contextmanager
def world(rank: int, num_ranks: int, rendezvous: str) -> Iterator[bool]:
    """Replace the process group by one of the first `num_ranks` ranks alone.

    Args:
        rank: ours, in the pool.
        num_ranks: of the new world.
        rendezvous: path of a file that does not exist, the same on all ranks, another one for each world.

    Yields:
        Whether this rank is in the new world; if not, there is no process group at all.
    """
    if dist.is_initialized():
        dist.barrier()  # others may still be connecting to us
        dist.destroy_process_group()
    inside = rank < num_ranks
    if inside:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
        )
    try:
        yield inside
        if inside:
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Layout:
    """How the tensors of a state lie on the ranks.

    Attributes:
        mesh: ranks, nested as the mesh has dimensions.
        placements: of a tensor, one per mesh dimension.
    """

    mesh: Any
    placements: tuple[Placement, ...]

    def spread(self, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor of `full`, which every rank holds; nothing is sent."""
        return distribute_tensor(full, mesh, self.placements, src_data_rank=None)


def full_tensors(*, seed: int = 0, large_rows: int = 800) -> dict[str, torch.Tensor]:
    """Return the whole tensors that `laid_out` spreads: uneven, of fewer rows than ranks, and larger than a shard."""
    shapes = {
        "uneven": (8, 3),
        "odd": (5, 2),
        "fewer_rows_than_ranks": (1, 4),
        "wide": (3, 7),
        "deep": (6, 5, 4),
        "no_rows": (0, 3),
        "two_long_rows": (2, 40_000),
        "large": (large_rows, 701),
    }
    tensors = {name: random_tensor(*shape, seed=seed + number) for number, (name, shape) in enumerate(shapes.items())}
    tensors["half"] = random_tensor(7, 9, dtype=torch.bfloat16, seed=seed + 50)
    return tensors


def laid_out(full: Mapping[str, torch.Tensor], layout: Layout) -> dict[str, Any]:
    """Spread `full` as `layout` says. Collective: every rank of the world takes part, also one outside of the mesh."""
    mesh = DeviceMesh("cpu", torch.tensor(layout.mesh))
    return {name: layout.spread(tensor, mesh) for name, tensor in full.items()}


def assert_holds(state: Mapping[str, Any], full: Mapping[str, torch.Tensor], path: str) -> None:
    """Compare every tensor of a laid out state, put together again, with the whole one. Collective in its mesh."""
    for name, wanted in full.items():
        got = state[name]
        if isinstance(got, DTensor):
            if got.device_mesh.get_coordinate() is None:
                continue
            got = got.full_tensor()
        assert_bits_equal(got, wanted, f"{path}: {name}")


def blank(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return zeros of the same shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in full.items()}


def rank_of_file(name: str) -> int:
    """Return which rank wrote the shard file `name`."""
    return int(name.removeprefix("__").split("_")[0])
