"""Answers to signed requests as bad servers give them: what is taken, what is not, and what becomes of the socket."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dcp_fsspec.storage import direct
from dcp_fsspec.storage.retry import passes
from dcp_fsspec.storage.signing import Signed, _seconds, signer_of
from dcp_fsspec.testing.certificates import write_certificate

BODY = bytes(range(200))


def _answer(body: bytes, content_range: str, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: {content_range}\r\nContent-Length: {length}\r\n\r\n".encode()
        + body
    )


RIGHT = _answer(BODY[:100], "bytes 0-99/200")


class _Server(threading.Thread):
    """Gives to each connection its answers, one after the other, whatever is asked."""

    def __init__(self, connections: Sequence[Sequence[bytes]], waits: bool) -> None:
        super().__init__(daemon=True)
        self._connections = connections
        self._waits = waits
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/b/k"
        self.num_accepted = 0

    def run(self) -> None:
        for answers in self._connections:
            with contextlib.suppress(OSError):
                connection, _ = self._listening.accept()
                self.num_accepted += 1
                with connection:
                    for answer in answers:
                        if self._waits:
                            self._await_request(connection)
                        connection.sendall(answer)

    @staticmethod
    def _await_request(connection: socket.socket) -> None:
        seen = b""
        while b"\r\n\r\n" not in seen:
            chunk = connection.recv(4096)
            if not chunk:
                raise ConnectionError
            seen += chunk

    def close(self) -> None:
        self._listening.close()


@contextlib.contextmanager
def _serving(*connections: Sequence[bytes], waits: bool = True) -> Iterator[_Server]:
    server = _Server(connections, waits)
    server.start()
    try:
        yield server
    finally:
        direct._idle.close()
        server.close()
        server.join(10)


def _get(url: str, num_bytes: int = 100) -> tuple[int, bytes]:
    memory = bytearray(num_bytes)
    return direct.get_into(Signed(url, read_seconds=10.0), 0, [memoryview(memory)]), bytes(memory)


@pytest.mark.parametrize(
    "content_range", ["bytes 1-100/200", "bytes 0-100/200", "bytes 100-199/200", "", "bytes */200", "rows 0-99/200"]
)
def test_another_range_than_was_asked_for_is_refused(content_range: str) -> None:
    with _serving([_answer(BODY[:100], content_range)]) as server, pytest.raises(direct.RefusedError):
        _get(server.url)


def test_range_that_ends_with_the_object_is_taken() -> None:
    with _serving([_answer(BODY[:50], "bytes 0-49/50")]) as server:
        assert _get(server.url) == (50, BODY[:50] + bytes(50))


def test_connection_that_gave_too_few_bytes_is_not_used_again() -> None:
    with _serving([_answer(BODY[:50], "bytes 0-99/200", 100)], [RIGHT]) as server:
        assert _get(server.url)[0] == 50
        assert not direct._idle._kept
        assert _get(server.url) == (100, BODY[:100])


def test_words_that_nobody_asked_for_are_not_taken_for_an_answer() -> None:
    stray = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
    with _serving([RIGHT + stray], [RIGHT]) as server:
        assert _get(server.url) == (100, BODY[:100])
        assert _get(server.url) == (100, BODY[:100])
        assert server.num_accepted == 2


def test_bytes_beyond_what_was_asked_for_do_not_reach_the_next_request() -> None:
    with _serving([_answer(BODY, "bytes 0-99/200")], [RIGHT]) as server:
        assert _get(server.url) == (100, BODY[:100])
        assert _get(server.url) == (100, BODY[:100])
        assert server.num_accepted == 2


def test_connection_serves_one_request_after_the_other_with_the_patience_of_each() -> None:
    with _serving([RIGHT, RIGHT]) as server:
        assert _get(server.url) == _get(server.url) == (100, BODY[:100])
        assert server.num_accepted == 1
        assert direct._idle._kept[0][2].sock.gettimeout() == 10.0


def test_interrupt_in_the_middle_leaves_no_connection_to_use_again() -> None:
    def interrupted(url: str) -> None:
        with direct._asked("GET", Signed(url), {}, ()) as answer:
            direct._fill(answer, memoryview(bytearray(10)))
            raise KeyboardInterrupt

    with _serving([RIGHT], [RIGHT]) as server:
        with pytest.raises(KeyboardInterrupt):
            interrupted(server.url)
        assert not direct._idle._kept
        assert _get(server.url) == (100, BODY[:100])


def test_failure_of_tls_passes_as_other_failures_of_connections_do() -> None:
    with _serving([b"this is no TLS"], waits=False) as server, pytest.raises(OSError) as caught:
        direct.put(Signed(server.url.replace("http:", "https:")), [b"data"])
    assert isinstance(caught.value.__cause__, ssl.SSLError)
    assert passes(caught.value)


def test_certificates_that_cannot_be_read_are_no_missing_checkpoint() -> None:
    with pytest.raises(direct.RefusedError, match="certificates"):
        direct.put(Signed("https://127.0.0.1:9/b/k", verify="/no/such/bundle.pem"), [b"data"])


@pytest.mark.parametrize(
    "config", [{"client_cert": "/my/own.pem"}, {"connector_args": {"limit": 3}}, {"proxies": {}}, {"of_tomorrow": 1}]
)
def test_settings_that_a_signed_url_knows_nothing_of_are_left_to_the_filesystem(config: dict[str, object]) -> None:
    import s3fs

    assert signer_of(s3fs.S3FileSystem(key="k", secret="s", config_kwargs={"read_timeout": 3})) is not None
    assert signer_of(s3fs.S3FileSystem(key="k", secret="s", config_kwargs=config)) is None


@pytest.mark.parametrize("name", ["AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SKIP_SIGNATURE"])
def test_what_the_environment_tells_obstore_is_left_to_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.fsspec import FsspecStore

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert signer_of(FsspecStore("s3")) is not None
    monkeypatch.setenv(name, "true")
    assert signer_of(FsspecStore("s3")) is None


@pytest.mark.parametrize(
    ("told", "seconds"),
    [("50s", 50.0), ("1m 30s", 90.0), ("1s 500ms", 1.5), ("1h", 3600.0), ("1day", None), ("", None)],
)
def test_patience_of_obstore_is_kept(told: str, seconds: float | None) -> None:
    assert _seconds(told) == seconds


def test_connections_are_closed_when_the_interpreter_ends() -> None:
    with _serving([RIGHT]) as server:
        script = (
            "import sys; from dcp_fsspec.storage import direct; from dcp_fsspec.storage.signing import Signed\n"
            "assert direct.get_into(Signed(sys.argv[1]), 0, [memoryview(bytearray(100))]) == 100\n"
            "assert direct._idle._kept"
        )
        command = [sys.executable, "-X", "dev", "-W", "always", "-c", script, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: unclosed <socket" not in done.stderr


class _NarrowServer(_Server):
    """Takes a body at a trickle, and answers when it has all of it; or ends it in the middle in the way given."""

    def __init__(self, num_bytes: int, ends: str, certificate: tuple[Path, Path] | None) -> None:
        super().__init__([[b""]], waits=True)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self._num_bytes = num_bytes
        self._ends = ends
        self._let_go = threading.Event()
        self._trust = None
        if certificate is not None:
            self.url = self.url.replace("http:", "https:")
            self._trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._trust.load_cert_chain(*certificate)

    def run(self) -> None:
        connection, _ = self._listening.accept()
        if self._trust is not None:
            # Its session tickets reach the client before any answer.
            connection = self._trust.wrap_socket(connection, server_side=True)
        with connection:
            left = self._num_bytes
            while left > 0 and not (self._ends and left < self._num_bytes // 2):
                chunk = connection.recv(16 << 10)
                if not chunk:
                    return
                left -= len(chunk)
                self._let_go.wait(0.02)
            if self._ends != "stops":
                status = b"403 Forbidden" if self._ends else b"200 OK"
                connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
            if self._ends in ("stops", "refuses and waits"):
                self._let_go.wait(60)

    def close(self) -> None:
        self._let_go.set()
        super().close()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("ends", ["", "stops", "refuses", "refuses and waits"])
def test_time_to_answer_begins_when_the_last_byte_has_left(ends: str, scheme: str, tmp_path: Path) -> None:
    """The kernel takes far more at once than a narrow line carries within that time."""
    body = bytes(1 << 20)
    certificate = write_certificate(tmp_path) if scheme == "https" else None
    server = _NarrowServer(len(body), ends, certificate)
    server.start()
    right = {"stops": pytest.raises(TimeoutError), "": contextlib.nullcontext()}
    with contextlib.closing(server):
        # Only a store that says nothing is waited for until then.
        seconds = 0.5 if ends in ("", "stops") else 5.0
        signed = Signed(server.url, read_seconds=seconds, verify=str(certificate[0]) if certificate else None)
        began = time.monotonic()
        with right.get(ends, pytest.raises(direct.RefusedError, match="403")):
            direct.put(signed, [body])
        assert ends != "refuses" or time.monotonic() - began < 5.0, "its end was not noticed"
    direct._idle.close()
    server.join(10)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_connection_that_breaks_ends_a_wait_without_a_limit(scheme: str, tmp_path: Path) -> None:
    body = bytes(1 << 20)
    certificate = write_certificate(tmp_path) if scheme == "https" else None
    server = _NarrowServer(len(body), "stops", certificate)
    server.start()
    with contextlib.closing(server):
        threading.Timer(1.0, server.close).start()
        signed = Signed(server.url, read_seconds=None, verify=str(certificate[0]) if certificate else None)
        with pytest.raises(OSError, match=r"(?i)connection") as caught:
            direct.put(signed, [body])
    assert passes(caught.value)
    server.join(10)
