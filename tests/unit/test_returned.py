"""What ``dcp.save`` returns reads like stock metadata, and is sent to the ranks as the content of its file."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from dcp_fsspec.storage.torch_internals import StorageInfo
from support.tensors import assert_bits_equal


def _stock(folder: Path) -> Metadata:
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = None  # Made up by the reader.
    return metadata


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def returned(folder: Path) -> Metadata:
    state = {"w": torch.randn(300, 70), "small": [torch.arange(3), "text"], "step": 7}
    made = dcp.save(state, storage_writer=FsspecStorageWriter(folder, shard_bytes=64 << 10))
    assert isinstance(made, Metadata)
    return made


def test_it_equals_what_stock_torch_reads_either_way_round(returned: Metadata, folder: Path) -> None:
    stock = _stock(folder)
    assert returned == stock
    assert stock == returned
    assert dict(returned.storage_data) == {**returned.storage_data} == stock.storage_data
    assert list(returned.storage_data) == list(stock.storage_data)
    assert len(returned.storage_data) == len(stock.storage_data)


def test_it_equals_what_stock_torch_reads_after_it_was_sent_to_a_rank(returned: Metadata, folder: Path) -> None:
    sent = pickle.loads(pickle.dumps(returned))
    again = pickle.loads(pickle.dumps(sent))
    assert sent == again == _stock(folder)
    assert pickle.loads(pickle.dumps(again)) == again, "also after it was looked at"


def test_sending_it_makes_no_entry(returned: Metadata) -> None:
    sent = pickle.loads(pickle.dumps(returned))
    for metadata in (returned, sent):
        assert not {"data", "opened"} & {*vars(metadata.storage_data), *vars(metadata.storage_data._content)}
        assert "data" not in vars(metadata.state_dict_metadata)
    assert sent.state_dict_metadata._content is sent.storage_data._content, "sent once"


def test_copies_of_it_are_its_equals(returned: Metadata) -> None:
    unseen = pickle.loads(pickle.dumps(returned)).storage_data
    assert {"v": 1} | unseen == unseen | {"v": 1} == {**returned.storage_data, "v": 1}
    for twin in (copy.copy(returned), copy.deepcopy(returned), dataclasses.replace(returned)):
        assert twin == returned
    fresh = pickle.loads(pickle.dumps(returned))
    more = {**returned.storage_data, "v": 1}
    assert fresh.storage_data | {"v": 1} == more
    assert {"v": 1} | fresh.storage_data == more
    assert fresh.storage_data | fresh.state_dict_metadata == {**returned.storage_data, **returned.state_dict_metadata}
    assert copy.copy(fresh.storage_data) == fresh.storage_data.copy() == returned.storage_data
    assert copy.copy(fresh.state_dict_metadata) == returned.state_dict_metadata


def test_what_is_changed_in_it_stays_changed_where_it_is_sent(returned: Metadata) -> None:
    index, info = MetadataIndex("other", torch.Size([0])), StorageInfo("other.distcp", 0, 10)
    record = returned.state_dict_metadata.pop("w")
    returned.state_dict_metadata["v"] = record
    returned.storage_data.update({index: info})
    sent = pickle.loads(pickle.dumps(returned))
    assert sent.storage_data[index] == info
    assert "w" not in sent.state_dict_metadata
    assert sent.state_dict_metadata["v"] == record
    assert sent == returned


def test_a_later_save_of_the_metadata_that_a_planner_has_kept_is_as_good(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 70), "small": [torch.arange(3), "text"], "step": 7}
    for name in ("first", "second"):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        made = dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / name), planner=planner)
        assert made == _stock(tmp_path / name)


def test_a_later_save_of_it_by_a_stock_writer_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan", "_cached_metadata"):
        monkeypatch.setattr(SavePlanner, kept, {})
    monkeypatch.setattr(SavePlanner, "_cached_final_save_plan", {})
    state = {"w": torch.randn(300, 70), "step": 7}
    writers = [FsspecStorageWriter(tmp_path / "first"), FileSystemWriter(tmp_path / "second")]
    for writer in writers:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
    assert b"dcp_fsspec" not in (tmp_path / "second" / ".metadata").read_bytes()
    loaded = {"w": torch.zeros(300, 70), "step": 0}
    dcp.load(loaded, storage_reader=FsspecStorageReader(tmp_path / "second"))
    assert_bits_equal(loaded, state)
