"""Signed requests, sent and answered over plain sockets: bytes leave memory and reach it without a copy between.

A thread waits for its own socket, so that threads do not wait for each other as they do for one event loop, and what a
client does for a request is done once for a file. Connections are kept and used again by the whole process.
"""

import atexit
import contextlib
import errno
import fcntl
import functools
import http.client
import os
import re
import select
import socket
import ssl
import sys
import termios
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from dcp_fsspec.storage.retry import PASSING_STATUS
from dcp_fsspec.storage.signing import Signed

Buffer = bytes | bytearray | memoryview
_Origin = tuple[str, str, str | bool | None]

_SMALL_BYTES = 64 << 10
"""Smaller buffers are joined, up to four times as much: each call has a price."""
_LOOK_SECONDS = 0.25
_HANGS_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_MAX_IDLE = 64
_MAX_IDLE_SECONDS = 20.0
_MAX_ANSWER_BYTES = 64 << 10
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")


class RefusedError(Exception):
    """The store did not do what was asked, or cannot be asked in this way.

    Attributes:
        status: Of its answer; 0 if there is none.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the store answered {status} {reason}" if status else reason)
        self.status = status


class UnavailableError(OSError):
    """The store cannot do now what was asked.

    Attributes:
        status: Of its answer.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(errno.EBUSY, f"the store answered {status} {reason}")
        self.status = status


def get_into(signed: Signed, start: int, views: Sequence[memoryview]) -> int:
    """Fill `views` with what lies from byte `start` on; return how many bytes there were, at most what fits.

    Raises:
        RefusedError: the answer is not that range.
        OSError: the connection failed.
    """
    stop = start + sum(map(len, views))
    with _asked("GET", signed, {"Range": f"bytes={start}-{stop - 1}"}, ()) as answer:
        if answer.status != 206 or not is_range(answer.headers.get("Content-Range"), start, stop):
            raise RefusedError(answer.status, answer.reason)
        return sum(_fill(answer, view) for view in views)


def put(signed: Signed, buffers: Sequence[Buffer]) -> None:
    """Make an object of `buffers`.

    Raises:
        RefusedError: the store does not take it.
        OSError: the connection failed.
    """
    length = {"Content-Length": str(sum(map(len, buffers)))}
    with _asked("PUT", signed, length, buffers) as answer:
        answer.read(_MAX_ANSWER_BYTES)
        if answer.status != 200:
            raise RefusedError(answer.status, answer.reason)


def is_range(content_range: str | None, start: int, stop: int) -> bool:
    """Tell whether an answer of this ``Content-Range`` holds what was asked for, as far as there is so much."""
    found = _CONTENT_RANGE.match(content_range or "")
    return found is not None and int(found[1]) == start and int(found[2]) < stop


def _fill(answer: http.client.HTTPResponse, view: memoryview) -> int:
    filled = 0
    while filled < len(view) and (count := answer.readinto(view[filled:])):
        filled += count
    return filled


@contextlib.contextmanager
def _asked(
    method: str, signed: Signed, headers: Mapping[str, str], body: Sequence[Buffer]
) -> Iterator[http.client.HTTPResponse]:
    """Give the answer to a request; the connection is kept when it was read to its end."""
    parts = urllib.parse.urlsplit(signed.url)
    origin = (parts.scheme, parts.netloc, signed.verify)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    reused = _idle.take(origin)
    connection = reused or _made(origin)
    answer = None
    try:
        try:
            answer = _ask(connection, method, target, signed, headers, body)
        except _CLOSED:
            if reused is None:
                raise
            # The store has closed what lay idle. Nothing of an answer had come, so this one is the same request.
            connection.close()
            answer = _ask(connection, method, target, signed, headers, body)
        if answer.status in PASSING_STATUS:
            raise UnavailableError(answer.status, answer.reason)
        yield answer
    except BaseException as error:
        _drop(connection, answer)
        if _is_of_transport(error):
            raise ConnectionError(f"the connection failed: {type(error).__name__}: {error}") from error
        raise
    if answer.isclosed() and not answer.length and connection.sock is not None:
        _idle.keep(origin, connection)
    else:
        _drop(connection, answer)


def _drop(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse | None) -> None:
    connection.close()
    if answer is not None:
        answer.close()  # A socket lives as long as one of the two.


def _is_of_transport(error: BaseException) -> bool:
    """Tell whether `error` is about names, routes, TLS or HTTP, all of which may be well a moment later.

    Their errors have numbers of their own, which mean something else where files are concerned.
    """
    known = (ConnectionError, TimeoutError, UnavailableError, ssl.SSLCertVerificationError)
    return isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, known)


def _made(origin: _Origin) -> http.client.HTTPConnection:
    scheme, netloc, verify = origin
    if scheme == "https":
        return http.client.HTTPSConnection(netloc, context=_trust(verify))
    return http.client.HTTPConnection(netloc)


@functools.cache
def _trust(verify: str | bool | None) -> ssl.SSLContext:
    folder = isinstance(verify, str) and os.path.isdir(verify)
    cafile = verify if isinstance(verify, str) and not folder else None
    try:
        context = ssl.create_default_context(cafile=cafile, capath=str(verify) if folder else None)
    except OSError as error:
        raise RefusedError(0, f"the certificates to trust cannot be read: {error}") from error
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    signed: Signed,
    headers: Mapping[str, str],
    body: Sequence[Buffer],
) -> http.client.HTTPResponse:
    if connection.sock is None:
        connection.timeout = signed.connect_seconds
        connection.connect()
    connection.sock.settimeout(signed.read_seconds)
    connection.putrequest(method, target, skip_accept_encoding=True)
    for name, value in {**signed.headers, **headers}.items():
        connection.putheader(name, value)
    try:
        connection.endheaders()
        for piece in _pieces(body):
            rest = memoryview(piece)
            while rest:
                rest = rest[connection.sock.send(rest) :]
        _await_sent(connection.sock, signed.read_seconds)
    except _CLOSED:
        # A store that refuses need not read to the end before it answers.
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = connection.getresponse()
            if answer.status >= 300:
                return answer
        raise
    return connection.getresponse()


def _await_sent(sock: socket.socket, patience_seconds: float | None) -> None:
    """Wait until what was sent has left this machine; only then does the store's time to answer begin.

    The kernel takes megabytes at once. With many connections on a narrow line these are under way for long.

    Raises:
        TimeoutError: nothing has left for `patience_seconds`.
    """
    left, since = _unsent_bytes(sock), time.monotonic()
    if not left:
        return
    # What comes over TLS need not be an answer: session tickets come as well, at any time.
    ends = _HANGS_UP if isinstance(sock, ssl.SSLSocket) else _HANGS_UP | select.EPOLLIN
    heard = 0
    with select.epoll() as poll:
        poll.register(sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        while left and not heard & ends:
            for _, event in poll.poll(_LOOK_SECONDS):
                heard |= event
            now = _unsent_bytes(sock)
            if now < left:
                left, since = now, time.monotonic()
            elif patience_seconds is not None and time.monotonic() - since > patience_seconds:
                if heard:
                    return  # Perhaps an answer after all.
                raise TimeoutError(f"the store has taken nothing for {patience_seconds:.0f} s")


def _unsent_bytes(sock: socket.socket) -> int:
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def _pieces(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield large buffers as they are, and small ones joined."""
    small = bytearray()
    for buffer in buffers:
        large = len(buffer) >= _SMALL_BYTES
        if not large:
            small += buffer
        if small and (large or len(small) >= 4 * _SMALL_BYTES):
            yield small
            small = bytearray()
        if large:
            yield memoryview(buffer).cast("B")
    if small:
        yield small


class _Idle:
    """Connections that nobody uses at the moment, newest last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[float, _Origin, http.client.HTTPConnection]] = []

    def take(self, origin: _Origin) -> http.client.HTTPConnection | None:
        """Return one to `origin`, or None."""
        found = self._newest(origin)
        while found is not None and not _is_quiet(found.sock):
            found.close()
            found = self._newest(origin)
        return found

    def _newest(self, origin: _Origin) -> http.client.HTTPConnection | None:
        with self._lock:
            old = time.monotonic() - _MAX_IDLE_SECONDS
            stale = [one for one in self._kept if one[0] < old]
            self._kept = self._kept[len(stale) :]
            place = next((n for n in reversed(range(len(self._kept))) if self._kept[n][1] == origin), None)
            found = None if place is None else self._kept.pop(place)[2]
        for _, _, connection in stale:
            connection.close()
        return found

    def keep(self, origin: _Origin, connection: http.client.HTTPConnection) -> None:
        """Take one that nobody uses any more."""
        with self._lock:
            self._kept.append((time.monotonic(), origin, connection))
            surplus = [self._kept.pop(0)[2] for _ in range(len(self._kept) - _MAX_IDLE)]
        for one in surplus:
            one.close()

    def close(self) -> None:
        """Close all. In a forked child, that leaves those of its parent open, whose they are."""
        self._lock = threading.Lock()
        kept, self._kept = self._kept, []
        for _, _, connection in kept:
            connection.close()


def _is_quiet(sock: socket.socket) -> bool:
    """Tell whether nothing has come that nobody has asked for: the end, or words that would be taken for an answer."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


_idle = _Idle()
os.register_at_fork(after_in_child=_idle.close)
atexit.register(_idle.close)
