"""Publish one file larger than memory: its bytes come bit by bit, and the file appears when all of them are there.

On S3 that is a multipart upload, whose parts go up side by side, each with a CRC32C that the store compares and each
tried again by itself; elsewhere it is the filesystem's own stream, committed at the end where it can be.
"""

import base64
import contextlib
import datetime
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fsspec import AbstractFileSystem

from dcp_fsspec.storage.checksums import crc_of
from dcp_fsspec.storage.transfer import Job, Transfer

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
Tried = Callable[[Callable[[], T]], T]

PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
"""S3 takes 10,000."""

_PARTS_AT_A_TIME = 4


def part_bytes_for(num_bytes: int) -> int:
    """Return the size of the parts of a file of `num_bytes`."""
    return max(PART_BYTES, -(-num_bytes // _MAX_PARTS))


def regrouped(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in parts of `part_bytes`, the last one shorter. Each chunk is copied at once."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            taken = view[: part_bytes - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == part_bytes:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)


def upload_in_parts(
    call: Callable[..., Any], path: str, chunks: Iterable[Buffer], part_bytes: int, *, checksums: bool, tried: Any
) -> None:
    """Publish `chunks` as one object by a multipart upload, which is aborted when anything fails.

    Args:
        call: Calls a method of S3 by its name.
        path: Bucket and key.
        chunks: The bytes.
        part_bytes: Size of the parts.
        checksums: Send the CRC32C of each part.
        tried: Makes a call, again if need be.
    """
    bucket, _, key = path.partition("/")
    target = {"Bucket": bucket, "Key": key}
    extra = {"ChecksumAlgorithm": "CRC32C"} if checksums else {}
    upload = tried(lambda: call("create_multipart_upload", **target, **extra))
    target["UploadId"] = upload["UploadId"]

    def send(number: int, data: bytes) -> Mapping[str, Any]:
        crc = base64.b64encode(crc_of([data]).to_bytes(4, "big")).decode()
        own = {"ChecksumCRC32C": crc} if checksums else {}
        answer = tried(lambda: call("upload_part", **target, PartNumber=number, Body=data, **own))
        return {"PartNumber": number, "ETag": answer["ETag"], **own}

    try:
        transfer = Transfer(_PARTS_AT_A_TIME, _PARTS_AT_A_TIME * part_bytes)
        parts = transfer.run(
            Job(len(data), functools.partial(send, number, data))
            for number, data in enumerate(regrouped(chunks, part_bytes), 1)
        )
        tried(lambda: call("complete_multipart_upload", **target, MultipartUpload={"Parts": parts}))
    except BaseException:
        with contextlib.suppress(Exception):
            call("abort_multipart_upload", **target)
        raise


def write_stream(fs: AbstractFileSystem, path: str, chunks: Iterable[Buffer]) -> None:
    """Write `chunks` by the filesystem's own stream. A failed one may leave a piece of the file behind."""
    stream = fs.open(path, "wb")
    try:
        for chunk in chunks:
            stream.write(bytes(chunk))
        stream.close()
    except BaseException:
        # Closing would publish what there is, and so would the garbage collector.
        with contextlib.suppress(Exception):
            stream.discard()
        with contextlib.suppress(Exception):
            stream.closed = True
        raise


def open_uploads(fs: AbstractFileSystem, prefix: str) -> list[tuple[str, str, float | None]]:
    """Return path, id and time of the multipart uploads below `prefix` that were begun and not completed."""
    bucket, _, key = prefix.partition("/")
    found: list[tuple[str, str, float | None]] = []
    markers: dict[str, str] = {}
    while True:
        answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/" if key else "", **markers)
        found += [
            (f"{bucket}/{one['Key']}", one["UploadId"], modified_at({"modified": one.get("Initiated")}))
            for one in answer.get("Uploads") or ()
        ]
        if not answer.get("IsTruncated"):
            return found
        markers = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort_upload(fs: AbstractFileSystem, path: str, upload_id: str) -> None:
    """Remove an open multipart upload and the parts that were sent."""
    bucket, _, key = path.partition("/")
    fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)


class Source:
    """Chunks to be published, and what was raised while they were made.

    Args:
        chunks: The bytes.
        num_bytes: How many there are.
    """

    def __init__(self, chunks: Iterable[Buffer], num_bytes: int) -> None:
        self._chunks = chunks
        self.num_bytes = num_bytes
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Buffer]:
        try:
            yield from self._chunks
        except GeneratorExit:
            raise
        except BaseException as error:
            self.failure = error
            raise


def modified_at(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last changed, seconds since 1970, from what a filesystem says of it."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.datetime.fromisoformat(value)
        if isinstance(value, datetime.datetime):
            return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
