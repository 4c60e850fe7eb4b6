"""B17: a url is not a path, and each is taken for what it is."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import ConfigurationError, FsspecStorageReader, FsspecStorageWriter
from support.checkpoints import assert_loads, save
from support.stores import MemoryStore, S3Store, unique_name
from support.tensors import random_tensor

STATE = {"w": random_tensor(4, 3), "n": 7}


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder and a home of the test's own."""
    folder, home = tmp_path / "cwd", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    return folder


@pytest.mark.parametrize(
    ("given", "lands_in"),
    [
        ("{tmp}/a/b", "a/b"),
        (Path("{tmp}/a/b"), "a/b"),
        (PurePosixPath("{tmp}/a/b"), "a/b"),
        ("file://{tmp}/a/b", "a/b"),
        ("local://{tmp}/a/b", "a/b"),
        ("relative/x", "cwd/relative/x"),
        ("./x", "cwd/x"),
        ("../x", "x"),
        (Path("relative/x"), "cwd/relative/x"),
        ("~/x", "home/x"),
        (Path("~/x"), "home/x"),
        ("with:colon/x", "cwd/with:colon/x"),
        ("with::two/x", "cwd/with::two/x"),
        ("{tmp}/with::two/x", "with::two/x"),
        ("s3", "cwd/s3"),
    ],
)
def test_b17_local_paths_and_urls(cwd: Path, tmp_path: Path, given: str | Path, lands_in: str) -> None:
    """B17: strings, path objects and `file://` urls name the same local folders that they name elsewhere."""
    url = type(given)(str(given).replace("{tmp}", str(tmp_path)))
    save(STATE, url)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path / lands_in)) == [".metadata", "__0_0.distcp", "checksums.json"]
    assert_loads(STATE, url)  # type: ignore[arg-type]
    found = list(tmp_path.rglob(".metadata"))
    assert found == [tmp_path / lands_in / ".metadata"]


def test_b17_a_relative_path_stays_where_it_was_meant(cwd: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """B17: the working folder may change between the making of a writer and its use."""
    writer, reader = FsspecStorageWriter("run/x"), FsspecStorageReader("run/x")
    twin = pickle.dumps(writer)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    dcp.save(STATE, storage_writer=writer)
    dcp.save(STATE, storage_writer=pickle.loads(twin))
    assert (cwd / "run" / "x" / ".metadata").exists()
    assert os.listdir(elsewhere) == []
    assert set(reader.read_metadata().state_dict_metadata) == set(STATE)


@pytest.mark.parametrize(
    "url", ["s3://bucket/run/x", "gs://bucket/run/x", "memory://run/x", "abfs://c/x", "hdfs://h/x"]
)
def test_b17_a_url_that_went_through_pathlib_is_refused(cwd: Path, tmp_path: Path, url: str) -> None:
    """B17: in the constructor as by `checkpoint_id`, and no local folder of that name appears."""
    damaged = Path(url)
    for end in (FsspecStorageWriter, FsspecStorageReader):
        for given in (damaged, str(damaged), os.path.normpath(url)):
            with pytest.raises(ConfigurationError, match=url.partition(":")[0]):
                end(given)
    assert not FsspecStorageWriter.validate_checkpoint_id(damaged)
    assert not FsspecStorageReader.validate_checkpoint_id(damaged)
    writer, reader = FsspecStorageWriter(tmp_path / "good"), FsspecStorageReader(tmp_path / "good")
    with pytest.raises(ConfigurationError, match="one slash"):
        dcp.save(STATE, storage_writer=writer, checkpoint_id=damaged)
    with pytest.raises(ConfigurationError, match="one slash"):
        dcp.load(dict(STATE), storage_reader=reader, checkpoint_id=damaged)
    assert os.listdir(cwd) == []
    assert not (tmp_path / "good").exists()


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "s4://bucket/x"])
def test_b17_an_unknown_protocol_is_named_with_the_known_ones(cwd: Path, url: str) -> None:
    """B17."""
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(ConfigurationError) as caught:
            end(url)
        text = str(caught.value)
        assert url.partition(":")[0] in text
        assert all(known in text for known in ("s3", "file", "memory"))
    assert os.listdir(cwd) == []


@pytest.mark.parametrize("url", ["simplecache::nosuch://x", "nosuch::memory://x", "memory://a::b/x", "s3://b/x::y"])
def test_b17_a_chain_of_which_a_link_is_no_protocol_is_refused(cwd: Path, url: str) -> None:
    """B17: what stands behind a `::` that is part of a name would be lost, and two runs would share one folder."""
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(ConfigurationError) as caught:
            end(url)
        assert url in str(caught.value)
    assert os.listdir(cwd) == []


@pytest.mark.parametrize("given", ["", "  ", None, 3, b"bytes"])
def test_b17_what_is_no_url_is_refused(given: Any) -> None:
    """B17."""
    with pytest.raises((ConfigurationError, TypeError)):
        FsspecStorageWriter(given)


def test_b17_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: `memory://a/b` and `memory:///a/b` are the same place."""
    store = MemoryStore()
    save(STATE, store.below("ckpt"))
    assert_loads(STATE, store.below("ckpt").replace("memory://", "memory:///"))
    store.close()


def test_b17_every_s3_scheme(seaweed_store: S3Store) -> None:
    """B17."""
    save(STATE, seaweed_store.below("ckpt").replace("s3://", "s3a://"), **seaweed_store.arguments)
    assert_loads(STATE, seaweed_store.below("ckpt"), **seaweed_store.arguments)


def test_b17_a_filesystem_for_another_protocol_is_refused(seaweed_store: S3Store) -> None:
    """B17: a url of one store and the filesystem of another would put the checkpoint in an odd place."""
    from fsspec.implementations.memory import MemoryFileSystem

    with pytest.raises(ConfigurationError, match="memory"):
        FsspecStorageWriter(f"s3://bucket/{unique_name()}", filesystem=MemoryFileSystem())
    with pytest.raises(ConfigurationError):
        FsspecStorageWriter("memory://x", filesystem=MemoryFileSystem(), storage_options={"a": 1})


def test_b17_an_unknown_storage_option_is_refused_or_named() -> None:
    """B17: a misspelt option does not vanish into the defaults of another account."""
    with pytest.raises((ConfigurationError, CheckpointException)) as caught:
        save(STATE, "s3://bucket/x", storage_options={"endpoint": "http://127.0.0.1:1"})
    assert "endpoint" in str(caught.value)
