"""Follow HTTP/1.1 messages in a byte stream without holding it up: where each begins, how long its body is.

Knows just enough of RFC 9112 to stay in step with S3 clients and servers: keep-alive, Content-Length, chunked
bodies (aws-chunked content travels inside either), interim 1xx answers, answers without a body.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

VERBS = ("GET", "PUT", "HEAD", "LIST", "COPY", "DELETE", "POST", "OTHER")

_CHUNKED = -1
_UNTIL_CLOSE = -2
_MAX_HEAD_BYTES = 256 * 1024


class MessageScanner:
    """One direction of one connection.

    Attributes:
        num_messages: messages whose first byte has been seen.
        body_bytes: body bytes seen, chunk framing excluded.
        skippable_bytes: how many of the coming bytes are plain body: the owner may pass them on unseen and
            report them through `skip`.

    Args:
        read_head: called with each complete head; returns the length of the body that follows.
    """

    def __init__(self, read_head: Callable[[bytes], int]) -> None:
        self._read_head = read_head
        self._step: Callable[[bytes, int], int] = self._scan_head
        self._pending = b""
        self.num_messages = 0
        self.body_bytes = 0
        self.skippable_bytes = 0

    def skip(self, num_bytes: int) -> None:
        """Account for body bytes that went by unseen."""
        self.body_bytes += num_bytes
        self.skippable_bytes -= num_bytes
        if not self.skippable_bytes:
            self._step = self._scan_head

    def feed(self, data: bytes) -> None:
        """Account for the next bytes of the stream."""
        position = 0
        while position < len(data):
            position = self._step(data, position)

    def _scan_head(self, data: bytes, position: int) -> int:
        if not self._pending:
            self.num_messages += 1
        found = self._take_until(b"\r\n\r\n", data, position)
        if found is None:
            return len(data)
        head, position = found
        length = self._read_head(head)
        if length == _CHUNKED:
            self._step = self._scan_chunk_size
        elif length == _UNTIL_CLOSE:
            self._step = self._scan_rest
        elif length > 0:
            self.skippable_bytes = length
            self._step = self._scan_body
        return position

    def _scan_body(self, data: bytes, position: int) -> int:
        num_bytes = min(len(data) - position, self.skippable_bytes)
        self.skip(num_bytes)
        return position + num_bytes

    def _scan_rest(self, data: bytes, position: int) -> int:
        self.body_bytes += len(data) - position
        return len(data)

    def _scan_chunk_size(self, data: bytes, position: int) -> int:
        found = self._take_until(b"\r\n", data, position)
        if found is None:
            return len(data)
        line, position = found
        size = int(line.split(b";")[0], 16)
        self._chunk_left = size + 2
        self.body_bytes += size
        self._step = self._scan_chunk if size else self._scan_trailer
        return position

    def _scan_chunk(self, data: bytes, position: int) -> int:
        num_bytes = min(len(data) - position, self._chunk_left)
        self._chunk_left -= num_bytes
        if not self._chunk_left:
            self._step = self._scan_chunk_size
        return position + num_bytes

    def _scan_trailer(self, data: bytes, position: int) -> int:
        found = self._take_until(b"\r\n", data, position)
        if found is None:
            return len(data)
        line, position = found
        if not line:
            self._step = self._scan_head
        return position

    def _take_until(self, mark: bytes, data: bytes, position: int) -> tuple[bytes, int] | None:
        """Return what precedes `mark`, carried-over bytes included, and the position behind it."""
        carried = self._pending
        # The mark may straddle the carried-over bytes and the new ones.
        overlap = max(0, len(carried) - len(mark) + 1)
        end = (carried[overlap:] + data[position:]).find(mark)
        if end < 0:
            self._pending = carried + data[position:]
            if len(self._pending) > _MAX_HEAD_BYTES:
                raise ValueError("no end of head in sight: this is not HTTP/1.1")
            return None
        self._pending = b""
        end += overlap
        return (carried + data[position:])[:end], position + end + len(mark) - len(carried)


class Exchange:
    """The two directions of one connection: answers are read in the light of their requests.

    Args:
        count: called with the verb of each request.
        interim: called on each 1xx answer, after which the client sends what it held back.
    """

    def __init__(self, count: Callable[[str], None], interim: Callable[[], None]) -> None:
        self._count = count
        self._interim = interim
        self._methods: deque[bytes] = deque()
        self.requests = MessageScanner(self._read_request)
        self.answers = MessageScanner(self._read_answer)

    def _read_request(self, head: bytes) -> int:
        line, headers = _split_head(head)
        method, target = line.split(b" ")[:2]
        self._methods.append(method)
        copies = b"x-amz-copy-source" in headers
        self._count(classify(method.decode("latin-1"), target.decode("latin-1"), copies))
        return _body_length(headers, otherwise=0)

    def _read_answer(self, head: bytes) -> int:
        line, headers = _split_head(head)
        status = int(line.split(b" ")[1])
        if 100 <= status < 200:
            self._interim()
            return 0
        method = self._methods.popleft() if self._methods else b""
        if method == b"HEAD" or status in (204, 304):
            return 0
        return _body_length(headers, otherwise=_UNTIL_CLOSE)


def classify(method: str, target: str, copies: bool) -> str:
    """Name an S3 request: its method, except that listings and server-side copies have names of their own.

    >>> classify("GET", "/bucket?list-type=2&prefix=a", copies=False)
    'LIST'
    >>> classify("GET", "/bucket/key", copies=False)
    'GET'
    """
    if method == "PUT" and copies:
        return "COPY"
    if method == "GET":
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        names_bucket_only = "/" not in parts.path.strip("/")
        if "list-type" in query or "uploads" in query or (names_bucket_only and "prefix" in query):
            return "LIST"
    return method if method in VERBS else "OTHER"


def _split_head(head: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    first, *lines = head.lstrip(b"\r\n").split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _body_length(headers: dict[bytes, bytes], otherwise: int) -> int:
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        return _CHUNKED
    length = headers.get(b"content-length")
    return otherwise if length is None else int(length)
