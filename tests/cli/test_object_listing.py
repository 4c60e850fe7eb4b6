"""The quick listing of S3 stores says what the plain one says, page by page and range by range."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_fsspec.storage.filesystem import Store as PackageStore
from dcp_fsspec.storage.object_listing import list_times
from support.stores import S3Store

NAMES = ["a&b <c>.bin", "a+b c%20d", "é/ü", "x/1", "x/2", "x/3", "y", "z/a/b", "z/c", "zz"]


@pytest.mark.parametrize("store", ["moto", "seaweed", "obstore", "file"], indirect=True)
@pytest.mark.parametrize("cuts", [(), ("x/2",), ("a", "x/2", "xx", "zzz")])
def test_it_says_what_the_plain_listing_says(store: Any, cuts: tuple[str, ...]) -> None:
    for number, name in enumerate(NAMES):
        store.raw_write(f"run/{name}", bytes(number))
    store.raw_write("runner", b"a neighbour")
    arguments = dict(store.arguments)
    if isinstance(store, S3Store) and store.storage_options:  # Three names a page.
        arguments["storage_options"] = {**store.storage_options, "s3_additional_kwargs": {"MaxKeys": 3}}
    folder = PackageStore(store.below("run"), **arguments)
    found = list_times(folder, lambda first: cuts)
    assert {name: size for name, (size, _) in found.items()} == {name: size for size, name in enumerate(NAMES)}
    assert found == folder.list_times()
    assert list_times(folder.child("nothing")) == {}
