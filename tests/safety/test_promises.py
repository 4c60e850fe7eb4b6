"""Promises that only hold if nobody forgets them: bounded memory, no mixtures, no neighbour's file."""

import dataclasses
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_fsspec import ConfigurationError, FsspecStorageReader, FsspecStorageWriter, StorageReadError, verify
from dcp_fsspec.storage import checksums
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem

MIB = 1 << 20

MEASURED = """
    import sys, torch, warnings
    import torch.distributed.checkpoint as dcp
    from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter

    def kib(name):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

    def peak_mib(work):
        open("/proc/self/clear_refs", "w").write("5")
        before = kib("VmRSS")
        work()
        return (kib("VmHWM") - before) / 1024

    url, kind = sys.argv[1:]
    torch.manual_seed(0)
    state = {f"t{n}": torch.rand(4096, 4096) for n in range(4)}
    if kind == "transposed":
        state = {name: tensor.t() for name, tensor in state.items()}
    limits = {"memory_budget_bytes": 64 << 20}
    dcp.save({"w": torch.ones(3)}, storage_writer=FsspecStorageWriter(url + "-warm", **limits))
    print(peak_mib(lambda: dcp.save(state, storage_writer=FsspecStorageWriter(url, **limits))))
    target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    print(peak_mib(lambda: dcp.load(target, storage_reader=FsspecStorageReader(url, **limits))))
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
"""


@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_memory_stays_within_the_budget(tmp_path: Path, kind: str) -> None:
    script = textwrap.dedent(MEASURED)
    command = [sys.executable, "-c", script, str(tmp_path / "c"), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    saving, loading = map(float, done.stdout.split())
    assert saving < 64 + 32
    assert loading < 64 + 32


def test_ranks_that_opened_two_different_saves_are_stopped(tmp_path: Path) -> None:
    plans = []
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), value)}, storage_writer=FsspecStorageWriter(tmp_path))
        reader = FsspecStorageReader(tmp_path)
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan([plans[1], plans[1]]) == [plans[1], plans[1]]
    with pytest.raises(StorageReadError, match="replaced"):
        reader.prepare_global_plan(plans)


def test_an_overwrite_removes_only_what_a_checkpoint_consists_of(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=FsspecStorageWriter(tmp_path))
    (tmp_path / "precious.pt").write_bytes(b"weights")
    found = FsspecStorageReader(tmp_path).read_metadata()
    found.storage_data = {
        index: dataclasses.replace(info, relative_path="precious.pt") for index, info in found.storage_data.items()
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found, protocol=4))
    dcp.save({"w": torch.ones(4)}, storage_writer=FsspecStorageWriter(tmp_path))
    assert (tmp_path / "precious.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("save_id", ["dcp_fsspec-fresh-/../../v", "dcp_fsspec-", 5, ("x",), "0b1c"])
def test_a_strange_save_id_is_no_name_of_a_file(tmp_path: Path, save_id: Any) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=FsspecStorageWriter(tmp_path))
    found = FsspecStorageReader(tmp_path).read_metadata()
    assert found.storage_meta is not None
    found.storage_meta.save_id = save_id
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found, protocol=4))
    if isinstance(save_id, str):
        assert checksums.file_name(save_id) is None
    reader = FsspecStorageReader(tmp_path)
    dcp.load({"w": torch.zeros(4)}, storage_reader=reader)
    assert reader.last_report.checksums == "absent"
    assert verify(tmp_path).ok
    dcp.save({"w": torch.ones(4)}, storage_writer=FsspecStorageWriter(tmp_path))


@pytest.mark.parametrize(
    "path", [Path("s3://b/x"), Path("/tmp/s3://b/x"), Path("simplecache::s3://b/x"), Path("dir::gs://b/x")], ids=str
)
def test_a_url_that_went_through_pathlib_never_becomes_a_local_folder(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one slash"):
        FsspecStorageWriter(path)


def test_clean_up_does_not_wait_for_a_store_that_is_down() -> None:
    fs = FaultyFileSystem(fsspec.filesystem("memory"))
    fs.inject("pipe_file", Fail(TimeoutError("down")), nth=30, times=None)
    fs.inject("rm_file", Fail(TimeoutError("down")), times=None)
    writer = FsspecStorageWriter("/down/c", filesystem=fs, shard_bytes=64 << 10, retry_seconds=0)
    state = {f"t{number}": torch.zeros(16 << 10) for number in range(40)}
    with pytest.raises(CheckpointException, match="down"):
        dcp.save(state, storage_writer=writer)
    assert fs.count("rm_file") <= 8


def test_columns_far_apart_are_read_one_by_one(tmp_path: Path) -> None:
    state = {"w": torch.arange(32 * 262_144, dtype=torch.float32).reshape(32, 262_144)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    target = {"w": torch.zeros(32, 65_536)}

    class Columns(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            (index,) = self.metadata.storage_data  # type: ignore[union-attr]
            item = dcp.planner.ReadItem(
                type=dcp.planner.LoadItemType.TENSOR,
                dest_index=index,
                dest_offsets=torch.Size((0, 0)),
                storage_index=index,
                storage_offsets=torch.Size((0, 65_536)),
                lengths=torch.Size((32, 65_536)),
            )
            return LoadPlan([item])

    reader = FsspecStorageReader(tmp_path)
    dcp.load(target, storage_reader=reader, planner=Columns())
    assert torch.equal(target["w"], state["w"][:, 65_536:131_072])
    report = reader.last_report
    assert report.num_bytes <= 1.05 * report.num_bytes_needed
