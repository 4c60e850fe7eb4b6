"""B05: what another process wrote is seen, what it deleted is not, whatever this process has listed before.

Also: nothing is created beside the checkpoint, buckets least of all, and what is missing is named.
"""

from __future__ import annotations

from typing import Any

import botocore.exceptions
import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from fsspec.implementations.dirfs import DirFileSystem

from dcp_fsspec import (
    CheckpointNotFoundError,
    ConfigurationError,
    FsspecStorageReader,
    FsspecStorageWriter,
    StorageWriteError,
)
from support.checkpoints import assert_loads, fails, folder_files, load, save
from support.stores import FolderStore, S3Store, Store, unique_name
from support.tensors import random_tensor

STATE = {"w": random_tensor(6, 2), "n": 5}
_CACHED = {"use_listings_cache": True}


def _copy_raw(store: Store, source: str, target: str) -> None:
    """Be another process: bring a checkpoint into place behind fsspec's back."""
    for name, data in folder_files(store, source).items():
        store.raw_write(f"{target}/{name}", data)


def _delete_raw(store: Store, folder: str) -> None:
    for name in folder_files(store, folder):
        store.raw_delete(f"{folder}/{name}")


def _ways(store: S3Store) -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Return ways to reach an S3 store: a filesystem that remembers listings, arguments that lead to it, a url root."""
    options = store.storage_options or {}
    users = fsspec.filesystem("s3", **options)
    wrapped = DirFileSystem(f"{store.bucket}/{store.prefix}", users)
    asked_for_cache = {**options, **_CACHED}
    chained = {"s3": options}
    return {
        "options": (users, {"storage_options": options}, store.url),
        "cache asked for": (
            fsspec.filesystem("s3", **asked_for_cache),
            {"storage_options": asked_for_cache},
            store.url,
        ),
        "filesystem": (users, {"filesystem": users}, store.url),
        "folder of it": (users, {"filesystem": wrapped}, ""),
        "simplecache": (users, {"storage_options": chained}, f"simplecache::{store.url}"),
    }


@pytest.mark.parametrize("store", ["moto", "seaweed"], indirect=True)
@pytest.mark.parametrize("way", ["options", "cache asked for", "filesystem", "folder of it", "simplecache"])
def test_b05_a_checkpoint_of_another_process_is_seen_and_its_end_too(store: S3Store, way: str) -> None:
    """B05."""
    users, arguments, root = _ways(store)[way]
    url = f"{root}/ckpt".lstrip("/")
    save(STATE, store.below("elsewhere"), **store.arguments)
    here = f"{store.bucket}/{store.prefix}"
    users.ls(here)
    users.find(here)
    assert not users.exists(f"{here}/ckpt/.metadata")

    reader = FsspecStorageReader(url, **arguments)
    with pytest.raises(CheckpointNotFoundError):
        reader.read_metadata()
    _copy_raw(store, "elsewhere", "ckpt")
    assert set(reader.read_metadata().state_dict_metadata) == {"w", "n"}
    assert_loads(STATE, url, **arguments)
    with fails() as failure:
        save(STATE, url, **arguments, overwrite=False)
    failure.names("CheckpointExistsError", "ckpt")

    users.ls(f"{here}/ckpt")
    _delete_raw(store, "ckpt")
    with pytest.raises(CheckpointNotFoundError):
        FsspecStorageReader(url, **arguments).read_metadata()
    save(STATE, url, **arguments, overwrite=False)
    assert_loads(STATE, url, **arguments)


@pytest.mark.parametrize("store", ["moto", "seaweed", "obstore", "webdav", "memory", "file"], indirect=True)
def test_b05_an_overwrite_of_another_process_is_read_whole(store: Store) -> None:
    """B05: sizes remembered from before an overwrite are not believed."""
    url = store.below("ckpt")
    small, large = {"w": random_tensor(3)}, {"w": random_tensor(3000, seed=1)}
    save(large, store.below("elsewhere"), **store.arguments)
    save(small, url, **store.arguments)
    reader = FsspecStorageReader(url, **store.arguments)
    assert load(small, url, **store.arguments)
    _delete_raw(store, "ckpt")
    _copy_raw(store, "elsewhere", "ckpt")
    assert reader.read_metadata().state_dict_metadata["w"].size == (3000,)  # type: ignore[union-attr]
    assert_loads(large, url, **store.arguments)


@pytest.mark.parametrize("store", ["path", "file", "memory", "moto", "seaweed", "obstore", "webdav"], indirect=True)
def test_a_missing_checkpoint_is_named(store: Store) -> None:
    """A path that does not exist, a folder without a checkpoint, and one whose metadata never came."""
    store.raw_write("empty/notes.txt", b"no checkpoint")
    save(STATE, store.below("cut"), **store.arguments)
    store.raw_delete("cut/.metadata")
    before = store.raw_list()
    for name in ("missing", "empty", "cut", "missing/deeper/still"):
        url = store.below(name)
        with pytest.raises(CheckpointNotFoundError) as caught:
            FsspecStorageReader(url, **store.arguments).read_metadata()
        assert url in str(caught.value)
        with fails() as failure:
            load(STATE, url, **store.arguments)
        failure.names("CheckpointNotFoundError", url)
        assert isinstance(failure.causes[0], FileNotFoundError)
    assert store.raw_list() == before


@pytest.mark.parametrize("store", ["moto", "seaweed", "obstore"], indirect=True)
def test_a_missing_bucket_is_named_and_not_created(store: S3Store) -> None:
    """Neither by a save nor by a load; and by a save nothing at all is left."""
    bucket = f"no-such-{unique_name()}"
    url = f"s3://{bucket}/run/ckpt"
    for attempt in (load, save):
        with fails() as failure:
            attempt(STATE, url, **store.arguments)
        failure.names("CheckpointNotFoundError", url)
        with pytest.raises(botocore.exceptions.ClientError):
            store.client.head_bucket(Bucket=bucket)
    assert bucket not in {one["Name"] for one in store.client.list_buckets()["Buckets"]}


@pytest.mark.parametrize("url", ["s3://", "s3:///", "memory://", "memory:///"])
def test_a_url_without_a_bucket_is_refused_at_once(url: str) -> None:
    """With the url as it was given."""
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(ConfigurationError, match=url.rstrip("/") + "//"):
            end(url)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Any) -> None:
    """A save there fails and leaves the file as it is; a load finds no checkpoint."""
    store = FolderStore(tmp_path / "root", str(tmp_path / "root"))
    store.raw_write("ckpt", b"a file")
    with fails() as failure:
        save(STATE, store.below("ckpt"))
    failure.names("StorageWriteError", store.below("ckpt"), "is a file")
    assert isinstance(failure.causes[0], StorageWriteError)
    with fails() as failure:
        load(STATE, store.below("ckpt"))
    failure.names("CheckpointNotFoundError", store.below("ckpt"))
    assert store.raw_list() == {"ckpt": 6}


@pytest.mark.parametrize("store", ["path", "memory", "moto", "seaweed"], indirect=True)
def test_neighbours_are_left_alone(store: Store) -> None:
    """Saving, overwriting and failing touch only the checkpoint's own files."""
    others = {"ckpt/notes.txt": b"mine", "ckpt/__9_0.distcp": b"mine too", "ckpt2/.metadata": b"?", "ckp": b"x"}
    for name, data in others.items():
        store.raw_write(name, data)
    url = store.below("ckpt")
    save(STATE, url, **store.arguments)
    save({"w": random_tensor(2), "other": 1}, url, **store.arguments)
    with fails():
        dcp.save({"w": [lambda: None]}, storage_writer=FsspecStorageWriter(url, **store.arguments))
    assert {name: store.raw_read(name) for name in others} == others
    assert_loads({"w": random_tensor(2), "other": 1}, url, **store.arguments)
