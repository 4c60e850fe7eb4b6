"""Bytes in pieces: bodies of requests, and memory filled as bytes come."""

from __future__ import annotations

import asyncio
import io
import pickle

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp_fsspec.storage.clients import Body, Filling, client_of, scatter, streams

WHOLE = bytes(range(256)) * 3000
PARTS = [WHOLE[:5], b"", memoryview(WHOLE)[5:700_000], bytearray(WHOLE[700_000:])]


async def _sent(body: Body) -> bytes:
    return b"".join([bytes(piece) async for piece in body])


def test_body_is_sent_whole_and_again_from_its_beginning() -> None:
    body = Body(PARTS)
    assert len(body) == len(WHOLE)
    assert asyncio.run(_sent(body)) == WHOLE
    body.seek(0)
    assert asyncio.run(_sent(body)) == WHOLE


@pytest.mark.parametrize("size", [1000, 100_000, 10_000_000])
def test_body_reads_as_a_file_of_its_buffers(size: int) -> None:
    body, file = Body(PARTS), io.BytesIO(WHOLE)
    while expected := file.read(size):
        assert body.read(size) == expected
        assert body.tell() == file.tell()
    assert body.read(size) == b""
    assert body.seek(-3, io.SEEK_END) == file.seek(-3, io.SEEK_END)
    assert body.read() == file.read() == WHOLE[-3:]


@pytest.mark.parametrize("part", [slice(0, 5), slice(3, 800_000), slice(5, 5), slice(700_000, None), slice(0, 1 << 40)])
def test_body_is_cut_into_parts_as_bytes_are(part: slice) -> None:
    assert Body(PARTS)[part] == WHOLE[part]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_bytes_fill_the_views_in_order_and_the_rest_is_dropped(chunk: int) -> None:
    memory = [bytearray(4), bytearray(0), bytearray(1), bytearray(9)]
    filling = Filling([memoryview(part) for part in memory])
    for start in range(0, 20, chunk):
        filling.write(WHOLE[start : min(20, start + chunk)])
    assert b"".join(memory) == WHOLE[:14]
    assert filling.num_bytes == 14


def test_too_few_bytes_are_counted() -> None:
    memory = bytearray(4)
    assert scatter(b"ab", [memoryview(memory)]) == 2
    assert memory == b"ab\0\0"


def test_other_filesystems_and_subclasses_go_by_the_common_methods() -> None:
    import s3fs

    class Own(s3fs.S3FileSystem):  # type: ignore[misc]
        pass

    assert streams(s3fs.S3FileSystem(anon=True)) == "s3fs"
    assert streams(Own(anon=True)) == ""
    fs = MemoryFileSystem()
    client_of(fs).put("/clients/x", PARTS)
    memory = bytearray(10)
    assert client_of(fs).read_into("/clients/x", 3, [memoryview(memory)]) == 10
    assert memory == WHOLE[3:13]
    assert pickle.loads(pickle.dumps(fs)).cat_file("/clients/x") == WHOLE
