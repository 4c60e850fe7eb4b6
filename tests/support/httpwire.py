"""HTTP/1.1 messages read from a stream, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from support.faults import Exchange

_BLOCK_BYTES = 256 * 1024


def read_head(stream: BinaryIO) -> bytes:
    """Return the bytes up to and with the empty line; nothing if the peer closed before it."""
    lines: list[bytes] = []
    while not lines or lines[-1] != b"\r\n":
        line = stream.readline()
        if not line:
            return b""
        lines.append(line)
    return b"".join(lines)


def read_body(stream: BinaryIO, headers: dict[str, str], *, to_end: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield the raw bytes of a body, each with whether they are payload (or framing).

    Args:
        stream: stands behind the head.
        headers: of the message.
        to_end: a body without stated length reaches to the end of the stream; else there is none.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while True:
            size_line = stream.readline()
            yield size_line, False
            size = int(size_line.split(b";")[0] or b"0", 16)
            if size == 0:
                break
            yield from _read_payload(stream, size)
            yield stream.readline(), False
        trailer = b""
        while trailer != b"\r\n":
            trailer = stream.readline()
            if not trailer:
                raise ConnectionError("closed inside a chunked body")
            yield trailer, False
    elif "content-length" in headers:
        yield from _read_payload(stream, int(headers["content-length"]))
    elif to_end:
        yield stream.read(), True


def _read_payload(stream: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    while size > 0:
        data = stream.read(min(size, _BLOCK_BYTES))
        if not data:
            raise ConnectionError("closed inside a body")
        size -= len(data)
        yield data, True


def _parse_headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def parse_request(head: bytes) -> Exchange:
    first, *rest = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    parts = urlsplit(target)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Exchange(method, unquote(parts.path), query, _parse_headers(rest))


def parse_response(head: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    return int(first.split(" ", 2)[1]), _parse_headers(rest)
