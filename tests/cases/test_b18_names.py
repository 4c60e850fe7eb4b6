"""B18 and B19: names are taken literally, and slashes too many or too few make no other place."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
import torch

from dcp_fsspec import ConfigurationError, FsspecStorageReader, FsspecStorageWriter
from dcp_fsspec.storage.filesystem import Store as PackageStore
from dcp_fsspec.testing.servers import WebdavServer
from support.checkpoints import assert_loads, fails, load, save
from support.stores import FolderStore, MemoryStore, S3Store, Store, unique_name
from support.tensors import random_tensor

NAMES = (
    "run[1]/m",
    "lr[1e-3]/[a-z]",
    "run?x/m",
    "*star*/**",
    "{a,b}/m",
    "lr=1e-3+bs=4 x%20y/m",
    "run#3/m",
    "100%/%2F",
    "läuf/日本 ☃",
    "a&b;c,d'e\"f/m",
    "c:d/@u!$HOME",
    "~x/m",
    "..x/m..",
    " a b /.hidden",
    "what?versionld=abc/m",
)
_ON_WEBDAV = ("run[1]/m", "*star*/m", "{a,b}/m", "lr=1e-3+bs=4/m", "läuf/日本 ☃", "c:d/@u!$HOME")
"""webdav4 itself cannot address names with `?`, `#` or `%`."""

_FIRST = {"w": random_tensor(4, 3), "n": 1}
_SECOND = {"w": random_tensor(40_000, seed=1), "n": 2}


def _live(store: Store, name: str) -> None:
    """Save, list, fail to save again, overwrite, load and delete under `name`; siblings of like names stay away."""
    url = store.below(name)
    save(_FIRST, url, **store.arguments)
    assert sorted(store.raw_list()) == [f"{name}/.metadata", f"{name}/__0_0.distcp", f"{name}/checksums.json"]
    assert_loads(_FIRST, url, **store.arguments)
    with fails() as failure:
        save(_SECOND, url, **store.arguments, overwrite=False)
    failure.names("CheckpointExistsError", name)

    save(_SECOND, url, **store.arguments, shard_bytes=64 << 10)
    files = store.raw_list()
    assert {path.rpartition("/")[0] for path in files} == {name}
    assert_loads(_SECOND, url, **store.arguments)
    package_store = PackageStore(url, store.storage_options, store.filesystem)
    listed = package_store.list_files()
    assert {f"{name}/{file}": size for file, size in listed.items()} == files
    for file in listed:
        package_store.remove_all([file], "removed by the test")
    assert store.raw_list() == {}


@pytest.mark.parametrize("store", ["path", "memory", "seaweed", "obstore"], indirect=True)
def test_b18_characters_in_a_name_are_literal(store: Store) -> None:
    """B18."""
    for name in NAMES:
        _live(store, name)


@pytest.mark.parametrize("store", ["webdav"], indirect=True)
def test_b18_characters_in_a_name_are_literal_where_names_are_moved(store: Store) -> None:
    """B18: on a store that commits by a rename."""
    for name in _ON_WEBDAV:
        _live(store, name)


@pytest.mark.parametrize("store", ["path", "memory", "moto", "seaweed"], indirect=True)
def test_b18_a_name_is_no_pattern_for_its_neighbours(store: Store) -> None:
    """B18: `run*` holds other files than `run1`, `run[1]` too, and an overwrite of one spares the others."""
    states = {name: {"w": random_tensor(3, seed=seed)} for seed, name in enumerate(("run1", "run*", "run[1]", "run?"))}
    for _ in range(2):
        for name, state in states.items():
            save(state, store.below(name), **store.arguments)
    for name, state in states.items():
        assert_loads(state, store.below(name), **store.arguments)
    assert len(store.raw_list()) == 3 * len(states)


def test_b18_a_name_that_object_stores_read_as_a_version_is_refused(seaweed_store: S3Store, tmp_path: Any) -> None:
    """B18: at construction; on a local disk it is a name like any other."""
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(ConfigurationError, match="versionId"):
            end(seaweed_store.below("a?versionId=abc/m"), **seaweed_store.arguments)
    save(_FIRST, str(tmp_path / "a?versionId=abc" / "m"))
    assert_loads(_FIRST, str(tmp_path / "a?versionId=abc" / "m"))
    assert (tmp_path / "a?versionId=abc" / "m" / ".metadata").exists()


# Slashes ----------------------------------------------------------------------------------------------------

SPELLINGS = ("ck/iter", "ck/iter/", "ck//iter", "ck//iter//", "/ck/iter", "//ck///iter/")


@pytest.mark.parametrize("store", ["file", "memory", "moto", "seaweed", "obstore", "webdav"], indirect=True)
def test_b19_slashes_make_no_other_place(store: Store) -> None:
    """B19: what was saved under one spelling is found, and overwritten, under every other."""
    for number, spelling in enumerate(SPELLINGS):
        state = {"w": torch.full((3,), float(number))}
        save(state, f"{store.url}/{spelling}", **store.arguments)
        names = store.raw_list()
        assert {name.rpartition("/")[0] for name in names} == {"ck/iter"}
        assert len(names) == 3
        other = SPELLINGS[(number + 1) % len(SPELLINGS)]
        assert_loads(state, f"{store.url}/{other}", **store.arguments)


@pytest.fixture(params=["moto", "seaweed"])
def own_bucket(request: pytest.FixtureRequest) -> tuple[Any, str, dict[str, Any]]:
    """A bucket whose root may be written to."""
    server, client = {"moto": ("moto_server", "moto_client"), "seaweed": ("seaweed", "seaweed_client")}[request.param]
    bucket = f"root-{unique_name()}"
    boto3 = request.getfixturevalue(client)
    boto3.create_bucket(Bucket=bucket)
    return boto3, bucket, request.getfixturevalue(server).storage_options()


def _keys(client: Any, bucket: str) -> list[str]:
    return sorted(one["Key"] for one in client.list_objects_v2(Bucket=bucket).get("Contents", []))


def test_b19_the_root_of_a_bucket_is_a_folder_too(own_bucket: tuple[Any, str, dict[str, Any]]) -> None:
    """B19: with and without a slash behind it."""
    client, bucket, options = own_bucket
    save(_FIRST, f"s3://{bucket}", storage_options=options)
    assert _keys(client, bucket) == [".metadata", "__0_0.distcp", "checksums.json"]
    assert_loads(_FIRST, f"s3://{bucket}/", storage_options=options)
    save(_SECOND, f"s3://{bucket}/", storage_options=options)
    assert_loads(_SECOND, f"s3://{bucket}", storage_options=options)
    assert len(_keys(client, bucket)) == 3
    save(_FIRST, f"s3://{bucket}//ck//", storage_options=options)
    assert [key for key in _keys(client, bucket) if key.startswith("ck/") or "//" in key] == [
        "ck/.metadata",
        "ck/__0_0.distcp",
        "ck/checksums.json",
    ]
    assert_loads(_FIRST, f"s3://{bucket}/ck", storage_options=options)
    assert_loads(_SECOND, f"s3://{bucket}", storage_options=options)


@pytest.mark.parametrize("store", ["memory", "seaweed"], indirect=True)
def test_b19_slashes_in_the_paths_of_a_passed_filesystem(store: Store) -> None:
    """B19: with the protocol and without it."""
    filesystem, root = fsspec.core.url_to_fs(store.url, **(store.storage_options or {}))
    for number, spelling in enumerate((f"{root}/ck", f"{root}/ck/", f"{root}//ck", store.below("ck//"))):
        state = {"w": torch.full((2,), float(number))}
        save(state, spelling, filesystem=filesystem)
        assert {name.rpartition("/")[0] for name in store.raw_list()} == {"ck"}
        assert_loads(state, store.below("ck"), **store.arguments)


def test_b19_the_url_is_shown_without_the_slashes_at_its_end() -> None:
    """B19: in metadata and messages."""
    store = MemoryStore()
    assert FsspecStorageWriter(store.below("ck//")).checkpoint_id == store.below("ck")
    with fails() as failure:
        load(_FIRST, store.below("ck/"))
    failure.names(store.below("ck/.metadata"))


def test_b19_a_checkpoint_is_read_over_http(webdav: WebdavServer) -> None:
    """B19: the two slashes of a protocol are none too many, also where they are part of the filesystem's paths."""
    store = FolderStore(webdav.folder / unique_name(), "unused")
    save(_SECOND, str(store.folder / "a b" / "ckpt"), shard_bytes=64 << 10)
    root = f"{webdav.base_url}/{store.folder.name}"
    for spelling in ("a%20b/ckpt", "a%20b//ckpt/"):
        assert_loads(_SECOND, f"{root}/{spelling}")
    with fails() as failure:
        load(_SECOND, f"{root}/missing")
    failure.names("CheckpointNotFoundError", f"{root}/missing")
    before = store.raw_list()
    with fails() as failure:
        save(_FIRST, f"{root}/new")
    failure.names(f"{root}/new")
    assert store.raw_list() == before
    store.close()
