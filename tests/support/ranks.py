"""Functions run on several ranks of a gloo process group.

Starting a process that imports torch takes seconds, so a `RankPool` keeps its processes: each `run` gets a
fresh process group on them. Where processes are to be killed again and again, `forked=True` makes new ones cheap.

    def save(rank: int, url: str) -> str: ...

    with RankPool(2) as pool:
        outcomes = pool.run(save, "s3://...")
        assert outcomes[1].error is None
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnProcess
from multiprocessing.forkserver import ensure_running
from typing import Any, Self

_START_SECONDS = 150.0
_PRELOADED = ["pytest", "s3fs", "support.checkpoints"]
_LOOPBACK_GLOO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Outcome:
    """What a rank made of its function.

    Attributes:
        value: returned; None after an error.
        error: traceback as text, or what became of the process; None after success.
        exception: what was raised, where it can be pickled.
        seconds: until it returned or raised.
    """

    value: Any = None
    error: str | None = None
    exception: BaseException | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rendezvous: str
    timeout_seconds: float


class RankPool:
    """Processes, one for each rank, that run functions together.

    Args:
        world_size: number of ranks.
        forked: fork the processes from one that has imported what they need and has done nothing else.
    """

    def __init__(self, world_size: int, *, forked: bool = False) -> None:
        self.world_size = world_size
        self._forked = forked
        self._processes: list[SpawnProcess | ForkServerProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        deadline_seconds: float = 100.0,
        collective_timeout_seconds: float = 60.0,
    ) -> list[Outcome]:
        """Call `function(rank, *arguments)` on every rank, in a process group of their own.

        Args:
            function: of a module, so that it can be pickled.
            arguments: picklable.
            deadline_seconds: when to stop waiting and kill all ranks.
            collective_timeout_seconds: of the process group.

        Returns:
            One outcome per rank. The error of a rank that died, or that still ran at the deadline, says so.
        """
        self._start()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            task = _Task(function, arguments, f"file://{folder}/rendezvous", collective_timeout_seconds)
            message = pickle.dumps((list(sys.path), pickle.dumps(task)))
            for pipe in self._pipes:
                pipe.send_bytes(message)
            outcomes = self._collect(time.monotonic() + deadline_seconds)
        if any(outcome is None or not process.is_alive() for outcome, process in self._paired(outcomes)):
            self.stop()
        return [outcome or Outcome(error="still running at the deadline, killed") for outcome in outcomes]

    def kill(self) -> None:
        """Send SIGKILL to all processes, from any thread, in the middle of a `run`."""
        for process in self._processes:
            process.kill()

    def stop(self) -> None:
        """Kill all processes. The next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.stop()

    def _start(self) -> None:
        if all(process.is_alive() for process in self._processes) and self._processes:
            return
        self.stop()
        context = _forking_context() if self._forked else multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            # Not daemonic: daemonic processes may have no children, and an upload worker is one.
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs), name=f"rank{rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(_START_SECONDS):
                self.stop()
                raise TimeoutError(f"a rank did not start within {_START_SECONDS:.0f} s")
            pipe.recv_bytes()

    def _collect(self, give_up_at: float) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * self.world_size
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting and (remaining := give_up_at - time.monotonic()) > 0:
            for pipe in wait(list(waiting), remaining):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(pipe, rank)
        return outcomes

    def _receive(self, pipe: Connection, rank: int) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._processes[rank].join()
            return Outcome(error=f"process ended with exit code {self._processes[rank].exitcode}")
        return outcome

    def _paired(self, outcomes: list[Outcome | None]) -> list[tuple[Outcome | None, SpawnProcess | ForkServerProcess]]:
        return list(zip(outcomes, self._processes, strict=True))


def _forking_context() -> ForkServerContext:
    """Return a context whose processes begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # it imports by no other path
    try:
        ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, deadline_seconds: float = 100.0
) -> list[Outcome]:
    """Do one `RankPool.run` on processes started for it."""
    with RankPool(world_size) as pool:
        return pool.run(function, *arguments, deadline_seconds=deadline_seconds)


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return what the ranks returned.

    Raises:
        AssertionError: some rank failed; shows the errors of all.
    """
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in outcomes]


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ.update(_LOOPBACK_GLOO, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    import torch

    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            # Whoever started us is gone. Not an ordinary exit: a thread of the code under test may hang.
            os._exit(0)
        path, task = pickle.loads(message)
        sys.path[:] = path
        pipe.send_bytes(_dump(_execute(rank, world_size, task)))


def _execute(rank: int, world_size: int, pickled_task: bytes) -> Outcome:
    import torch.distributed as dist

    started = time.monotonic()
    try:
        task: _Task = pickle.loads(pickled_task)
        dist.init_process_group(
            "gloo",
            init_method=task.rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=task.timeout_seconds),
        )
        dist.barrier()  # A rank that is through at once must not leave while others are still connecting.
        started = time.monotonic()
        value = task.function(rank, *task.arguments)
    except BaseException as error:  # torch's CheckpointException is no Exception
        text = "".join(traceback.format_exception(error))
        return Outcome(error=text, exception=error, seconds=time.monotonic() - started)
    else:
        return Outcome(value=value, seconds=time.monotonic() - started)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _dump(outcome: Outcome) -> bytes:
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(outcome)
        pickle.loads(pickled)
        return pickled
    error = outcome.error or f"could not be pickled: {outcome.value!r}"
    return pickle.dumps(Outcome(error=error, seconds=outcome.seconds))
