"""The one way by which bytes go up or down: a pool of threads under a byte budget.

A `Job` says beforehand what it costs. The calling thread hands jobs out in order as the budget allows, so that
memory is bounded however many there are. The first failure, or an interrupt, stops the handing out; what runs is
waited for, and no thread outlives the call.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_fsspec.errors import ConfigurationError
from dcp_fsspec.storage.scratch import Scratch
from dcp_fsspec.storage.tracing import OFF, Trace

T = TypeVar("T")

_POOL_NUMBERS = itertools.count()

DEFAULT_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class Job(Generic[T]):
    """Work for one thread.

    Attributes:
        cost_bytes: Memory that it holds at most while it runs.
        run: The work. It may raise anything.
    """

    cost_bytes: int
    run: Callable[[], T]


class Transfer:
    """Runs jobs in threads within a byte budget.

    Args:
        max_concurrency: Threads.
        budget_bytes: Memory that all running jobs hold together. A job that costs more than all of it runs alone.
        stop: Set at the first failure or interrupt, for jobs that wait for something.
        trace: Where the waiting of the calling thread is recorded.

    Attributes:
        scratch: Memory that jobs borrow, as far as they have said so in what they cost.
    """

    def __init__(
        self, max_concurrency: int, budget_bytes: int, stop: threading.Event | None = None, trace: Trace = OFF
    ) -> None:
        self._max_concurrency = max_concurrency
        self._budget_bytes = budget_bytes
        self._stop = stop or threading.Event()
        self._trace = trace
        self.scratch = Scratch(budget_bytes)

    @property
    def max_concurrency(self) -> int:
        """Threads at most."""
        return self._max_concurrency

    @property
    def budget_bytes(self) -> int:
        """Memory that all running jobs hold together."""
        return self._budget_bytes

    def run(self, jobs: Iterable[Job[T]]) -> list[T]:
        """Run all jobs and return their results in order.

        Raises:
            BaseException: what the first failing job raised, or the interrupt of the calling thread; further
                failures are attached as notes. All jobs that had begun have ended.
        """
        futures: list[Future[T]] = []
        running: dict[Future[T], int] = {}
        pool: _Pool[T] = _Pool(self._max_concurrency)
        try:
            for job in jobs:
                self._make_room(running, job.cost_bytes)
                future = pool.submit(job.run)
                futures.append(future)
                running[future] = job.cost_bytes
            self._make_room(running, None)
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.end()
        return [future.result() for future in futures]

    def _make_room(self, running: dict[Future[T], int], cost_bytes: int | None) -> None:
        """Wait until `cost_bytes` more fit beside `running`, or until all is done when it is None."""
        while running:
            in_use = sum(running.values())
            fits = cost_bytes is not None and in_use + cost_bytes <= self._budget_bytes
            if fits and len(running) < self._max_concurrency:
                return
            with self._trace.span(self._awaited(len(running), cost_bytes)):
                done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
            self._raise_first(done, running)

    def _awaited(self, num_running: int, cost_bytes: int | None) -> str:
        if cost_bytes is None:
            return "wait for the last"
        return "wait for budget" if num_running < self._max_concurrency else "wait for a thread"

    def _raise_first(self, done: set[Future[T]], running: dict[Future[T], int]) -> None:
        failed = [error for future in done if (error := future.exception()) is not None]
        if not failed:
            return
        self._stop.set()
        wait(running)
        failed += [error for future in running if (error := future.exception()) is not None]
        for other in failed[1:]:
            failed[0].add_note(f"another transfer failed as well: {type(other).__name__}: {other}")
        raise failed[0]


class _Pool(Generic[T]):
    """Threads that run jobs, started as they are needed.

    They are daemons if the thread that makes the pool is one: an upload in the background that hangs must not keep the
    program from ending, as the threads of ``concurrent.futures`` do in any case.

    Args:
        max_threads: How many at most.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._name = f"dcp_fsspec_{next(_POOL_NUMBERS)}"
        self._waiting: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._num_threads = 0

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Have `run` called by one of the threads."""
        future: Future[T] = Future()
        self._waiting.put((future, run))
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name=f"{self._name}_{self._num_threads}").start()
        return future

    def _work(self) -> None:
        while (one := self._waiting.get()) is not None:
            _fulfil(*one)
            del one  # What it holds must not outlive it.
            self._idle.release()
        self._waiting.put(None)  # For the others.

    def end(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with contextlib.suppress(queue.Empty):
            while (one := self._waiting.get_nowait()) is not None:
                one[0].cancel()
        self._waiting.put(None)
        # By name: an interrupt in the middle of submit can make it forget a thread that it has started.
        for thread in threading.enumerate():
            if thread.name.startswith(f"{self._name}_"):
                thread.join()


def _fulfil(future: Future[T], run: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(run())
    except BaseException as error:
        future.set_exception(error)
        del future  # Its error holds this frame.


def check_limits(max_concurrency: int | None, memory_budget_bytes: int) -> None:
    """Refuse limits that would stop all transfer.

    Raises:
        ConfigurationError: a limit below one thread or one MiB.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigurationError(f"max_concurrency must be at least 1, got {max_concurrency}")
    if memory_budget_bytes < 1 << 20:
        raise ConfigurationError(f"memory_budget_bytes must be at least one MiB, got {memory_budget_bytes}")
