"""The upload process: takes staged snapshots from its trainer and writes them, together with those of the other ranks.

It is started by `process` with one socket. When the trainer dies, it finishes the upload in hand, and ends.
"""

import contextlib
import ctypes
import datetime
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer import wire
from dcp_fsspec.checkpointer.background import is_agreed, settle_traceback
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group, portable
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import IterationWriter
from dcp_fsspec.checkpointer.staging import Arena
from dcp_fsspec.errors import AsyncSaveError

logger = logging.getLogger(__name__)

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_BEST_EFFORT_LOWEST = (2 << 13) | 7
_LOOK_SECONDS = 1.0


def main(fd: int) -> None:
    """Serve the trainer at the other end of the socket `fd` until it goes away."""
    # Whoever ends the job ends the trainer; what is being uploaded should still be finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield_to_training()
    status = 0
    try:
        _work(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The trainer is gone; nothing is in hand.
    except BaseException:
        traceback.print_exc()
        status = 1
    # Without the clean-up of torch and of the event loops, which may wait for peers that are gone.
    logging.shutdown()
    os._exit(status)


def _work(connection: Connection) -> None:
    setup: wire.Setup = wire.receive(connection)
    trainer = _Trainer(setup.trainer_pid)
    try:
        writer = _join(setup, connection)
    except Exception:
        wire.send(connection, wire.Unable(traceback.format_exc()))
        return
    wire.send(connection, wire.Ready())
    _serve(connection, writer, setup, trainer)


class _Trainer:
    """Watches whether the trainer lives. Its end of the socket does not tell: a forked child of it may hold that too.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._patient_until = -math.inf
        threading.Thread(target=self._watch, name="dcp_fsspec_watch", daemon=True).start()

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        return os.getppid() != self._pid

    def be_patient(self, seconds: float) -> None:
        """Let this process go on for so long without its trainer."""
        self._patient_until = time.monotonic() + seconds

    def _watch(self) -> None:
        while not (self.is_gone and time.monotonic() > self._patient_until):
            time.sleep(_LOOK_SECONDS)
        os._exit(1)


def yield_to_training() -> None:
    """Lower the priority of this process for CPU and disk, and keep it to one thread of computation."""
    os.nice(_NICENESS)
    # Where Linux shares the CPU out among sessions, as it does outside of containers, niceness counts within one only,
    # and this process is a session of its own. Whether it may be set, and is not being set too often, is not certain.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
        autogroup.write(str(_NICENESS))
    number = _IOPRIO_SET.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IO_BEST_EFFORT_LOWEST)
    torch.set_num_threads(1)


def _join(setup: wire.Setup, connection: Connection) -> IterationWriter:
    """Form the group of upload processes."""
    listening = recv_handle(connection) if setup.listens else None
    if setup.world_size > 1:
        timeout = datetime.timedelta(seconds=setup.timeout_seconds)
        store = dist.TCPStore(
            setup.host,
            setup.port,
            setup.world_size,
            is_master=setup.listens,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=timeout)

    return IterationWriter(Catalog.of(setup.store), Group(), setup.options)


def _serve(connection: Connection, writer: IterationWriter, setup: wire.Setup, trainer: _Trainer) -> None:
    arena = Arena(shared=True)

    def committing() -> None:
        with contextlib.suppress(OSError):  # The trainer is gone, and nobody needs to know.
            wire.send(connection, wire.Committing())

    trainer.be_patient(math.inf)
    while True:
        while not connection.poll(_LOOK_SECONDS):
            if trainer.is_gone:
                return
        message = wire.receive(connection)
        if isinstance(message, wire.NewArena):
            arena.close()
            arena = Arena(shared=True, fd=recv_handle(connection), num_bytes=message.num_bytes)
        else:
            trainer.be_patient(setup.timeout_seconds)
            ended = _upload(writer, message, arena, setup.rank, committing)
            trainer.be_patient(math.inf)
            wire.send(connection, ended)
            if not ended.goes_on:
                return


def _upload(
    writer: IterationWriter, request: wire.Request, arena: Arena, rank: int, before_commit: Callable[[], None]
) -> wire.Ended:
    begin = time.monotonic()
    told: BaseException
    try:
        return wire.Ended(writer.write(wire.decode(request.snapshot, arena), before_commit), True)
    except (Exception, CheckpointException) as error:
        told, goes_on = error, is_agreed(error)
    except BaseException as error:
        told, goes_on = AsyncSaveError(f"{type(error).__name__}: {error}"), False
        told.__cause__ = error
    settle_traceback(told, f"in the upload process of rank {rank}")
    return wire.Ended(Outcome(request.iteration, time.monotonic() - begin, error=portable(told)), goes_on)
