"""Virtual ranks: what thousands of ranks would plan and write, and a store that keeps only what is asked for again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsspec.checkpointer.snapshot import FlatState, StagedShards
from dcp_fsspec.storage.checksums import FileChecksums, ItemRecord
from dcp_fsspec.storage.names import SHARD_SUFFIX
from dcp_fsspec.storage.results import Results, Written
from dcp_fsspec.storage.splitting import item_bytes
from dcp_fsspec.storage.torch_internals import StorageInfo

ROWS, COLUMNS = 8, 32
"""A rank's part of each sharded tensor: 1 KiB, as what it costs to plan does not depend on the size."""
REPLICATED_SHAPE = (256, 128)
_FRAME_BYTES = 1200
_PROPERTIES = TensorProperties(dtype=torch.float32)
_PART = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
_REPLICATED = torch.zeros(REPLICATED_SHAPE)


@dataclass(frozen=True)
class Case:
    """A job.

    Attributes:
        num_ranks: Ranks.
        num_tensors: Tensors that are sharded over all ranks; besides, a tenth as many are replicated.
    """

    num_ranks: int
    num_tensors: int

    @property
    def num_replicated(self) -> int:
        """Tensors that every rank holds whole."""
        return self.num_tensors // 10

    @property
    def num_items(self) -> int:
        """Items in the checkpoint."""
        return self.num_ranks * self.num_tensors + self.num_replicated

    @property
    def whole(self) -> torch.Size:
        """Shape of each sharded tensor."""
        return torch.Size((ROWS * self.num_ranks, COLUMNS))

    def names(self) -> Iterator[str]:
        """Return the keys of the sharded tensors."""
        return (f"model.layers.{number // 8}.block.{number % 8}.weight" for number in range(self.num_tensors))

    def replicated_names(self) -> Iterator[str]:
        """Return the keys of the others."""
        return (f"model.layers.{number}.norm.weight" for number in range(self.num_replicated))

    def chunk(self, rank: int) -> ChunkStorageMetadata:
        """Return what `rank` holds of each sharded tensor."""
        return ChunkStorageMetadata(offsets=torch.Size((ROWS * rank, 0)), sizes=torch.Size((ROWS, COLUMNS)))

    def saved(self, rank: int) -> FlatState:
        """Return what `rank` saves."""
        chunk = self.chunk(rank)
        values: dict[str, Any] = {
            fqn: StagedShards(
                (
                    WriteItem(
                        MetadataIndex(fqn, chunk.offsets),
                        WriteItemType.SHARD,
                        tensor_data=TensorWriteData(chunk, _PROPERTIES, self.whole),
                    ),
                ),
                (_PART,),
            )
            for fqn in self.names()
        }
        values |= dict.fromkeys(self.replicated_names(), _REPLICATED)
        return FlatState(values, {fqn: tuple(fqn.split(".")) for fqn in values})

    def wanted(self, rank: int) -> dict[str, Any]:
        """Return the targets of `rank`."""
        state: dict[str, Any] = {fqn: _Target.of(self, rank) for fqn in self.names()}
        return state | {fqn: torch.empty(REPLICATED_SHAPE) for fqn in self.replicated_names()}

    def records_of(self, rank: int) -> dict[str, TensorStorageMetadata]:
        """Return the metadata of just what `rank` holds: with it, planning its load does not take all chunks' time."""
        records = {fqn: TensorStorageMetadata(_PROPERTIES, self.whole, [self.chunk(rank)]) for fqn in self.names()}
        shape = torch.Size(REPLICATED_SHAPE)
        whole = ChunkStorageMetadata(offsets=torch.Size((0, 0)), sizes=shape)
        replicated = {fqn: TensorStorageMetadata(_PROPERTIES, shape, [whole]) for fqn in self.replicated_names()}
        return {**records, **replicated}


class _Target(torch.Tensor):
    """A rank's part of a sharded tensor, as torch's planner asks for it."""

    whole: torch.Size
    held: ChunkStorageMetadata
    part: torch.Tensor

    @classmethod
    def of(cls, case: Case, rank: int) -> _Target:
        target = torch.empty(0).as_subclass(cls)
        target.whole, target.held, target.part = case.whole, case.chunk(rank), torch.empty(ROWS, COLUMNS)
        return target

    def size(self, *_: Any) -> Any:
        return self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.held]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.part


def as_written(plan: SavePlan) -> Results:
    """Return what a rank that has written `plan` tells the coordinator. One shard file, for so little."""
    naming = plan.storage_data
    name = f"{naming.prefix}0{naming.suffix}{SHARD_SUFFIX}"
    sizes = [item_bytes(item) + _FRAME_BYTES for item in plan.items]
    file = FileChecksums(sum(sizes), hash(name) & 0xFFFFFFFF)
    results, offset = Results(), 0
    for item, size in zip(plan.items, sizes, strict=True):
        record = ItemRecord((offset * 2654435761 + file.crc) & 0xFFFFFFFF, 640)
        written = Written(StorageInfo(name, offset, size), record, file)
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=written))
        offset += size
    return results


class CountingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Counts what is asked of it. Only ranks whose reads are tried write shard files for real, so it keeps all."""

    cachable = False

    def __init__(self) -> None:
        super().__init__(skip_instance_cache=True)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.requests: Counter[str] = Counter()

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        self.requests["PUT"] += 1
        super().pipe_file(path, value, mode, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self.requests["GET"] += 1
        return super().cat_file(path, start, end, **kwargs)
