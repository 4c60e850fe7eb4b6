"""What a reader says about the checks it made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.tensors import assert_bits_equal, blank_like, random_tensor

Verify = Literal["read", "off", "full"]

STATE: dict[str, Any] = {"w": random_tensor(3000, 101), "bias": random_tensor(101, seed=1), "epoch": 3, "name": "run"}


class _SomeRows(DefaultLoadPlanner):
    """Ask for the first 100 rows of `w` only."""

    def create_local_plan(self) -> LoadPlan:
        items = []
        for item in super().create_local_plan().items:
            left = max(0, 100 - item.dest_offsets[0]) if item.lengths else 1
            if item.dest_index.fqn == "w" and left:
                lengths = torch.Size([min(left, item.lengths[0]), *item.lengths[1:]])
                items.append(replace(item, lengths=lengths))
        return LoadPlan(items)


def _load(folder: Path, verify: Verify, *, rows: bool = False) -> Any:
    reader = FsspecStorageReader(folder, verify=verify)
    loaded = blank_like(STATE)
    dcp.load(loaded, storage_reader=reader, planner=_SomeRows() if rows else None)
    if rows:
        assert_bits_equal(loaded["w"][:100], STATE["w"][:100])
        assert not loaded["w"][100:].any()
    else:
        assert_bits_equal(loaded, STATE)
    return reader.last_report


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    dcp.save(STATE, storage_writer=FsspecStorageWriter(folder, shard_bytes=256 << 10))
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    dcp.save(STATE, storage_writer=FileSystemWriter(folder))
    return folder


@pytest.mark.parametrize("verify", ["read", "full"])
def test_every_item_of_ours_that_is_read_whole_is_checked(ours: Path, verify: Verify) -> None:
    report = _load(ours, verify)
    num_items = len(FileSystemReader(ours).read_metadata().storage_data)
    assert (report.checksums, report.num_verified, report.num_unverified) == ("checked", num_items, 0)
    assert report.num_items == num_items > len(STATE)


def test_items_read_in_part_are_counted_as_unchecked(ours: Path) -> None:
    report = _load(ours, "read", rows=True)
    assert (report.checksums, report.num_items, report.num_verified, report.num_unverified) == ("checked", 1, 0, 1)
    needed = 100 * 101 * 4
    assert report.num_bytes_needed == needed <= report.num_bytes <= 1.05 * needed + 2048


def test_on_demand_items_are_read_whole_to_be_checked(ours: Path) -> None:
    report = _load(ours, "full", rows=True)
    assert (report.checksums, report.num_items, report.num_verified, report.num_unverified) == ("checked", 1, 1, 0)
    assert report.num_bytes >= 200 << 10


@pytest.mark.parametrize("rows", [False, True])
def test_nothing_is_checked_if_switched_off(ours: Path, rows: bool) -> None:
    report = _load(ours, "off", rows=rows)
    assert (report.checksums, report.num_verified, report.num_unverified) == ("off", 0, report.num_items)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("verify", ["read", "full"])
def test_a_foreign_checkpoint_is_loaded_and_said_to_have_no_checksums(
    foreign: Path, verify: Verify, rows: bool
) -> None:
    report = _load(foreign, verify, rows=rows)
    assert (report.checksums, report.num_verified, report.num_unverified) == ("absent", 0, report.num_items)
    assert report.num_items == (1 if rows else len(STATE))


def test_a_foreign_checkpoint_read_with_checks_off_is_said_to_be_unchecked(foreign: Path) -> None:
    report = _load(foreign, "off")
    assert (report.checksums, report.num_verified, report.num_unverified) == ("off", 0, len(STATE))


def test_a_report_is_about_the_last_load_alone(ours: Path, foreign: Path) -> None:
    reader = FsspecStorageReader(ours)
    first, second = blank_like(STATE), blank_like(STATE)
    dcp.load(first, storage_reader=reader)
    before = reader.last_report
    assert before.num_bytes >= before.num_bytes_needed >= sum(STATE[name].nbytes for name in ("w", "bias"))
    assert before.num_requests >= 3  # .metadata, checksums.json and the shard files
    assert before.seconds > 0
    dcp.load(second, checkpoint_id=foreign, storage_reader=reader)
    assert_bits_equal(second, STATE)
    assert (before.checksums, reader.last_report.checksums) == ("checked", "absent")
    assert reader.last_report.num_items == len(STATE)
    third = {"epoch": 0}
    dcp.load(third, checkpoint_id=ours, storage_reader=reader)
    assert (reader.last_report.num_items, reader.last_report.num_verified) == (1, 1)


def test_a_writers_report_is_about_the_last_save_alone(tmp_path: Path) -> None:
    writer = FsspecStorageWriter(tmp_path / "a", shard_bytes=256 << 10)
    dcp.save(STATE, storage_writer=writer)
    report = writer.last_report
    files = {path.name: path.stat().st_size for path in (tmp_path / "a").glob("*.distcp")}
    assert (report.num_files, report.num_bytes) == (len(files), sum(files.values()))
    assert report.num_items == len(FileSystemReader(tmp_path / "a").read_metadata().storage_data)
    assert report.num_requests >= report.num_files + 2
    dcp.save({"epoch": 1}, checkpoint_id=tmp_path / "b", storage_writer=writer)
    assert (writer.last_report.num_files, writer.last_report.num_items) == (1, 1)
    assert report.num_files == len(files)
