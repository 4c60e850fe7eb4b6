"""What a save is about to write: flat states whose Python values are pickled already, and the planner that writes them.

The same in all modes: pickling takes place in ``save``, so a value that cannot be saved is refused there, by its key,
before anything is written; and what is stored does not depend on where the upload runs.
"""

import dataclasses
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from dcp_fsspec.checkpointer import nesting
from dcp_fsspec.checkpointer.plan_cache import PlanCache
from dcp_fsspec.errors import IncompatibleStateError, StorageWriteError
from dcp_fsspec.storage.torch_internals import ShardedTensor

_FRAMES_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class PickledValue:
    """A Python value as it was when the snapshot was taken.

    Attributes:
        data: Its pickle, or what ``torch.save`` makes of it.
        is_framed: Whether it is the latter.
    """

    data: bytes
    is_framed: bool


@dataclasses.dataclass(frozen=True)
class StagedShards:
    """This rank's part of a sharded tensor, copied to host memory.

    Attributes:
        write_items: What DCP plans to write of it.
        tensors: The data of each.
    """

    write_items: tuple[WriteItem, ...]
    tensors: tuple[torch.Tensor, ...]

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Called by torch's planner."""
        return list(self.write_items)

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        """Return the data of the item that `index` names."""
        for item, tensor in zip(self.write_items, self.tensors, strict=True):
            if item.index.offset == index.offset:
                return tensor
        raise KeyError(index)


@dataclasses.dataclass
class FlatState:
    """One component's state, flat.

    Attributes:
        values: Tensors and pickled values, by flat key.
        paths: Where each stands in the nested state.
    """

    values: dict[str, Any]
    paths: Mapping[str, nesting.Path]


@dataclasses.dataclass
class Snapshot:
    """One rank's part of what is to be saved.

    Attributes:
        iteration: The training iteration.
        components: States by name, in the order of writing.
        metrics: For the commit record.
        metadata: For the commit record.
    """

    iteration: int
    components: dict[str, FlatState]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def flat_state(state: Mapping[str, Any], component: str) -> FlatState:
    """Return `state` flat, its Python values pickled, its tensors as they are.

    Raises:
        IncompatibleStateError: a value cannot be pickled, or two have one name; it names the key.
    """
    flat, paths = nesting.flatten(state, component)
    values = {
        key: value if isinstance(value, torch.Tensor | ShardedTensor) else pickled(value, f"{component}: {key!r}")
        for key, value in flat.items()
    }
    return FlatState(values, paths)


def pickled(value: Any, what: str) -> PickledValue:
    """Return a picture of `value`.

    Raises:
        IncompatibleStateError: it cannot be pickled.
    """
    stream = io.BytesIO()
    pickler = _PlainPickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(value)
        if pickler.is_plain:
            return PickledValue(stream.getvalue(), False)
        # Types that another process may not be able to import: make the final form here.
        stream = io.BytesIO()
        torch.save(value, stream)
        return PickledValue(stream.getvalue(), True)
    except Exception as error:
        raise IncompatibleStateError(
            f"{what} is a {type(value).__name__} that cannot be pickled ({error}); leave it out of the state"
        ) from error


class _PlainPickler(pickle.Pickler):
    """Notices whether a value consists of Python's built-in kinds alone."""

    is_plain = True

    def reducer_override(self, obj: Any) -> Any:
        """Called for everything but the built-in kinds."""
        self.is_plain = False
        return NotImplemented


def _forms(flat: FlatState) -> tuple[Any, ...] | None:
    """Return all that the plan of `flat` depends on, quick to make and to compare; None if that is not known."""
    forms = [form_of(value) for value in flat.values.values()]
    return None if any(one is None for one in forms) else (list(flat.values), forms, dict(flat.paths))


def form_of(value: Any) -> tuple[Any, ...] | None:
    """Return all that DCP's plan for `value` depends on, besides its key; None if that is not known."""
    if isinstance(value, PickledValue):
        return (PickledValue,)
    if isinstance(value, StagedShards):
        return value.write_items
    if isinstance(value, DTensor):
        return value.dtype, value.shape, value.requires_grad, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor) and not hasattr(value, "__create_write_items__"):
        return value.dtype, value.shape, value.requires_grad, value.layout
    return None


class SnapshotPlanner(DefaultSavePlanner):
    """Plans and hands out what a snapshot holds.

    Args:
        flat: The state; the state that DCP passes in is ignored.
        cache: The plans of earlier saves of this component.
        num_ranks: How many ranks save together.
    """

    serves_in_place = True
    """Asked twice for a tensor, it returns the same memory."""

    def __init__(self, flat: FlatState, cache: PlanCache, num_ranks: int) -> None:
        super().__init__(flatten_state_dict=True)
        self._flat = flat
        self._cache = cache
        self._num_ranks = num_ranks
        self._frames: dict[bytes, bytes] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the snapshot as it is, flat already."""
        self.flatten_state_dict = False
        super().set_up_planner(self._flat.values, storage_meta, is_coordinator)
        self.flatten_state_dict = True
        self.mappings = dict(self._flat.paths)

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's part, or say that it has not changed."""
        return self._cache.local(_forms(self._flat), super().create_local_plan)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan for all ranks, unless nothing has changed. On the coordinator only.

        Raises:
            StorageWriteError: not all ranks take part. Without a process group, torch lets each rank save by itself.
        """
        if len(all_plans) != self._num_ranks:
            raise StorageWriteError(
                f"only {len(all_plans)} of {self._num_ranks} ranks save together: the process group was destroyed "
                "while the save was under way. Call finalize() before destroy_process_group()."
            )
        return self._cache.all_ranks(all_plans, super().create_global_plan)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take what this rank is to write."""
        return super().finish_plan(self._cache.final(new_plan))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is to be written for `index`."""
        value = self.state_dict[index.fqn]
        return value.shard(index) if isinstance(value, StagedShards) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Give a pickled value the form in which DCP stores it."""
        if not isinstance(object, PickledValue):
            return super().transform_object(write_item, object)
        return io.BytesIO(object.data if object.is_framed else self._framed(object.data))

    def _framed(self, data: bytes) -> bytes:
        # Hyperparameters repeat for each parameter.
        frame = self._frames.get(data)
        if frame is None:
            stream = io.BytesIO()
            torch.save(pickle.loads(data), stream)
            frame = stream.getvalue()
            if len(self._frames) < _FRAMES_KEPT:
                self._frames[data] = frame
        return frame
