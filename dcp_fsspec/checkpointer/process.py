"""The trainer's side of the upload process: start it, hand snapshots over, notice when it dies.

The process is started before the first save and kept. It is a plain child that runs `worker`, not a copy of the
user's program: nothing of the program is imported, so it needs no ``if __name__ == "__main__"``.
"""

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from dcp_fsspec.checkpointer import wire
from dcp_fsspec.checkpointer.background import Staging, before_threads_end, late, report_at_exit
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import WriteOptions
from dcp_fsspec.checkpointer.snapshot import Snapshot
from dcp_fsspec.errors import AsyncSaveError, ConfigurationError

logger = logging.getLogger(__name__)

_START_SECONDS = 180.0
_END_SECONDS = 10.0
_COMMAND = "import sys; sys.path[:] = {path!r}; from dcp_fsspec.checkpointer.worker import main; main({fd})"


class UploadProcess:
    """One upload process.

    Args:
        setup: Its first message.
        listening: On rank 0: the socket on which the processes find each other.
    """

    def __init__(self, setup: wire.Setup, listening: socket.socket | None) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # No CUDA context: it only moves host memory.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND.format(path=sys.path, fd=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C, and the end of the trainer's group, must not stop an upload.
            )
        self._ready = False
        self._ready_by = time.monotonic() + _START_SECONDS
        wire.send(self.connection, setup)
        if listening is not None:
            send_handle(self.connection, listening.fileno(), self.process.pid)

    def is_alive(self) -> bool:
        """Tell whether it runs."""
        return self.process.poll() is None

    def await_ready(self) -> None:
        """Wait until it can take work.

        Raises:
            AsyncSaveError: it died, or did not start in time.
        """
        if self._ready:
            return
        try:
            if self.connection.poll(max(0.0, self._ready_by - time.monotonic())):
                wire.receive(self.connection)
                self._ready = True
                return
        except (EOFError, OSError) as error:
            raise AsyncSaveError(f"the upload process {self.died()} while it started") from error
        self.kill()
        raise AsyncSaveError(f"the upload process was not ready within {_START_SECONDS:.0f} s")

    def died(self) -> str:
        """Return how it ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        code = self.process.returncode
        if code is None:
            return f"{self.process.pid} closed its connection"
        name = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{self.process.pid} {name}"

    def kill(self) -> None:
        """End it now."""
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let it end by itself, which it does when nothing is in hand; kill it after a while."""
        self.connection.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ProcessUploader:
    """Uploads in a process beside each rank's trainer.

    Args:
        catalog: Where to.
        group: The ranks.
        options: For the writer.
        timeout_seconds: An upload that takes longer is given up.

    Raises:
        ConfigurationError: the store, or a filesystem given for it, cannot be used from another process.
    """

    def __init__(self, catalog: Catalog, group: Group, options: WriteOptions, timeout_seconds: float) -> None:
        if catalog.store.capabilities.of_process:
            raise ConfigurationError(
                f"{catalog.url} lives in the memory of one process, so another process cannot save to it; use the "
                "async_mode 'async'"
            )
        try:
            pickle.dumps((catalog.store, options))
        except Exception as error:
            raise ConfigurationError(
                f"the filesystem or an option for {catalog.url} cannot be handed to another process ({error}); use the "
                "async_mode 'async', or pass storage_options instead of a filesystem"
            ) from error
        self._catalog, self._group, self._options = catalog, group, options
        self._timeout_seconds = timeout_seconds
        self._staging = Staging(shared=True, hand_over=self._send)
        self._process: UploadProcess | None = None
        self._outcome: Outcome | None = None
        self._iteration: int | None = None
        self._began = 0.0
        self._launch()
        before_threads_end(self._at_exit)

    def _launch(self) -> None:
        """Start the processes of all ranks, which find each other by a socket of rank 0. Collective."""
        listening = _listen() if self._group.is_coordinator else None
        with listening or contextlib.nullcontext():
            hosts = self._group.gather(socket.gethostname())
            port = self._group.decide(lambda: listening.getsockname()[1] if listening else 0)
            host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
            setup = wire.Setup(
                self._catalog.store,
                self._options,
                self._group.rank,
                self._group.size,
                host,
                port,
                listening is not None,
                self._timeout_seconds,
            )
            self._sent_generation = 0
            self._process = UploadProcess(setup, listening)

    def start(self) -> None:
        """See that the process of every rank is ready; start all anew if one is not. Collective.

        Raises:
            AsyncSaveError: they cannot be started.
        """
        dead = self._process is None or not self._process.is_alive()
        if any(self._group.gather(dead)):
            logger.warning("the upload processes are started anew")
            if self._process is not None:
                self._process.kill()
            self._launch()
        assert self._process is not None
        self._group.agree(self._process.await_ready, "starting the upload processes")

    def stage(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` to memory that the process shares."""
        self._staging.stage(snapshot)
        self._iteration, self._began, self._outcome = snapshot.iteration, time.monotonic(), None

    def submit(self, *, wait_for_staging: bool) -> None:
        """Hand it to the process."""
        self._staging.submit(wait=wait_for_staging)

    def finish_staging(self) -> None:
        """Wait until the job's tensors may be changed again."""
        self._staging.finish()

    def _send(self, snapshot: Snapshot) -> None:
        assert self._process is not None
        arena = self._staging.stager.arena
        try:
            if arena.fd is not None and self._sent_generation != arena.generation:
                wire.send(self._process.connection, wire.NewArena(arena.num_bytes))
                send_handle(self._process.connection, arena.fd, self._process.process.pid)
                self._sent_generation = arena.generation
            wire.send(self._process.connection, wire.Request(wire.encode(snapshot, arena)))
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """Note that the process is gone, and with it the upload in hand."""
        assert self._process is not None
        assert self._iteration is not None
        how = self._process.died()
        error = AsyncSaveError(f"the upload of iteration {self._iteration} was lost: the upload process {how}")
        self._outcome = Outcome(self._iteration, time.monotonic() - self._began, error=error)
        self._process.kill()
        self._process = None

    def is_busy(self) -> bool:
        """Tell whether an upload is under way."""
        self._staging.advance()
        if self._iteration is None or self._outcome is not None or self._process is None:
            return False
        return not self._process.connection.poll(0)

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of the upload, once."""
        if self._iteration is None:
            return None
        self._staging.finish()
        if self._outcome is None and not self._receive(timeout_seconds):
            return None
        outcome, self._outcome, self._iteration = self._outcome, None, None
        return outcome

    def _receive(self, timeout_seconds: float | None) -> bool:
        """Take the outcome from the process, or find out that there will be none. Returns whether it is known now."""
        assert self._process is not None
        assert self._iteration is not None
        left = self._timeout_seconds - (time.monotonic() - self._began)
        patience = left if timeout_seconds is None else min(timeout_seconds, left)
        try:
            if self._process.connection.poll(max(0.0, patience)):
                ended: wire.Ended = wire.receive(self._process.connection)
                self._outcome = ended.outcome
                if not ended.goes_on:
                    self._process.kill()
                    self._process = None
                return True
        except (EOFError, OSError):
            self._lose()
            return True
        if timeout_seconds is not None and left > timeout_seconds:
            return False
        self._process.kill()
        self._process = None
        self._outcome = Outcome(
            self._iteration, self._timeout_seconds, error=late(self._iteration, self._timeout_seconds)
        )
        return True

    def close(self) -> None:
        """End the process and give the memory back."""
        if self._process is not None:
            self._process.end()
            self._process = None
        self._staging.stager.close()

    def _at_exit(self) -> None:
        report_at_exit(self.wait(None))
        self.close()


def _listen() -> socket.socket:
    """Take a port that nobody else can take before the processes use it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=4096)
