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
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch.distributed as dist

from dcp_fsspec.checkpointer import wire
from dcp_fsspec.checkpointer.background import Deadline, Staging, before_threads_end, report_at_exit
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import WriteOptions
from dcp_fsspec.checkpointer.snapshot import Snapshot
from dcp_fsspec.errors import AsyncSaveError, ConfigurationError

logger = logging.getLogger(__name__)

_START_SECONDS = 180.0
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_MESSAGE_SECONDS = 60
READY, STARTING = "ready", "starting"
_COMMAND = "import sys; sys.path[:] = {path!r}; from dcp_fsspec.checkpointer.worker import main; main({fd})"


class UploadProcess:
    """One upload process.

    Args:
        setup: Its first message.
        listening: On rank 0: the socket on which the processes find each other.

    Raises:
        AsyncSaveError: it cannot be started.
    """

    def __init__(self, setup: wire.Setup, listening: socket.socket | None) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            # A process that was stopped must not stop the trainer in the middle of a message.
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _MESSAGE_SECONDS, 0))
        self._connection = Connection(ours.detach())
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
        try:
            self.send(setup, listening.fileno() if listening is not None else None)
        except OSError as error:
            raise AsyncSaveError(f"the upload process {self.died()} while it started") from error

    def send(self, message: wire.Message, fd: int | None = None) -> None:
        """Send a message, and a file descriptor after it.

        Raises:
            OSError: it is gone, or does not take it.
        """
        with self._whole():
            wire.send(self._connection, message)
            if fd is not None:
                send_handle(self._connection, fd, self.process.pid)

    def receive(self, timeout_seconds: float) -> Any:
        """Return the next message, None if there is none within the time.

        Raises:
            EOFError, OSError: it is gone.
        """
        with self._whole():
            return wire.receive(self._connection) if self._connection.poll(max(0.0, timeout_seconds)) else None

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End the process if, say, Ctrl-C may have come in the middle of a message."""
        try:
            yield
        except (EOFError, OSError):
            raise
        except BaseException:
            self.kill()
            raise

    def await_ready(self, timeout_seconds: float) -> str:
        """Wait a while until it can take work, and return `READY` or `STARTING`, or else why it cannot, in words."""
        if self.process.poll() is not None or self._connection.closed:
            return self.died()
        if self._ready:
            return READY
        try:
            message = self.receive(timeout_seconds)
        except (EOFError, OSError):
            return f"{self.died()} while it started"
        if isinstance(message, wire.Unable):
            self.kill()
            return f"could not start: {message.why}"
        self._ready = message is not None
        if not self._ready and time.monotonic() > self._ready_by:
            self.kill()
            return f"{self.process.pid} was not ready within {_START_SECONDS:.0f} s"
        return READY if self._ready else STARTING

    def died(self) -> str:
        """Return how it ended, in words. If it has not ended, it is ended now."""
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.process.pid} did not answer any more"
        code = self.process.returncode
        name = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{self.process.pid} {name}"

    def kill(self) -> None:
        """End it now."""
        self._connection.close()
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let it end by itself, which it does soon when nothing is in hand; kill it after a while."""
        if self._ready:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_SECONDS)
        self.kill()


class ProcessUploader:
    """Uploads in a process beside each rank's trainer.

    Args:
        catalog: Where to.
        group: The ranks.
        options: For the writer.
        timeout_seconds: An upload that takes longer is given up.

    Raises:
        ConfigurationError: the store, or a filesystem given for it, cannot be used from another process.
        AsyncSaveError: a process cannot be started.
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
        self._staging = Staging(shared=True, hand_over=self._send, url=catalog.url, options=options)
        self._process: UploadProcess | None = None
        self._sent_generation = 0
        self._deadline: Deadline | None = None
        self._in_hand: Deadline | None = None
        self._committing = False
        self._outcome: Outcome | None = None
        self._launch()
        before_threads_end(self._at_exit)

    def _launch(self) -> None:
        """Start the processes of all ranks, which find each other by a socket of rank 0. Collective."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._sent_generation = 0
        with contextlib.ExitStack() as stack:
            sockets: list[socket.socket] = []

            def reserve() -> int:
                sockets.append(stack.enter_context(_listen()))
                return int(sockets[0].getsockname()[1])

            port = self._group.decide(reserve)
            hosts = self._group.gather(_host())
            setup = wire.Setup(
                self._catalog.store,
                self._options,
                self._group.rank,
                self._group.size,
                "127.0.0.1" if len(set(hosts)) == 1 else hosts[0],
                port,
                bool(sockets),
                self._timeout_seconds,
                os.getpid(),
            )

            def launch() -> None:
                self._process = UploadProcess(setup, sockets[0] if sockets else None)

            self._group.agree(launch, "starting the upload processes")

    def start(self) -> None:
        """See that the process of every rank is ready; start all anew if one is not. Collective.

        Raises:
            AsyncSaveError: they cannot be started.
        """
        failures = self._await_ready()
        if not failures:
            return
        logger.warning("the upload processes are started anew: %s", failures)
        self._launch()
        failures = self._await_ready()
        if failures:
            raise AsyncSaveError(f"the upload processes cannot be started: {failures}")

    def _await_ready(self) -> str:
        """Wait until all are ready, and return what became of those that never will be. Collective."""
        while True:
            mine = self._process.await_ready(_LOOK_SECONDS) if self._process is not None else "was ended"
            states = self._group.gather(mine)
            failed = [(rank, one) for rank, one in enumerate(states) if one not in (READY, STARTING)]
            if failed or STARTING not in states:
                return "; ".join(f"that of rank {rank} {one}" for rank, one in failed)

    def stage(self, snapshot: Snapshot) -> None:
        """Copy `snapshot` to memory that the process shares."""
        self._staging.stage(snapshot)
        self._deadline = Deadline(snapshot.iteration, self._timeout_seconds)

    def submit(self, *, wait_for_staging: bool) -> None:
        """Hand it to the process."""
        self._in_hand, self._committing, self._outcome = self._deadline, False, None
        self._staging.submit(wait=wait_for_staging)

    def finish_staging(self) -> None:
        """Wait until the job's tensors may be changed again."""
        self._staging.finish()

    def _send(self, snapshot: Snapshot) -> None:
        assert self._process is not None
        arena = self._staging.stager.arena
        try:
            if arena.fd is not None and self._sent_generation != arena.generation:
                self._process.send(wire.NewArena(arena.num_bytes), arena.fd)
                self._sent_generation = arena.generation
            self._process.send(wire.Request(snapshot.iteration, wire.encode(snapshot, arena)))
        except OSError:
            self._lose()

    def _lose(self, error: AsyncSaveError | None = None) -> None:
        """Note that the process is gone, and with it the upload in hand."""
        assert self._process is not None
        assert self._in_hand is not None
        if error is None:
            how = self._process.died()
            error = AsyncSaveError(f"the upload of iteration {self._in_hand.iteration} was lost: its process {how}")
        self._outcome = self._in_hand.failed(error, may_be_committed=self._committing)
        self._process.kill()
        self._process = None

    def is_busy(self) -> bool:
        """Tell whether an upload is under way."""
        self._staging.advance()
        return self._staging.is_pending or not (self._in_hand is None or self._is_known(0.0))

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of the upload, once."""
        self._staging.finish()
        if self._in_hand is None or not self._is_known(timeout_seconds):
            return None
        outcome, self._outcome, self._in_hand = self._outcome, None, None
        return outcome

    def _is_known(self, timeout_seconds: float | None) -> bool:
        """Take the outcome from the process, or find out that there will be none. Returns whether it is known now."""
        assert self._in_hand is not None
        patience = self._in_hand.left_seconds if timeout_seconds is None else timeout_seconds
        until = time.monotonic() + min(patience, self._in_hand.left_seconds)
        while self._outcome is None:
            assert self._process is not None
            try:
                message = self._process.receive(until - time.monotonic())
            except (EOFError, OSError):
                self._lose()
                continue
            if isinstance(message, wire.Committing):
                self._committing = True
            elif isinstance(message, wire.Ended):
                self._outcome = message.outcome
                if not message.goes_on:
                    self._process.kill()
                    self._process = None
            elif self._in_hand.left_seconds <= 0:
                self._lose(self._in_hand.late())
            else:
                return False
        return True

    def close(self) -> None:
        """End the process and give the memory back."""
        if self._process is not None:
            self._process.end()
            self._process = None
        self._staging.stager.close()

    def _at_exit(self) -> None:
        report_at_exit(self.wait, self._in_hand.iteration if self._in_hand is not None else None)
        self.close()


def _host() -> str:
    """Return the name by which the others can reach this machine."""
    # What the launcher of the job says is known to work, but only about the machine of the job's first rank.
    is_first = dist.is_available() and dist.is_initialized() and dist.get_rank() == 0
    return (is_first and os.environ.get("MASTER_ADDR")) or socket.gethostname()


def _listen() -> socket.socket:
    """Take a port that nobody else can take before the processes use it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=4096)
