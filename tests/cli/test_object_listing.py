"""The quick listing of S3 stores says what the plain one says, page by page and range by range."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_fsspec.storage import object_listing
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


_TIME = "<LastModified>2026-01-02T03:04:05.000Z</LastModified>"


def _put_aside(entries: str) -> dict[str, Any]:
    page: dict[str, Any] = {}
    token = object_listing._wanted.set(True)
    try:
        object_listing._put_aside({"body": f"<List>{entries}</List>".encode()}, page)
    finally:
        object_listing._wanted.reset(token)
    return page


@pytest.mark.parametrize(
    ("key", "name"),
    [("f/a", "a"), ("f/a &amp;amp; b", "a &amp; b"), ("f/&#x9f;&lt;", "\x9f<"), ("f/a%2Bb+c", "a%2Bb+c")],
)
def test_names_are_read_as_xml_says(key: str, name: str) -> None:
    page = _put_aside(f"<Contents><Size>3</Size><Key>{key}</Key>{_TIME}</Contents>")
    assert {one: size for one, (size, _) in object_listing._read(page, "f/").items()} == {name: 3}


@pytest.mark.parametrize(
    "entry",
    [
        f"<Contents><Key><![CDATA[f/a]]></Key><Size>3</Size>{_TIME}</Contents>",
        f'<Contents><Key lang="en">f/a</Key><Size>3</Size>{_TIME}</Contents>',
        f"<Contents><!-- one --><Key>f/a</Key><Size>3</Size>{_TIME}</Contents>",
        "<x:Contents><x:Key>f/a</x:Key><x:Size>3</x:Size></x:Contents>",
    ],
)
def test_pages_that_are_written_in_another_way_are_left_to_botocore(entry: str) -> None:
    assert _put_aside(entry) == {}
