"""How bytes get into a filesystem and out of it: by fsspec's common methods, or by a shorter way of its own.

fsspec's methods take and return one ``bytes``, which has to be joined, and memory touched for the first time costs more
than the network. s3fs and obstore can send a list of buffers as it is, and hand over what arrives in pieces, which
then go straight to where they belong. Subclasses may have changed anything, so they are called by the common methods.
"""

import functools
import io
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from dcp_fsspec.storage import direct
from dcp_fsspec.storage.signing import Signed, Signer, signer_of

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview

_CHUNK_BYTES = 256 << 10
_MAX_SINGLE_BYTES = 64 << 20
"""Larger objects go up in parts."""
_FRESH_SECONDS = 5.0
_OF_THE_MOMENT = {404, 409, 412, 416}
"""What a refusal may say of the object, which is another one when it is asked for again."""
_WANTS_MORE = (direct.RefusedError, ssl.SSLCertVerificationError)


class Client(Protocol):
    """Whole objects in, ranges out. Called from many threads."""

    def put(self, path: str, buffers: Sequence[Buffer], **options: Any) -> None:
        """Make one object of `buffers`."""

    def read_into(self, path: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill `views` with what lies from byte `start` on; return how many bytes there were, at most what fits."""


def streams(fs: AbstractFileSystem) -> str:
    """Return the package of `fs` if it has a way without copies, or nothing."""
    package = type(fs).__module__.partition(".")[0]
    known = {"s3fs": "call_s3", "obstore": "_construct_store"}
    return package if package in known and hasattr(fs, known[package]) and not _needs_joined(package) else ""


def goes_direct(fs: AbstractFileSystem) -> bool:
    """Tell whether bytes go past `fs`, by requests that it signs."""
    return bool(streams(fs)) and signer_of(fs) is not None


def _needs_joined(package: str) -> bool:
    """Tell whether bodies must be plain bytes: botocore signs by awscrt where that is installed, which reads them."""
    if package != "s3fs":
        return False
    from botocore.compat import HAS_CRT

    return bool(HAS_CRT)


def client_of(fs: AbstractFileSystem) -> Client:
    """Return the shortest way to `fs`. It serves the process that it was made in."""
    usual = {"s3fs": _S3fs, "obstore": _Obstore}.get(streams(fs), _Fsspec)(fs)
    signer = signer_of(fs) if goes_direct(fs) else None
    return usual if signer is None else _Direct(fs, signer, usual)


def scatter(data: Buffer, views: Sequence[memoryview]) -> int:
    """Copy `data` into `views`, one after the other, as far as it reaches; return how far that was."""
    filling = Filling(views)
    filling.write(data)
    return filling.num_bytes


class Filling:
    """Takes bytes as they come and puts them where they belong.

    Attributes:
        num_bytes: How many there were. What does not fit is dropped.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.num_bytes = 0
        self._left = [view for view in reversed(views) if len(view)]

    def write(self, data: Buffer) -> None:
        """Take the next bytes."""
        rest = memoryview(data)
        while len(rest) and self._left:
            view = self._left.pop()
            count = min(len(view), len(rest))
            view[:count] = rest[:count]
            self.num_bytes += count
            rest = rest[count:]
            if count < len(view):
                self._left.append(view[count:])


class _Direct:
    """Sends requests that the filesystem has signed past it, and leaves to it those that take more.

    Whatever the store refuses is asked again through the filesystem, whose errors are known. Where that succeeds, the
    store wants more than a signature, and all goes through the filesystem from then on.
    """

    def __init__(self, fs: AbstractFileSystem, signer: Signer, usual: Client) -> None:
        self._fs = fs
        self._signer = signer
        self._usual = usual
        self._works = True

    def put(self, path: str, buffers: Sequence[Buffer], **options: Any) -> None:
        signed = None
        if sum(map(len, buffers)) <= _MAX_SINGLE_BYTES:
            signed = self._signed("pipe_file", functools.partial(self._signer.put, path, **options))
        if signed is None:
            self._usual.put(path, buffers, **options)
            return
        try:
            direct.put(signed, buffers)
        except _WANTS_MORE as refusal:
            is_fresh = time.monotonic() - signed.signed_at < _FRESH_SECONDS
            self._usual.put(path, buffers, **options)
            self._give_up(is_fresh, refusal)
        self._fs.invalidate_cache(path)

    def read_into(self, path: str, start: int, views: Sequence[memoryview]) -> int:
        signed = self._signed("cat_file", functools.partial(self._signer.get, path))
        if signed is None:
            return self._usual.read_into(path, start, views)
        try:
            return direct.get_into(signed, start, views)
        except _WANTS_MORE as refusal:
            is_fresh = time.monotonic() - signed.signed_at < _FRESH_SECONDS
            num_bytes = self._usual.read_into(path, start, views)
            self._give_up(is_fresh, refusal)
            return num_bytes

    def _signed(self, method: str, sign: Callable[[], Signed | None]) -> Signed | None:
        """Return a request in place of a call of `method`; None if there cannot be one."""
        if not (self._works and _is_untouched(self._fs, method)):
            return None
        try:
            return sign()
        except Exception as error:
            # Such as credentials that cannot be had. Through the filesystem that is an error that others know.
            logger.debug("no request can be signed: %s", type(error).__name__)
            return None

    def _give_up(self, is_fresh: bool, refusal: Exception) -> None:
        if isinstance(refusal, direct.RefusedError) and refusal.status in _OF_THE_MOMENT:
            return
        if isinstance(refusal, direct.RefusedError) and not is_fresh:
            # The credentials have changed since it was signed.
            self._signer.forget()
            return
        self._works = False
        logger.info("signed requests do not work here (%s); all goes through the filesystem", refusal)


def _is_untouched(fs: AbstractFileSystem, method: str) -> bool:
    """Tell whether nobody has put a method of their own, which may count, delay or refuse, in its place."""
    return bool(getattr(getattr(fs, method), "__wrapped__", None) == getattr(fs, f"_{method}"))


class _Fsspec:
    def __init__(self, fs: AbstractFileSystem) -> None:
        self._fs = fs

    def put(self, path: str, buffers: Sequence[Buffer], **options: Any) -> None:
        data = buffers[0] if len(buffers) == 1 and isinstance(buffers[0], bytes) else b"".join(buffers)
        self._fs.pipe_file(path, data, **options)

    def read_into(self, path: str, start: int, views: Sequence[memoryview]) -> int:
        stop = start + sum(map(len, views))
        data = memoryview(self._fs.cat_file(path, start=start, end=stop))
        # One that ignores ranges returns the whole file.
        return scatter(data[start:stop] if len(data) > stop - start else data, views)


class _S3fs(_Fsspec):
    def put(self, path: str, buffers: Sequence[Buffer], **options: Any) -> None:
        self._fs.s3.meta.events.register("request-created.s3.PutObject", _without_expect, unique_id=__name__)
        self._fs.pipe_file(path, Body(buffers), **options)

    def read_into(self, path: str, start: int, views: Sequence[memoryview]) -> int:
        bucket, key, version = self._fs.split_path(path)
        stop = start + sum(map(len, views))
        options = {"VersionId": version} if version else {}
        answer = self._fs.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **options)
        if "ContentRange" not in answer:  # The store ignored the range.
            answer["Body"].close()
            return super().read_into(path, start, views)
        if not direct.is_range(answer["ContentRange"], start, stop):
            answer["Body"].close()
            raise ConnectionError(f"bytes {start}-{stop - 1} were asked for, {answer['ContentRange']} came")
        filling = Filling(views)
        sync(self._fs.loop, _drain, answer["Body"], filling)
        return filling.num_bytes


async def _drain(body: Any, filling: Filling) -> None:
    try:
        async for chunk in body.iter_chunks(_CHUNK_BYTES):
            filling.write(chunk)
    finally:
        body.close()


def _without_expect(request: Any, **_: object) -> None:
    """Send a body without asking first: botocore asks for every body that can be read, which costs a round trip."""
    if isinstance(request.data, Body):
        del request.headers["Expect"]


class Body:
    """Buffers as the body of a request: a file to botocore, and to aiohttp pieces that it sends as they lie.

    Sending it again begins at the beginning.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        self._num_bytes = sum(map(len, self._views))
        self._position = 0

    def __len__(self) -> int:
        return self._num_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for view in self._views:
            for start in range(0, len(view), _CHUNK_BYTES):
                # A copy: a transport that is closed may still send, later, what it was given last.
                yield bytes(view[start : start + _CHUNK_BYTES])

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, as in a file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position, as in a file."""
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes, as in a file."""
        stop = self._num_bytes if size is None or size < 0 else self._position + size
        data = self[self._position : stop]
        self._position += len(data)
        return data

    def __getitem__(self, key: slice) -> bytes:
        """Return some of the bytes joined: what a client cuts into parts is sent as parts."""
        start, stop, _ = key.indices(self._num_bytes)
        parts, begin = [], 0
        for view in self._views:
            parts.append(view[max(0, start - begin) : max(0, stop - begin)])
            begin += len(view)
        return b"".join(parts)


class _Obstore(_Fsspec):
    """Obstore's fsspec layer keeps its stores to itself; through it, buffers go up in parts and come down as copies."""

    def put(self, path: str, buffers: Sequence[Buffer], **options: Any) -> None:
        if options or sum(map(len, buffers)) > _MAX_SINGLE_BYTES:
            super().put(path, buffers, **options)
            return
        bucket, key = self._fs._split_path(path)
        self._fs._construct_store(bucket).put(key, list(buffers), use_multipart=False)

    def read_into(self, path: str, start: int, views: Sequence[memoryview]) -> int:
        bucket, key = self._fs._split_path(path)
        stop = start + sum(map(len, views))
        return scatter(memoryview(self._fs._construct_store(bucket).get_range(key, start=start, end=stop)), views)
