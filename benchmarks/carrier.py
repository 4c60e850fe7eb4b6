"""What carries bytes for `link.py`: pacing, counting, one thread for each direction of each connection."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fcntl import fcntl

from benchmarks.httpscan import Exchange, MessageScanner

_MAX_CHUNK_BYTES = 1024 * 1024
_RECEIVE_BYTES = 256 * 1024
# Smaller ones, of a hundred slow connections, would make the link itself what limits.
_MIN_CHUNK_BYTES = 128 * 1024
# A chunk takes this long on a limited link. A chunk is passed on when its last byte would have arrived, so
# this decides how finely the bytes trickle and what the link costs, and not when a message is complete.
_CHUNK_SECONDS = 0.03
# Below this a copy through user space costs less than the two system calls of a splice.
_SPLICE_MIN_BYTES = 32 * 1024
_F_SETPIPE_SZ = 1031
# How far a sender that was woken late may catch up, so that a busy machine does not lower the rate.
_CATCH_UP_SECONDS = 0.02


@dataclass
class LinkCounters:
    """What crossed the link so far.

    Attributes:
        requests: number of requests by verb (`httpscan.VERBS`).
        up_bytes: request body bytes passed to the server.
        down_bytes: answer body bytes passed to the client.
        num_connections: connections opened.
        cpu_seconds: CPU time of the link's process.
    """

    requests: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0
    num_connections: int = 0
    cpu_seconds: float = 0.0

    def __sub__(self, earlier: LinkCounters) -> LinkCounters:
        return LinkCounters(
            self.requests - earlier.requests,
            self.up_bytes - earlier.up_bytes,
            self.down_bytes - earlier.down_bytes,
            self.num_connections - earlier.num_connections,
            self.cpu_seconds - earlier.cpu_seconds,
        )

    def to_json(self) -> str:
        """Return the counters on one line."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> LinkCounters:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "requests": Counter(values["requests"])})


class Pacer:
    """Lets bytes through at a rate; shared by the threads that share the capacity."""

    def __init__(self, rate_bytes_per_second: float | None) -> None:
        self._rate = rate_bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Return when `num_bytes` would have been carried behind all that was asked for before."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _CATCH_UP_SECONDS) + num_bytes / self._rate
            delay = self._free_at - now
        if delay > 0:
            time.sleep(delay)


class Link:
    """The link itself, in this process: `serve` runs it, one thread for each direction of each connection."""

    def __init__(
        self,
        target: str,
        latency_seconds: float = 0.0,
        rate_bytes_per_second: float | None = None,
        total_bytes_per_second: float | None = None,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.latency_seconds = latency_seconds
        self.rate_bytes_per_second = rate_bytes_per_second
        self.total_up = Pacer(total_bytes_per_second)
        self.total_down = Pacer(total_bytes_per_second)
        rates = [rate for rate in (rate_bytes_per_second, total_bytes_per_second) if rate is not None]
        chunks = [max(_MIN_CHUNK_BYTES, int(rate * _CHUNK_SECONDS)) for rate in rates]
        self.chunk_bytes = min([_MAX_CHUNK_BYTES, *chunks])
        self._lock = threading.Lock()
        self._counters = LinkCounters()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        # What is on its way waits with the sender, as on a real line, and not here.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections for ever."""
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._open, args=(client,), daemon=True).start()

    def counters(self) -> LinkCounters:
        """Return a copy of the counters."""
        times = os.times()
        with self._lock:
            self._counters.cpu_seconds = times.user + times.system
            return LinkCounters.from_json(self._counters.to_json())

    def count_request(self, verb: str) -> None:
        """Count one request."""
        with self._lock:
            self._counters.requests[verb] += 1

    def count_up(self, num_bytes: int) -> None:
        """Count body bytes on their way to the server."""
        with self._lock:
            self._counters.up_bytes += num_bytes

    def count_down(self, num_bytes: int) -> None:
        """Count body bytes on their way to the client."""
        with self._lock:
            self._counters.down_bytes += num_bytes

    def _open(self, client: socket.socket) -> None:
        time.sleep(self.latency_seconds)
        with self._lock:
            self._counters.num_connections += 1
        with contextlib.suppress(OSError), client, socket.create_connection(self._target) as server:
            _Connection(self, client, server).run()


class _Connection:
    """One client's connection and its twin to the server."""

    def __init__(self, link: Link, client: socket.socket, server: socket.socket) -> None:
        self._link = link
        self._client = client
        self._server = server
        self._resumes = threading.Event()
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._exchange = Exchange(link.count_request, self._resumes.set)

    def run(self) -> None:
        """Carry bytes both ways until both ends are done."""
        back = threading.Thread(target=self._guarded, args=(self._carry_down,), daemon=True)
        back.start()
        self._guarded(self._carry_up)
        back.join()

    def _guarded(self, carry: Callable[[], None]) -> None:
        try:
            carry()
        except (OSError, ValueError):
            for end in (self._client, self._server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _carry_up(self) -> None:
        pump = _Pump(self._client, self._server, self._exchange.requests, self._link, up=True)
        pump.run(self._resumes)

    def _carry_down(self) -> None:
        pump = _Pump(self._server, self._client, self._exchange.answers, self._link, up=False)
        pump.run(threading.Event())


class _Pump:
    """One direction: read, look, wait, pass on. Body bytes are counted before the sink gets them."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, scanner: MessageScanner, link: Link, up: bool
    ) -> None:
        self._source = source
        self._sink = sink
        self._scanner = scanner
        self._half_latency = link.latency_seconds / 2
        self._chunk_bytes = link.chunk_bytes
        self._pacers = (Pacer(link.rate_bytes_per_second), link.total_up if up else link.total_down)
        self._count = link.count_up if up else link.count_down
        self._pipe: tuple[int, int] | None = None

    def run(self, resumes: threading.Event) -> None:
        """Carry bytes until the source is at its end.

        Args:
            resumes: set when the source was told to go on, so that what it sends next is on a new way.
        """
        self._resumes = resumes
        try:
            while self._splice() if self._scanner.skippable_bytes >= _SPLICE_MIN_BYTES else self._copy():
                pass
            self._sink.shutdown(socket.SHUT_WR)
        finally:
            for end in self._pipe or ():
                os.close(end)

    def _copy(self) -> bool:
        data = self._source.recv(self._chunk_bytes)
        scanner = self._scanner
        num_messages, body_bytes = scanner.num_messages, scanner.body_bytes
        scanner.feed(data)
        self._delay(len(data), starts_message=scanner.num_messages > num_messages)
        self._count(scanner.body_bytes - body_bytes)
        self._sink.sendall(data)
        return bool(data)

    def _splice(self) -> bool:
        """Move body bytes from socket to socket inside the kernel."""
        if self._pipe is None:
            self._pipe = os.pipe()
            fcntl(self._pipe[1], _F_SETPIPE_SZ, _MAX_CHUNK_BYTES)
        num_bytes = os.splice(
            self._source.fileno(), self._pipe[1], min(self._chunk_bytes, self._scanner.skippable_bytes)
        )
        if num_bytes:
            self._scanner.skip(num_bytes)
            self._delay(num_bytes, starts_message=False)
            self._count(num_bytes)
        left = num_bytes
        while left:
            left -= os.splice(self._pipe[0], self._sink.fileno(), left)
        return bool(num_bytes)

    def _delay(self, num_bytes: int, starts_message: bool) -> None:
        if self._resumes.is_set():
            self._resumes.clear()
            starts_message = True
        if starts_message and self._half_latency:
            time.sleep(self._half_latency)
        for pacer in self._pacers:
            pacer.wait(num_bytes)
