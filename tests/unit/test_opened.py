"""The small files of a checkpoint: opened once on each rank, handed on as they were read."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.opened import read_metadata, read_small_files


def test_each_rank_opens_the_metadata_once_and_receives_only_the_content(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3)}, storage_writer=FsspecStorageWriter(tmp_path), no_dist=True)
    store = Store(tmp_path)
    files = read_small_files(store)
    sent = pickle.dumps(files)
    assert len(sent) < len(files.metadata) + len(files.checksums or b"") + 200
    for here in (files, pickle.loads(sent)):
        opened, crc = read_metadata(store, files=here)
        assert (opened, crc) == read_metadata(store)
        assert read_metadata(store, files=here)[0] is opened
        assert FsspecStorageReader.at(store, here).read_metadata() is opened
