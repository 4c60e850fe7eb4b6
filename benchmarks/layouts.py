"""How a state lies on the ranks, and what is in it: every rank can make, and check, its own part by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.models import TensorSpec

_CHUNK_ELEMENTS = 4 << 20
_FACTOR = 40_503
_SEED_FACTOR = 1_000_003


@dataclass(frozen=True)
class Part:
    """The stretch of a tensor that one rank holds: [start, stop) along `dim`.

    Attributes:
        dim: 0 or 1.
        start: First row or column.
        stop: The one after the last.
    """

    dim: int
    start: int
    stop: int


class Layout:
    """One way in which tensors lie on the ranks.

    Args:
        kind: "fsdp" (each tensor cut by rows over all ranks), "hsdp" (so within groups of ranks, each group alike),
            "ddp" (all ranks alike) or "tp" (matrices cut by rows or columns over groups of ranks, each group alike).
        device: Of the tensors.
        world_size: Number of ranks.
        group_size: For "hsdp" and "tp", ranks that share a copy. Divides `world_size`.
    """

    def __init__(self, kind: str, device: torch.device, world_size: int, group_size: int) -> None:
        self.kind, self.device = kind, device
        self.mesh: DeviceMesh | None = None
        if kind == "fsdp":
            self.mesh = init_device_mesh(device.type, (world_size,))
        elif kind in ("hsdp", "tp"):
            self.mesh = init_device_mesh(device.type, (world_size // group_size, group_size))

    def part(self, spec: TensorSpec) -> Part:
        """Return what this rank holds of a tensor."""
        dim = self._cut_dim(spec)
        if self.mesh is None or dim is None:
            return Part(0, 0, spec.shape[0] if spec.shape else 1)
        length, pieces = spec.shape[dim], self.mesh.size(self.mesh.ndim - 1)
        each = -(-length // pieces)
        number = self.mesh.get_local_rank(self.mesh.ndim - 1)
        return Part(dim, min(length, number * each), min(length, (number + 1) * each))

    def _cut_dim(self, spec: TensorSpec) -> int | None:
        if not spec.shape or self.kind == "ddp":
            return None
        return spec.tp_dim if self.kind == "tp" else 0

    def _placements(self, spec: TensorSpec) -> list[Placement]:
        dim = self._cut_dim(spec)
        last: Placement = Replicate() if dim is None else Shard(dim)
        return [last] if self.kind == "fsdp" else [Replicate(), last]

    def tensor(self, spec: TensorSpec, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return this rank's tensor, its local part made by `fill`."""
        part = self.part(spec)
        shape = list(spec.shape)
        if shape:
            shape[part.dim] = part.stop - part.start
        local = torch.empty(shape, dtype=spec.dtype, device=self.device)
        fill(local)
        if self.mesh is None or not spec.shape:
            return local
        whole = torch.empty(spec.shape, device="meta")
        return DTensor.from_local(
            local, self.mesh, self._placements(spec), run_check=False, shape=whole.shape, stride=whole.stride()
        )


def make_state(specs: Sequence[TensorSpec], layout: Layout, seed: int | None) -> dict[str, Any]:
    """Return this rank's part of the state: content that `check_state` knows, or zeros if `seed` is None."""

    def filled(number: int, spec: TensorSpec) -> torch.Tensor:
        if seed is None:
            return layout.tensor(spec, _clear)
        return layout.tensor(spec, lambda local: _write(local, spec, layout.part(spec), _mixed(seed, number)))

    return {spec.name: filled(number, spec) for number, spec in enumerate(specs)}


def clear_state(state: Mapping[str, Any]) -> None:
    """Set everything to zero, so that nothing is there that was not loaded."""
    for value in state.values():
        _clear(local_of(value))


def check_state(state: Mapping[str, Any], specs: Sequence[TensorSpec], layout: Layout, seed: int) -> None:
    """Compare this rank's part bit for bit with what `make_state` makes.

    Args:
        state: What was loaded; it may lack tensors.
        specs: All tensors of the checkpoint.
        layout: How the state lies now.
        seed: That of the save.

    Raises:
        AssertionError: something differs.
    """
    for number, spec in enumerate(specs):
        if spec.name not in state:
            continue
        for got, wanted in _chunks(local_of(state[spec.name]), spec, layout.part(spec), _mixed(seed, number)):
            if not torch.equal(got, wanted):
                raise AssertionError(f"{spec.name} was not loaded bit for bit")


def _clear(local: torch.Tensor) -> None:
    local.fill_(0)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def local_bytes(state: Mapping[str, Any]) -> int:
    """Return how many bytes of a state this rank holds."""
    return sum(local_of(value).nbytes for value in state.values())


def _mixed(seed: int, number: int) -> int:
    return (seed * _SEED_FACTOR + number) % 2**31


def _write(local: torch.Tensor, spec: TensorSpec, part: Part, seed: int) -> None:
    for place, wanted in _chunks(local, spec, part, seed):
        place.copy_(wanted)


def _chunks(
    local: torch.Tensor, spec: TensorSpec, part: Part, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the elements of `local` as integers, rows by rows, each with what it should hold.

    An element holds a function of the seed and of its place in the whole tensor, as far as it fits.
    """
    bits = torch.int32 if spec.dtype.itemsize == 4 else torch.int16
    if not local.numel():
        return
    rows = local.view(bits).reshape(local.shape[0] if local.dim() else 1, -1)
    width = spec.num_bytes // spec.dtype.itemsize // (spec.shape[0] if spec.shape else 1)
    first_row, first_column = (part.start, 0) if part.dim == 0 else (0, part.start)
    columns = torch.arange(rows.shape[1], device=local.device, dtype=torch.int64) + first_column
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for begin in range(0, rows.shape[0], step):
        chunk = rows[begin : begin + step]
        numbers = torch.arange(chunk.shape[0], device=local.device, dtype=torch.int64) + (first_row + begin)
        places = numbers[:, None] * width + columns
        yield chunk, ((places * _FACTOR + seed) & torch.iinfo(bits).max).to(bits)
