"""Shard files below folders of their own: stock torch follows, commands and overwrites know them."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_fsspec import Catalog, DistributedCheckpointer, FsspecStorageReader, FsspecStorageWriter, StorageWriteError
from dcp_fsspec.checkpointer import layout
from dcp_fsspec.storage import local
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.names import spread, unspread
from dcp_fsspec.storage.verifying import verify
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from dcp_fsspec.testing.servers import MotoServer
from support.commands import run
from support.stores import MemoryStore, S3Store
from support.tensors import assert_bits_equal, random_tensor

_SPREAD = re.compile(r"[0-9a-f]{2}/__0_\d+(_[0-9a-f]{8})?\.distcp")
_SHARDS = {"shard_bytes": 64 << 10, "spread_keys": True}


def _state(seed: int) -> dict[str, Any]:
    return {f"w{number}": random_tensor(40, 1024, seed=seed + number) for number in range(3)} | {"step": seed}


def _blank() -> dict[str, Any]:
    return {name: torch.zeros_like(one) if name != "step" else 0 for name, one in _state(0).items()}


def _shards(store: Store) -> list[str]:
    names = sorted(name for name in store.list_files() if name.endswith(".distcp"))
    assert all(map(_SPREAD.fullmatch, names))
    return names


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "ckpt") if request.param == "path" else MemoryStore().below("ckpt")


def test_an_overwrite_leaves_only_its_own_files(url: str) -> None:
    store = Store(url)
    dcp.save(_state(0), storage_writer=FsspecStorageWriter(url, **_SHARDS))
    first = _shards(store)
    dcp.save(_state(10), storage_writer=FsspecStorageWriter(url, **_SHARDS))
    second = _shards(store)
    assert len({name.partition("/")[0] for name in second}) > 2
    assert not set(first) & set(second)
    named = {info.relative_path for info in pickle.loads(store.read(".metadata")).storage_data.values()}
    assert named == set(second)
    assert verify(url).ok
    state = _blank()
    dcp.load(state, storage_reader=FsspecStorageReader(url))
    assert_bits_equal(state, _state(10))
    dcp.save(_state(20), storage_writer=FsspecStorageWriter(url))
    assert all("/" not in name for name in store.list_files())


def test_stock_torch_reads_it_from_a_folder(tmp_path: Path) -> None:
    dcp.save(_state(0), storage_writer=FsspecStorageWriter(tmp_path, **_SHARDS))
    state = _blank()
    dcp.load(state, storage_reader=FileSystemReader(tmp_path))
    assert_bits_equal(state, _state(0))


def test_stock_torch_reads_it_from_s3(moto_server: MotoServer, moto_client: Any) -> None:
    url = S3Store(moto_client, moto_server.bucket, moto_server.storage_options()).below("ckpt")
    options = moto_server.storage_options()
    dcp.save(_state(0), storage_writer=FsspecStorageWriter(url, storage_options=options, **_SHARDS))
    assert len(_shards(Store(url, options))) > 3
    state = _blank()
    dcp.load(state, storage_reader=FsspecReader(url, **options))
    assert_bits_equal(state, _state(0))


def test_a_failed_save_leaves_no_shard_file() -> None:
    memory = MemoryStore()
    faulty = FaultyFileSystem(Store(memory.below("x")).fs)
    faulty.inject("pipe_file", Fail(PermissionError("no")), path="*.distcp", nth=3)
    url = memory.below("ckpt")
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(_state(0), storage_writer=FsspecStorageWriter(url, filesystem=faulty, retry_seconds=0, **_SHARDS))
    assert isinstance(caught.value.failures[0][0], StorageWriteError)
    assert not Store(url).list_files()


def _train(url: str) -> None:
    model = torch.nn.Linear(64, 64)
    checkpointer = DistributedCheckpointer(url, writer_settings=_SHARDS, progress=False)
    for iteration in (1, 2, 3):
        checkpointer.save(model, None, None, None, iteration)
    checkpointer.finalize()
    loaded = torch.nn.Linear(64, 64)
    assert DistributedCheckpointer(url, progress=False).load(loaded) == 3
    assert_bits_equal(loaded.state_dict(), model.state_dict())


def test_the_commands_know_it(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    _train(url)
    component = Store(f"{url}/iter_000000003/model")
    assert _shards(component)
    listed = run(None, "ls", url, "--json").json
    assert "model" in str(listed)
    run(None, "verify", url)
    run(None, "cp", f"{url}/iter_000000003", str(tmp_path / "copy"))
    assert _shards(Store(tmp_path / "copy" / "model")) == _shards(component)
    run(None, "verify", str(tmp_path / "copy"))
    run(None, "export", f"{url}/iter_000000003", str(tmp_path / "model.safetensors"))
    run(None, "prune", url, "--keep-latest", "2", "--yes")
    assert Catalog(url).iterations() == [2, 3]
    (tmp_path / "run" / "iter_000000002" / "commit.json").unlink()
    run(None, "sweep", url, "--older-than", "0", "--yes")
    assert Catalog(url).iterations() == [3]
    assert sorted(one.name for one in (tmp_path / "run").iterdir() if one.is_dir()) == ["iter_000000003"]


class _Racy(LocalFileSystem):
    """Folders as over SFTP, where another rank makes each of them between the look and the making."""

    cachable = False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not os.path.isdir(path):
            os.makedirs(path)
            raise OSError("Failure")


def test_ranks_that_make_the_same_folder_at_once_both_go_on(tmp_path: Path) -> None:
    path = str(tmp_path / "raced")
    dcp.save(_state(0), storage_writer=FsspecStorageWriter(path, filesystem=_Racy(), **_SHARDS))
    assert verify(path).ok


def test_names_of_copied_shard_files_are_durable_before_the_checkpoint_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    dcp.save(_state(0), storage_writer=FsspecStorageWriter(source, **_SHARDS))
    synced: set[str] = set()

    def sync_folder(path: str) -> None:
        if not (target / ".metadata").exists() and any(name.endswith(".distcp") for name in os.listdir(path)):
            synced.add(os.path.relpath(path, target))
        local_sync(path)

    local_sync = local.sync_folder
    monkeypatch.setattr(local, "sync_folder", sync_folder)
    run(None, "cp", str(source), str(target))
    assert synced == {name.partition("/")[0] for name in _shards(Store(target))}


def test_components_of_the_plain_writer_are_complete_as_ever() -> None:
    files = [f"{name}/{file}" for name in layout.STANDARD_COMPONENTS for file in (".metadata", spread("__0_0.distcp"))]
    assert layout.missing_marks(files, all_standard=True) == []
    assert layout.missing_marks([spread("__0_0.distcp"), ".metadata"], all_standard=False) == []
    assert layout.missing_marks(files[:-2] + files[-1:], all_standard=True) == ["trainer/.metadata is missing"]
    named_alike = ["e1/__0_0.distcp", "e1/.metadata"]
    assert layout.missing_marks([*files, *named_alike], all_standard=True) == []
    assert layout.missing_marks(named_alike, all_standard=False) == []
    assert unspread("3f") == ""
    assert unspread("a/model") == "a/model"
