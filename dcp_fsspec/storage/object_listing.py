"""All objects below a folder of an S3 store, in little time.

Botocore takes some 0.2 ms to make an entry of a listing into Python values, most of them never looked at: of 67,000
objects that is longer than a server needs to list them. Here the entries are put aside before botocore sees them, and
read while the server works at the next page. Where it can be guessed how the names are spread, a few ranges of them are
listed at a time.
"""

import asyncio
import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.streaming import modified_at

Times = dict[str, tuple[int, float | None]]
Page = dict[str, Any]
Cuts = Callable[[str], Sequence[str]]
"""From the first name to names, in order, between which ranges of names are listed at a time."""

_FIRST, _LAST = "<Contents>", "</Contents>"
_FIELDS = re.compile(r"<(Key|Size|LastModified)>([^<]*)<")
_ENTRIES = "DcpFsspecEntries"
_EVENT = "before-parse.*.ListObjectsV2"
"""By the star this comes first, before botocore parses the page a first time to see whether it is an error."""
_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("dcp_fsspec_entries_wanted", default=False)


def list_times(store: Store, cuts: Cuts = lambda first: ()) -> Times:
    """Return what `Store.list_times` does, and as few requests more as `cuts` returns names."""
    fs = store.fs
    if type(fs).__module__.partition(".")[0] != "s3fs" or getattr(fs, "version_aware", True):
        return store.list_times()
    return store.reading("", lambda: _listed(store.fs, store.root, cuts))


def _listed(fs: AbstractFileSystem, root: str, cuts: Cuts) -> Times:
    bucket, key, _ = fs.split_path(root)
    fs.s3.meta.events.register(_EVENT, _put_aside, unique_id=__name__)
    found: Times = {}
    with contextlib.suppress(FileNotFoundError):
        for times in sync(fs.loop, _Listing(fs, bucket, f"{key}/" if key else "").all, cuts):
            found |= times
    return found


class _Listing:
    """One listing. Its coroutines run in the event loop of the filesystem."""

    def __init__(self, fs: AbstractFileSystem, bucket: str, prefix: str) -> None:
        self._fs, self._bucket, self._prefix = fs, bucket, prefix

    async def all(self, cuts: Cuts) -> list[Times]:
        _wanted.set(True)
        page = await self._page()
        names = list(_read(page, self._prefix)) if page.get("IsTruncated") else []
        if names != sorted(names):
            names = []  # Nor does the store know where a range of names begins.
        starts = [self._prefix + cut for cut in cuts(names[0]) if cut > names[-1]] if names else []
        begins: list[Page | str] = [page, *starts]
        ranges = zip(begins, [*starts, None], strict=True)
        return await asyncio.gather(*(self._range(*one) for one in ranges))

    async def _page(self, **place: str) -> Page:
        page: Page = await self._fs._call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._prefix, **place)
        return page

    async def _range(self, start: Page | str, until: str | None) -> Times:
        """List on from a page, or from a key; the last page may go beyond `until`."""
        page = await self._page(StartAfter=start) if isinstance(start, str) else start
        found: Times = {}
        while True:
            reading = asyncio.get_running_loop().run_in_executor(None, _read, page, self._prefix)
            if not page.get("IsTruncated") or (until and _last_key(page) > until):
                return found | await reading
            page = await self._page(ContinuationToken=page["NextContinuationToken"])
            found |= await reading


def _put_aside(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Take the entries of a page out of what botocore is about to parse. Called by botocore."""
    body = response_dict["body"]
    first, last = body.find(_FIRST.encode()), body.rfind(_LAST.encode())
    if _wanted.get() and 0 <= first < last and _is_plain(body):
        customized_response_dict[_ENTRIES] = body[first : last + len(_LAST)].decode()
        response_dict["body"] = body[:first] + body[last + len(_LAST) :]


def _is_plain(body: bytes) -> bool:
    """Tell whether a page is written as all stores do: no attributes in the fields, nothing but text."""
    num_entries = body.count(_FIRST.encode())
    fields = (b"<Key>", b"<Size>", b"<LastModified>")
    return all(body.count(one) == num_entries for one in fields) and b"<!" not in body


def _read(page: Page, prefix: str) -> Times:
    """Return the entries of a page by name."""
    return {
        key.removeprefix(prefix): (size, time)
        for key, size, time in _entries(page)
        if key.startswith(prefix) and not key.endswith("/")
    }


def _entries(page: Page) -> Iterator[tuple[str, int, float | None]]:
    if _ENTRIES not in page:  # Written in another way than all stores do.
        yield from ((one["Key"], int(one["Size"]), modified_at(one)) for one in page.get("Contents", ()))
        return
    for entry in page[_ENTRIES].split(_LAST)[:-1]:
        found = dict(_FIELDS.findall(entry))
        yield _decoded(found["Key"], page), int(found["Size"]), _seconds(found["LastModified"])


@functools.lru_cache(maxsize=4096)
def _seconds(time: str) -> float | None:
    return modified_at({"modified": time})


def _decoded(key: str, page: Page) -> str:
    key = ElementTree.fromstring(f"<Key>{key}</Key>").text or "" if "&" in key else key
    return unquote_plus(key) if page.get("EncodingType") == "url" and ("%" in key or "+" in key) else key


def _last_key(page: Page) -> str:
    keys = _FIELDS.findall(page[_ENTRIES], page[_ENTRIES].rfind(_FIRST)) if _ENTRIES in page else []
    return max((key for key, _, _ in _entries(page)), default="") if not keys else _decoded(dict(keys)["Key"], page)
