"""An HTTP proxy in front of an S3 server that makes chosen requests fail in chosen ways.

    with FaultProxy(server.endpoint_url) as proxy:
        options = server.storage_options(endpoint_url=proxy.endpoint_url)
        lost = proxy.add(Lose(), operation="PUT", key="*/.metadata")
        ...
        assert lost.fired == 1
        assert [exchange.key for exchange in proxy.requests("PUT")] == [...]

Heads and bodies pass byte for byte, so that signatures still verify. It runs in threads of this
process; each client connection has one, each request gets its own connection to the server.
"""

from __future__ import annotations

import contextlib
import fnmatch
import random
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, Self
from urllib.parse import urlsplit

from support.faults import (
    Action,
    Call,
    Corrupt,
    Cut,
    CutUpload,
    Delay,
    Exchange,
    Lose,
    Reset,
    Rule,
    Stall,
    Status,
)
from support.httpwire import parse_request, parse_response, read_body, read_head

__all__ = [
    "Call",
    "Corrupt",
    "Cut",
    "CutUpload",
    "Delay",
    "Exchange",
    "FaultProxy",
    "Lose",
    "Reset",
    "Rule",
    "Stall",
    "Status",
]

_DRAIN_SECONDS = 30.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ERROR_XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected</Message></Error>'


class FaultProxy:
    """The proxy; see the module's docstring. Rules may be added at any time; the first that hits wins.

    Args:
        target_url: the S3 server.
    """

    def __init__(self, target_url: str) -> None:
        parts = urlsplit(target_url)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._stalls: list[Stall] = []
        self._log: list[Exchange] = []
        self._sockets: set[socket.socket] = set()
        self._left = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._server: _Listener | None = None

    @property
    def endpoint_url(self) -> str:
        """Address for clients, in place of the server's own."""
        assert self._server is not None, "not started"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def log(self) -> list[Exchange]:
        """All requests so far, in order of arrival."""
        with self._lock:
            return list(self._log)

    def requests(self, operation: str | None = None, key: str = "*") -> list[Exchange]:
        """Return the requests of one operation whose key matches a shell pattern."""
        return [
            exchange
            for exchange in self.log
            if operation in (None, exchange.operation) and fnmatch.fnmatchcase(exchange.key, key)
        ]

    def add(
        self,
        action: Action,
        *,
        operation: str | None = None,
        method: str | None = None,
        key: str = "*",
        when: Callable[[Exchange], bool] = lambda _: True,
        skip: int = 0,
        times: int | None = 1,
        probability: float = 1.0,
        seed: int = 0,
    ) -> Rule:
        """Inject `action` into requests that fit all conditions.

        Args:
            action: what to do.
            operation: as in `Exchange.operation`.
            method: HTTP method.
            key: shell pattern for the key; `*` spans slashes.
            when: any further condition.
            skip: how many fitting requests to leave alone first.
            times: how many to hit after those; None for all.
            probability: chance of each to be hit.
            seed: of the chance.
        """

        def matches(exchange: Exchange) -> bool:
            return (
                operation in (None, exchange.operation)
                and method in (None, exchange.method)
                and fnmatch.fnmatchcase(exchange.key, key)
                and when(exchange)
            )

        rule = Rule(action, matches, skip, times, probability, random.Random(seed))
        with self._lock:
            self._rules.append(rule)
            if isinstance(action, Stall):
                self._stalls.append(action)
        return rule

    def clear(self) -> None:
        """Forget all rules and the log, and let go of requests held by `Stall`."""
        with self._lock:
            stalls = list(self._stalls)
            self._rules.clear()
            self._stalls.clear()
            self._log.clear()
        for stall in stalls:
            stall.released.set()

    def drain(self) -> None:
        """Wait until all clients are gone and what they had sent, if only just, has been carried out.

        Raises:
            AssertionError: a client stays.
        """
        with self._left:
            gone = self._left.wait_for(lambda: not self._sockets, _DRAIN_SECONDS)
        assert gone, "a client is still connected"

    def start(self) -> Self:
        self._server = _Listener(("127.0.0.1", 0), self._handle)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True).start()
        return self

    def stop(self) -> None:
        """Close all connections. Requests held by `Stall` or `Delay` are let go."""
        self._stopping.set()
        with self._lock:
            stalls = list(self._stalls)
        for stall in stalls:
            stall.released.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        with self._lock:
            open_sockets = list(self._sockets)
        for open_socket in open_sockets:
            _shut(open_socket)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception_info: object) -> None:
        self.stop()

    def _handle(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._sockets.add(client)
        try:
            with client, client.makefile("rb") as stream:
                while not self._stopping.is_set() and self._serve_one(client, stream):
                    pass
        except OSError:
            pass  # the client or the server went away: nobody is left to be told
        finally:
            with self._left:
                self._sockets.discard(client)
                self._left.notify_all()

    def _serve_one(self, client: socket.socket, stream: BinaryIO) -> bool:
        """Serve one request. Returns whether the connection goes on."""
        head = read_head(stream)
        if not head:
            return False
        exchange = parse_request(head)
        if "100-continue" in exchange.headers.get("expect", "").lower():
            client.sendall(_CONTINUE)
        pieces = list(read_body(stream, exchange.headers, to_end=False))
        exchange.request_bytes = sum(len(data) for data, is_payload in pieces if is_payload)
        action = self._admit(exchange)
        request = [head, *(data for data, _ in pieces)]
        match action:
            case Status():
                return _answer_error(client, exchange, action)
            case Reset():
                return _reset(client)
            case CutUpload():
                self._send_part(request, action.after_bytes)
                return _reset(client)
            case Delay():
                self._stopping.wait(action.seconds)
            case Stall(forward_first=False):
                _hold(action)
            case Call(forward_first=False):
                action.function()
        return self._forward(client, exchange, request, action)

    def _admit(self, exchange: Exchange) -> Action | None:
        with self._lock:
            self._log.append(exchange)
            rule = next((rule for rule in self._rules if rule.take(exchange)), None)
        if rule is None:
            return None
        exchange.fault = type(rule.action).__name__
        return rule.action

    def _send_part(self, request: list[bytes], after_bytes: int | None) -> None:
        head, body = request[0], b"".join(request[1:])
        limit = len(body) // 2 if after_bytes is None else after_bytes
        with socket.create_connection(self._target) as server:
            server.sendall(head + body[:limit])
            _reset(server)

    def _forward(self, client: socket.socket, exchange: Exchange, request: list[bytes], action: Action | None) -> bool:
        with socket.create_connection(self._target) as server, server.makefile("rb") as stream:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for data in request:
                server.sendall(data)
            head = read_head(stream)
            while head.startswith(b"HTTP/1.1 100"):  # the client has its own already
                head = read_head(stream)
            if not head:
                return _reset(client)
            status, headers = parse_response(head)
            bodiless = exchange.method == "HEAD" or status in (204, 304)
            body = iter(()) if bodiless else read_body(stream, headers, to_end=True)
            if isinstance(action, Stall) and action.forward_first:
                _hold(action)
            if isinstance(action, Call) and action.forward_first:
                action.function()
            if isinstance(action, Lose):
                for _ in body:
                    pass
                return _reset(client)
            exchange.status = status
            client.sendall(head)
            return _relay(client, exchange, body, int(headers.get("content-length", 0)), action)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handle: Callable[[socket.socket], None]) -> None:
        super().__init__(address, socketserver.BaseRequestHandler)
        self._handle = handle

    def finish_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._handle(request)


def _relay(
    client: socket.socket,
    exchange: Exchange,
    body: Iterator[tuple[bytes, bool]],
    stated_bytes: int,
    action: Action | None,
) -> bool:
    """Pass an answer's body on, cut or corrupted as `action` says. Returns whether the connection goes on."""
    cut_at = flip_at = None
    if isinstance(action, Cut):
        cut_at = stated_bytes // 2 if action.after_bytes is None else action.after_bytes
    if isinstance(action, Corrupt):
        flip_at = stated_bytes // 2 if action.offset is None else action.offset
    for data, is_payload in body:
        if is_payload:
            start = exchange.response_bytes
            if flip_at is not None and start <= flip_at < start + len(data):
                data = _flip(data, flip_at - start)
            if cut_at is not None and start + len(data) >= cut_at:
                client.sendall(data[: cut_at - start])
                exchange.response_bytes = cut_at
                return False
            exchange.response_bytes += len(data)
        client.sendall(data)
    return cut_at is None


def _flip(data: bytes, position: int) -> bytes:
    flipped = bytearray(data)
    flipped[position] ^= 0xFF
    return bytes(flipped)


def _answer_error(client: socket.socket, exchange: Exchange, action: Status) -> bool:
    body = _ERROR_XML.format(code=action.code).encode()
    fields = ("Content-Type: application/xml", f"Content-Length: {len(body)}")
    head = "\r\n".join((f"HTTP/1.1 {action.status} Injected", *fields, "", ""))
    exchange.status = action.status
    client.sendall(head.encode() + (b"" if exchange.method == "HEAD" else body))
    return True


def _hold(stall: Stall) -> None:
    stall.arrived.set()
    stall.released.wait()


def _reset(connection: socket.socket) -> bool:
    """Make the coming close send RST instead of FIN. Returns False: the connection does not go on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed in the meantime
        connection.shutdown(socket.SHUT_RDWR)
