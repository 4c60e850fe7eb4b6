"""Copy a snapshot's tensors to host memory that is used again for each save.

One block of memory holds all of them, so that a process takes it over by one file descriptor, however many tensors
there are, and so that nothing is allocated or touched for the first time after the first save.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_fsspec.checkpointer.host_copy import Pairs, copy_on_host
from dcp_fsspec.checkpointer.snapshot import FlatState, PickledValue, Snapshot, StagedShards, form_of
from dcp_fsspec.errors import IncompatibleStateError, StorageWriteError
from dcp_fsspec.storage.torch_internals import ShardedTensor, create_write_items, find_shard

_ALIGNMENT = 64
_SPARE = 1.02
"""What grows a little from one save to the next should not need new memory each time."""


Place = tuple[int, torch.dtype, tuple[int, ...]]
"""Of a tensor: its first byte, dtype and shape."""


class Arena:
    """Host memory for one snapshot.

    Args:
        shared: Another process can map it, by `fd`.
        fd: Map this memory, of `num_bytes`, instead of making it.
        num_bytes: Size of what `fd` is.

    Attributes:
        generation: Counts how often the memory was made anew.
    """

    def __init__(self, *, shared: bool, fd: int | None = None, num_bytes: int = 0) -> None:
        self._shared = shared
        self.fd = fd
        self.generation = 0
        self.num_bytes = 0
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._places: dict[Place, torch.Tensor] = {}
        self._registered = False
        if fd is not None:
            self._map(num_bytes)

    def reserve(self, num_bytes: int) -> bool:
        """Have room for `num_bytes`; what was in it is lost. Returns whether the memory is another one now.

        Raises:
            StorageWriteError: there is not so much memory.
        """
        if num_bytes <= self.num_bytes:
            return False
        self.close()
        self.generation += 1
        wanted = -(-int(num_bytes * _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            if self._shared:
                self.fd = _anonymous_file()
                # Reserved now: memory that is missing must be an error here, not a fault while it is written.
                os.posix_fallocate(self.fd, 0, wanted)
            self._map(wanted)
        except (OSError, MemoryError, ValueError) as error:
            self.close()
            raise StorageWriteError(f"there is no host memory for a snapshot of {num_bytes} bytes: {error}") from error
        return True

    def _map(self, num_bytes: int) -> None:
        memory = mmap.mmap(self.fd if self.fd is not None else -1, num_bytes)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.num_bytes = num_bytes

    def pin(self) -> None:
        """Let a GPU copy into it without the CPU."""
        if not self._registered and self.num_bytes:
            torch.cuda.check_error(int(_cudart().cudaHostRegister(self.bytes.data_ptr(), self.num_bytes, 0)))
            self._registered = True

    def place(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor that begins at byte `offset`."""
        num_bytes = dtype.itemsize * _numel(shape)
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def places(self, wanted: Sequence[Place]) -> list[torch.Tensor]:
        """Return the tensors at places that are mostly those of the last call."""
        known = self._places
        self._places = {one: known[one] if one in known else self.place(*one) for one in wanted}
        return list(map(self._places.__getitem__, wanted))

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where `tensor` begins, None if it is not in here."""
        offset = tensor.data_ptr() - self.bytes.data_ptr()
        return offset if 0 <= offset < self.num_bytes and type(tensor) is torch.Tensor else None

    def close(self) -> None:
        """Give the memory back."""
        if self._registered:
            _cudart().cudaHostUnregister(self.bytes.data_ptr())
            self._registered = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._places.clear()
        self.num_bytes = 0
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _anonymous_file() -> int:
    """Make a file in memory. It has no name, so nothing can be left behind, and ``/dev/shm`` does not limit it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dcp_fsspec")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


_Planned = dict[str, tuple[tuple[Any, ...] | None, list[WriteItem]]]
"""Name of a value -> its form, and what DCP plans to write of it."""


class Stager:
    """Makes staged copies of snapshots, one at a time, in memory that it uses again.

    Args:
        shared: The memory is for another process as well.
    """

    def __init__(self, *, shared: bool) -> None:
        self.arena = Arena(shared=shared)
        self._planned: _Planned = {}
        self._streams: dict[torch.device, Any] = {}

    def stage(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of `snapshot` that shares no tensor with the job.

        Copies from a GPU may still be under way; see `synchronize`.

        Raises:
            IncompatibleStateError: a tensor cannot be copied; it names the key.
            StorageWriteError: there is not enough memory.
        """
        plan = _Plan(self._planned)
        components = {
            name: FlatState(
                {key: plan.add(f"{name}: {key!r}", key, one) for key, one in flat.values.items()}, flat.paths
            )
            for name, flat in snapshot.components.items()
        }
        self._planned = plan.planned
        self.arena.reserve(plan.num_bytes)
        places = self._copy(plan)
        for flat in components.values():
            flat.values = {key: _placed(one, places) for key, one in flat.values.items() if one is not None}
        return Snapshot(snapshot.iteration, components, snapshot.metrics, snapshot.metadata)

    def _copy(self, plan: "_Plan") -> list[torch.Tensor]:
        places = self.arena.places([(offset, source.dtype, tuple(source.shape)) for source, offset in plan.sources])
        pairs = [(source, place) for (source, _), place in zip(plan.sources, places, strict=True)]
        self._copy_from_gpus([pair for pair in pairs if pair[0].is_cuda])
        copy_on_host([pair for pair in pairs if not pair[0].is_cuda])
        return places

    @torch.no_grad()
    def _copy_from_gpus(self, pairs: Pairs) -> None:
        if pairs:
            self.arena.pin()
        with contextlib.ExitStack() as stack:
            for gpu in {source.device for source, _ in pairs}:
                stack.enter_context(self._beside(gpu))
            for source, place in pairs:
                place.copy_(source, non_blocking=True)
                # The job may free it while the copy is under way.
                source.record_stream(self._streams[source.device])

    @contextlib.contextmanager
    def _beside(self, gpu: torch.device) -> Iterator[None]:
        """Copy from `gpu` in a stream of its own, after all that the training has queued there so far."""
        if gpu not in self._streams:
            self._streams[gpu] = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        self._streams[gpu].wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(self._streams[gpu]):
            yield

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        for stream in self._streams.values():
            stream.synchronize()

    def is_ready(self) -> bool:
        """Tell whether all copies are complete."""
        return all(stream.query() for stream in self._streams.values())

    def close(self) -> None:
        """Give the memory back."""
        self.synchronize()
        self.arena.close()


class _Place(int):
    """The number of a source in a plan, where its copy goes."""


class _Plan:
    """Which tensors to copy, and where each goes. Tensors that are the same memory are copied once.

    Args:
        before: What was planned for the last save.

    Attributes:
        planned: What is planned now.
        sources: What to copy, and the first byte of its place.
        num_bytes: How much memory that takes.
    """

    def __init__(self, before: _Planned) -> None:
        self.planned: _Planned = {}
        self._before = before
        self.sources: list[tuple[torch.Tensor, int]] = []
        self.num_bytes = 0
        self._seen: dict[tuple[Any, ...], _Place] = {}

    def add(self, what: str, key: str, value: Any) -> Any:
        """Return `value` with the number of its copy in the place of each tensor; None if this rank holds no part."""
        if isinstance(value, PickledValue | StagedShards):
            return value
        if not isinstance(value, torch.Tensor | ShardedTensor):
            raise IncompatibleStateError(f"{what} is a {type(value).__name__}, of which no copy can be taken")
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            return None
        try:
            items = self._items(what, key, value)
            tensors = tuple(self._copy_of(find_shard({key: value}, item.index)) for item in items)
        except Exception as error:
            raise IncompatibleStateError(
                f"{what} is a {type(value).__name__} of which no copy can be taken: {error or type(error).__name__}"
            ) from error
        return StagedShards(tuple(items), tensors) if items else None

    def _items(self, what: str, key: str, value: Any) -> list[WriteItem]:
        """Return what DCP plans to write of `value`; making that takes as long as copying a megabyte."""
        known, items = self._before.get(what, (None, []))
        form = form_of(value)
        if form is None or form != known:
            items = create_write_items(key, value)
        self.planned[what] = form, items
        return items

    def _copy_of(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
            return _clone(tensor)
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        place = self._seen.get(identity) if tensor.numel() else None
        if place is None:
            place = self._seen[identity] = _Place(len(self.sources))
            self.sources.append((tensor, self.num_bytes))
            self.num_bytes += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        return place


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of a kind that is not plain memory.

    Raises:
        TypeError: its copy would be something else.
    """
    copy = tensor.clone()
    if type(copy) is not type(tensor):
        raise TypeError(f"its copy is a {type(copy).__name__}")
    return copy


def _placed(value: Any, places: list[torch.Tensor]) -> Any:
    if not isinstance(value, StagedShards):
        return value
    tensors = tuple(places[one] if isinstance(one, _Place) else one for one in value.tensors)
    return StagedShards(value.write_items, tensors)
