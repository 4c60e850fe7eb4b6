"""Parts of large items that stock torch wrote: the right bits, and hardly a byte more than needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import Shard

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.ranks import RankPool, values
from support.stores import Store, unique_name
from support.tensors import assert_bits_equal, blank_like, random_tensor
from support.worlds import Layout, assert_holds, blank, laid_out

WASTE = 1.05
"""Bytes fetched, per byte needed."""


@dataclass(frozen=True)
class Box:
    """Part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = narrow_tensor_by_index(tensor, self.offsets, self.sizes)
        return part


class BoxLoadPlanner(DefaultLoadPlanner):
    """Load one box of each tensor into a tensor of the size of the box."""

    def __init__(self, boxes: Mapping[str, Box]) -> None:
        super().__init__()
        self._boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for fqn, box in self._boxes.items():
            record = self.metadata.state_dict_metadata[fqn]
            assert isinstance(record, TensorStorageMetadata)
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            items += create_read_items_for_chunk_list(fqn, record, [chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = narrow_tensor_by_index(
            self.state_dict[read_item.dest_index.fqn], read_item.dest_offsets, read_item.lengths
        )
        return target


BOXES = {
    "first_rows": ("matrix", Box((0, 0), (700, 1024))),
    "rows_in_the_middle": ("matrix", Box((5123, 0), (777, 1024))),
    "last_row": ("matrix", Box((10999, 0), (1, 1024))),
    "nearly_all_rows": ("matrix", Box((1, 0), (10998, 1024))),
    "planes": ("cube", Box((17, 0, 0), (9, 300, 750))),
    "rows_of_one_plane": ("cube", Box((31, 100, 0), (1, 90, 750))),
    "elements": ("flat", Box((12345677,), (3000001,))),
    "within_the_only_row": ("one_row", Box((0, 4321000), (1, 999999))),
}
"""Parts that lie in one piece."""

SCATTERED = {
    "columns": ("matrix", Box((2000, 100), (1000, 300))),
    "one_column": ("matrix", Box((0, 1023), (11000, 1))),
    "corner_of_a_cube": ("cube", Box((48, 290, 740), (2, 10, 10))),
}


class RecordingFileSystem(LocalFileSystem):  # type: ignore[misc]
    """Notes how many bytes each request asks for."""

    protocol = "recording"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requested: list[int] = []

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        if start is not None and end is not None:
            self.requested.append(end - start)
        return super().cat_file(path, start, end, **options)


Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def large() -> Tensors:
    """Tensors of more than 40 MiB each."""
    return {
        "matrix": random_tensor(11000, 1024),
        "cube": random_tensor(50, 300, 750, seed=1),
        "flat": random_tensor(23 << 20, dtype=torch.bfloat16, seed=2),
        "one_row": random_tensor(1, 11 << 20, seed=3),
    }


@pytest.fixture(scope="module")
def written(large: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One stock checkpoint of all large tensors and some small ones."""
    folder = tmp_path_factory.mktemp("large")
    small = {f"small{number}": random_tensor(30, 40, seed=number) for number in range(20)}
    dcp.save({**large, **small}, storage_writer=FileSystemWriter(folder, sync_files=False))
    yield folder
    shutil.rmtree(folder)


def _assert_box_loads(reader: FsspecStorageReader, name: str, box: Box, full: torch.Tensor) -> int:
    state = {name: torch.zeros(box.sizes, dtype=full.dtype)}
    dcp.load(state, storage_reader=reader, planner=BoxLoadPlanner({name: box}))
    assert_bits_equal(state[name], box.of(full))
    return state[name].nbytes


@pytest.mark.parametrize(("name", "box"), BOXES.values(), ids=BOXES)
def test_rows_of_a_large_item_cost_the_bytes_of_these_rows(written: Path, large: Tensors, name: str, box: Box) -> None:
    """B42."""
    reader = FsspecStorageReader(written)
    needed = _assert_box_loads(reader, name, box, large[name])
    report = reader.last_report
    assert report.num_bytes_needed == needed
    # A frame's head is read as well, to know where the payload begins.
    assert needed <= report.num_bytes <= WASTE * needed + 2048, report


@pytest.mark.parametrize(("name", "box"), SCATTERED.values(), ids=SCATTERED)
def test_a_box_inside_of_the_rows_of_a_large_item_is_right(written: Path, large: Tensors, name: str, box: Box) -> None:
    filesystem = RecordingFileSystem(skip_instance_cache=True)
    reader = FsspecStorageReader(written, filesystem=filesystem)
    _assert_box_loads(reader, name, box, large[name])
    assert reader.last_report.num_bytes < large[name].nbytes + (64 << 10)
    assert max(filesystem.requested) <= 10 << 20, "one request fetches rows without end"


def test_several_boxes_of_several_items_at_once_are_right(written: Path, large: Tensors) -> None:
    boxes = dict(BOXES.values())
    state = {name: torch.zeros(box.sizes, dtype=large[name].dtype) for name, box in boxes.items()}
    reader = FsspecStorageReader(written, memory_budget_bytes=1 << 20)
    dcp.load(state, storage_reader=reader, planner=BoxLoadPlanner(boxes))
    assert_bits_equal(state, {name: box.of(large[name]) for name, box in boxes.items()})


def test_a_whole_large_item_is_read_once_under_a_small_budget(written: Path, large: Tensors) -> None:
    reader = FsspecStorageReader(written, memory_budget_bytes=1 << 20)
    state = {"cube": torch.zeros_like(large["cube"])}
    dcp.load(state, storage_reader=reader)
    assert_bits_equal(state["cube"], large["cube"])
    assert reader.last_report.num_bytes <= WASTE * large["cube"].nbytes


def test_some_keys_cost_the_bytes_of_these_keys(written: Path, large: Tensors) -> None:
    """B42: one large item and a few small ones, from a file that holds all."""
    wanted = {"flat": large["flat"], **{f"small{number}": random_tensor(30, 40, seed=number) for number in (0, 3, 19)}}
    loaded = blank_like(wanted)
    reader = FsspecStorageReader(written)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)
    assert reader.last_report.num_bytes <= WASTE * sum(tensor.nbytes for tensor in wanted.values())


def _load_in_shards(rank: int, url: str, arguments: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, int]:
    full = {"w": random_tensor(*shape)}
    state = laid_out(blank(full), Layout([0, 1], (Shard(0),)))
    reader = FsspecStorageReader(url, **arguments)
    dcp.load(state, storage_reader=reader)
    assert_holds(state, full, "from one item")
    return reader.last_report.num_bytes, state["w"].to_local().nbytes


@pytest.mark.distributed
@pytest.mark.server
@pytest.mark.parametrize("store", ["path", "seaweed"], indirect=True)
def test_ranks_that_hold_some_rows_each_read_these_rows_alone(
    store: Store, two_ranks: RankPool, tmp_path: Path
) -> None:
    """B42: one item, saved by one process, loaded in shards."""
    shape = (10501, 1024)
    dcp.save({"w": random_tensor(*shape)}, storage_writer=FileSystemWriter(tmp_path / "stock", sync_files=False))
    folder = unique_name()
    for file in (tmp_path / "stock").iterdir():
        store.raw_write(f"{folder}/{file.name}", file.read_bytes())
    outcomes = values(two_ranks.run(_load_in_shards, store.below(folder), store.arguments, shape))
    for fetched, needed in outcomes:
        assert needed <= fetched <= WASTE * needed


def test_rows_of_a_checkpoint_of_ours_cost_the_bytes_of_these_rows(large: Tensors, tmp_path: Path) -> None:
    dcp.save({"matrix": large["matrix"]}, storage_writer=FsspecStorageWriter(tmp_path))
    for name, box in [BOXES[key] for key in ("first_rows", "rows_in_the_middle", "nearly_all_rows")]:
        reader = FsspecStorageReader(tmp_path)
        needed = _assert_box_loads(reader, name, box, large[name])
        assert needed <= reader.last_report.num_bytes <= WASTE * needed
        checked = FsspecStorageReader(tmp_path, verify="full")
        _assert_box_loads(checked, name, box, large[name])
        assert checked.last_report.num_unverified == 0
        assert checked.last_report.num_bytes >= reader.last_report.num_bytes


def test_rows_of_compressed_items_are_right(tmp_path: Path) -> None:
    full = random_tensor(3000, 101)
    dcp.save({"w": full}, storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    for verify in ("read", "full"):
        reader = FsspecStorageReader(tmp_path, verify=verify)
        _assert_box_loads(reader, "w", Box((1234, 0), (56, 101)), full)
        assert reader.last_report.num_unverified == 1


@pytest.mark.parametrize("box", [Box((5000, 0), (0, 1024)), Box((5000, 10), (3, 0))])
def test_a_box_of_nothing_is_no_request(written: Path, box: Box) -> None:
    """A planner may ask for an empty shard in the midst of a tensor. Stock torch copies nothing and goes on."""
    planner = BoxLoadPlanner({"matrix": box})
    reader = FsspecStorageReader(written)
    dcp.load({"matrix": torch.zeros(box.sizes)}, storage_reader=reader, planner=planner)
    assert (reader.last_report.num_bytes_needed, reader.last_report.num_bytes) == (0, 0)
