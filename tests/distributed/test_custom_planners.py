"""Planners of users, after the examples in torch's documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Shard

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.tensors import assert_bits_equal
from support.worlds import Layout, assert_holds, blank, laid_out

pytestmark = pytest.mark.distributed

SHARD_BYTES = 64 << 10
ROWS = Layout([0, 1], (Shard(0),))


def _full() -> dict[str, torch.Tensor]:
    """Return ordinary numbers: they are cast to other dtypes."""
    generator = torch.Generator().manual_seed(3)
    return {"large": torch.randn(400, 101, generator=generator), "few": torch.randn(3, 5, generator=generator)}


class RenamingSavePlanner(DefaultSavePlanner):
    """Save every key under another name."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"renamed.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class RenamingLoadPlanner(DefaultLoadPlanner):
    """Load the names of `RenamingSavePlanner` into a state that has the old ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {f"renamed.{key}": value for key, value in self.state_dict.items()}
        self.mappings = {f"renamed.{key}": path for key, path in self.mappings.items()}


class CastingSavePlanner(DefaultSavePlanner):
    """Save bfloat16 of what is float32, and say so in the metadata."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [self._cast(item) for item in plan.items]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    @staticmethod
    def _cast(item: WriteItem) -> WriteItem:
        if item.tensor_data is None:
            return item
        properties = dataclasses.replace(item.tensor_data.properties, dtype=torch.bfloat16)
        return dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties))

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) else data


class SilentlyCastingSavePlanner(DefaultSavePlanner):
    """Save another dtype of the same size and say nothing: stock torch loads what the item itself says."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return (data * 1000).to(torch.int32) if isinstance(data, torch.Tensor) else data


class WideningLoadPlanner(DefaultLoadPlanner):
    """Load into a buffer of another dtype and copy it over when it is full."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = super().resolve_tensor(read_item)
        return torch.empty(target.shape, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor * 2)


def _save_renamed(rank: int, url: str) -> None:
    full = _full()
    state = {**laid_out(full, ROWS), "plain": full["large"], "epoch": 4}
    dcp.save(state, storage_writer=_writer(url), planner=RenamingSavePlanner())
    loaded = {**laid_out(blank(full), ROWS), "plain": torch.zeros_like(full["large"]), "epoch": 0}
    dcp.load(loaded, storage_reader=FsspecStorageReader(url), planner=RenamingLoadPlanner())
    assert_holds(loaded, {**full, "plain": full["large"]}, "renamed")
    assert loaded["epoch"] == 4


def _writer(url: str | Path) -> FsspecStorageWriter:
    return FsspecStorageWriter(url, shard_bytes=SHARD_BYTES)


def test_keys_that_a_planner_renames_are_saved_and_loaded_under_the_new_names(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    values(two_ranks.run(_save_renamed, str(tmp_path)))
    loaded = {"renamed.large": torch.zeros(400, 101), "renamed.plain": torch.zeros(400, 101), "renamed.epoch": 0}
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path))
    full = _full()
    assert_bits_equal(loaded, {"renamed.large": full["large"], "renamed.plain": full["large"], "renamed.epoch": 4})


def _save_cast(rank: int, url: str) -> None:
    full = _full()
    state = {**laid_out(full, ROWS), "plain": full["large"], "epoch": 4}
    dcp.save(state, storage_writer=_writer(url), planner=CastingSavePlanner())
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in full.items()}
    loaded = laid_out(blank(wanted), ROWS)
    dcp.load(loaded, storage_reader=FsspecStorageReader(url))
    assert_holds(loaded, wanted, "cast")
    # The last rows of a piece, in one of the two dtypes: what is stored widens exactly.
    wide = {name: tensor.to(torch.float32) for name, tensor in wanted.items()}
    columns = laid_out(blank(wide), Layout([0, 1], (Shard(1),)))
    dcp.load(columns, storage_reader=FsspecStorageReader(url, verify="full"))
    assert_holds(columns, wide, "cast and widened")


def test_what_a_planner_casts_while_saving_is_stored_and_loaded_in_the_new_dtype(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    values(two_ranks.run(_save_cast, str(tmp_path)))
    full = _full()
    wanted = {"large": full["large"], "plain": full["large"], "few": full["few"]}
    for reader in (FileSystemReader(tmp_path), FsspecStorageReader(tmp_path)):
        loaded: dict[str, Any] = {
            name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in wanted.items()
        }
        dcp.load(loaded, storage_reader=reader)
        assert_bits_equal(loaded, {name: tensor.to(torch.bfloat16) for name, tensor in wanted.items()})
        record = reader.read_metadata().state_dict_metadata["large"]
        assert isinstance(record, TensorStorageMetadata)
        assert record.properties.dtype == torch.bfloat16
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert sum(sizes) < 1.2 * sum(tensor.numel() * 2 for tensor in wanted.values())


@pytest.mark.parametrize("rows", [400, 57])
def test_the_item_itself_decides_its_dtype_where_the_metadata_says_another(rows: int, tmp_path: Path) -> None:
    """Whole items, and some rows of an item."""
    full = _full()
    dcp.save(full, storage_writer=_writer(tmp_path), planner=SilentlyCastingSavePlanner())
    for reader in (FileSystemReader(tmp_path), FsspecStorageReader(tmp_path)):
        loaded = {"large": torch.zeros(400, 101, dtype=torch.int32)}
        dcp.load(loaded, storage_reader=reader, planner=_FirstRowsLoadPlanner(rows))
        assert_bits_equal(loaded["large"][:rows], (full["large"] * 1000).to(torch.int32)[:rows])


class _FirstRowsLoadPlanner(DefaultLoadPlanner):
    """Load some rows, the first ones, of each tensor and leave the others as they are."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        cut = [item for item in map(self._cut, plan.items) if item.lengths[0] > 0]
        return dataclasses.replace(plan, items=cut)

    def _cut(self, item: ReadItem) -> ReadItem:
        left = max(0, min(item.lengths[0], self._rows - item.dest_offsets[0]))
        return dataclasses.replace(item, lengths=torch.Size([left, *item.lengths[1:]]))


def test_a_load_planner_may_hand_out_buffers_and_take_them_back_full(tmp_path: Path) -> None:
    full = _full()
    dcp.save(full, storage_writer=_writer(tmp_path))
    for reader in (FileSystemReader(tmp_path), FsspecStorageReader(tmp_path)):
        loaded = blank(full)
        dcp.load(loaded, storage_reader=reader, planner=WideningLoadPlanner())
        assert_bits_equal(loaded, {name: tensor * 2 for name, tensor in full.items()})


def _save_unflattened(rank: int, url: str) -> None:
    full = _full()
    state = {**laid_out(full, ROWS), "nested": {"a": 1, "b": [full["few"], {"c": (2, 3)}]}}
    dcp.save(state, storage_writer=_writer(url), planner=DefaultSavePlanner(flatten_state_dict=False))
    loaded: dict[str, Any] = {**laid_out(blank(full), ROWS), "nested": {"a": 0}}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(loaded, storage_reader=FsspecStorageReader(url), planner=planner)
    assert_holds(loaded, full, "not flattened")
    nested = planner.state_dict["nested"]
    assert_bits_equal(nested, state["nested"])


def test_a_state_that_is_not_flattened_keeps_nested_values_as_one_item(two_ranks: RankPool, tmp_path: Path) -> None:
    values(two_ranks.run(_save_unflattened, str(tmp_path)))
    assert set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata) == {"large", "few", "nested"}


def _save_extra_items(rank: int, url: str) -> None:
    """A planner that adds a value of its own on one rank, as for per-rank state."""
    full = _full()
    state = {**laid_out(full, ROWS), f"rng.{rank}": torch.full((5,), rank, dtype=torch.uint8)}
    dcp.save(state, storage_writer=_writer(url))
    loaded = {**laid_out(blank(full), ROWS), f"rng.{rank}": torch.zeros(5, dtype=torch.uint8)}
    dcp.load(loaded, storage_reader=FsspecStorageReader(url))
    assert isinstance(loaded["large"], DTensor)
    assert_bits_equal(loaded[f"rng.{rank}"], torch.full((5,), rank, dtype=torch.uint8))


def test_each_rank_keeps_what_it_alone_holds(two_ranks: RankPool, tmp_path: Path) -> None:
    values(two_ranks.run(_save_extra_items, str(tmp_path)))
    assert {"rng.0", "rng.1"} <= set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
