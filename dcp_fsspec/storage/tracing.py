"""A trace of one save or load on one rank, in the JSON format that Perfetto and Chrome show: one row for each thread.

Whoever works within a trace says so with `Trace.span`. Without a folder to write to, there is `OFF`, which does
nothing. Times are those of the machine's clock, so that the files of several ranks can be put side by side.
"""

import contextlib
import datetime
import json
import logging
import os
import re
import socket
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from dcp_fsspec.version import __version__

logger = logging.getLogger(__name__)

VARIABLE = "DCP_FSSPEC_TRACE"
"""The environment variable that names a folder for the traces of all saves and loads."""

NO_SPAN = contextlib.nullcontext()
_ROWS_OF_A_RANK = 1000
_POOL_THREAD = re.compile(r"dcp_fsspec_\d+_(\d+)")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Trace:
    """One that is off."""

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Record how long the body takes, in the row of the calling thread. Spans of one thread nest.

        Args:
            name: What is done.
            details: Shown when one looks at the span; JSON values.
        """
        return NO_SPAN

    def until_next(self, name: str) -> None:
        """Record the time from now until the same thread begins its next span: what runs then is the caller's."""

    def write(self) -> None:
        """Write the file, over what an earlier call has written. A failure is logged."""


OFF = Trace()


def begin(verb: str, url: str, folder: str | os.PathLike[str] | None) -> Trace:
    """Begin to trace an operation on this rank.

    Args:
        verb: What is done: "save", "load", "stage".
        url: To what, without secrets.
        folder: Path or url of the folder for the file. None: what `VARIABLE` says; `OFF` if it says nothing.
    """
    folder = folder or os.environ.get(VARIABLE)
    return _Recording(verb, url, os.fspath(folder)) if folder else OFF


class _Recording(Trace):
    def __init__(self, verb: str, url: str, folder: str) -> None:
        self._verb, self._url, self._folder = verb, url, folder
        self._began = datetime.datetime.now(datetime.UTC)
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._spans: list[_Span] = []
        self._gap: _Span | None = None

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        return _Span(self, name, details)

    def until_next(self, name: str) -> None:
        gap = _Span(self, name, {})
        gap.__enter__()  # Ends the one before, so it must not be known as the open one yet.
        self._gap = gap

    def close_gap(self) -> None:
        """End what `until_next` began, if this thread began it."""
        gap = self._gap
        if gap is not None and gap.thread == threading.current_thread().name:
            self._gap = None
            gap.__exit__()

    def add(self, span: "_Span") -> None:
        """Take a span that has ended. Called from any thread."""
        self._spans.append(span)

    def write(self) -> None:
        # Here, since commands that trace nothing do without torch, and the filesystem is built upon what is traced.
        import torch.distributed as dist

        from dcp_fsspec.storage.filesystem import Store

        self.close_gap()
        try:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            store = Store(self._folder, retry_seconds=0)
            store.prepare()
            store.swap(self._file_name(rank), json.dumps(self._document(rank)).encode())
        except Exception as error:
            logger.warning("the trace of a %s of %s was not written: %s", self._verb, self._url, error)

    def _file_name(self, rank: int) -> str:
        what = _NOT_IN_A_NAME.sub("_", self._url.rstrip("/").rpartition("/")[2])
        return f"{self._began:%Y%m%dT%H%M%S}{self._began.microsecond // 1000:03d}-{self._verb}-{what}-rank{rank}.json"

    def _document(self, rank: int) -> dict[str, Any]:
        spans = list(self._spans)
        # Numbers of processes and threads begin above 0, which viewers take for the idle process.
        process, first = rank + 1, (rank + 1) * _ROWS_OF_A_RANK
        names = sorted({_row_name(span.thread) for span in spans}, key=_row_order)
        rows = {name: number for number, name in enumerate(names, first)}
        title = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        events = [_about("process_name", process, first, name=title)]
        for name, row in rows.items():
            events.append(_about("thread_name", process, row, name=name))
            events.append(_about("thread_sort_index", process, row, sort_index=row))
        events += [span.event(self._epoch_ns, process, rows[_row_name(span.thread)]) for span in spans]
        about = {"operation": self._verb, "url": self._url, "rank": rank, "dcp_fsspec": __version__}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _Span(AbstractContextManager[None]):
    """A stretch of time of one thread."""

    __slots__ = ("_begin_ns", "_details", "_end_ns", "_name", "_trace", "thread")

    def __init__(self, trace: _Recording, name: str, details: dict[str, object]) -> None:
        self._trace, self._name, self._details = trace, name, details
        self.thread = threading.current_thread().name

    def __enter__(self) -> None:
        self._trace.close_gap()
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *failure: object) -> None:
        self._end_ns = time.perf_counter_ns()
        if failure and failure[0] is not None:
            self._details["error"] = getattr(failure[0], "__name__", "error")
        self._trace.add(self)

    def event(self, epoch_ns: int, process: int, row: int) -> dict[str, Any]:
        """Return it as Chrome's format has it; whole microseconds, both ends rounded alike, so that spans nest."""
        begin, end = ((epoch_ns + at) // 1000 for at in (self._begin_ns, self._end_ns))
        event: dict[str, Any] = {"ph": "X", "name": self._name, "ts": begin, "dur": end - begin, "pid": process}
        return {**event, "tid": row, "args": self._details}


def _about(what: str, process: int, row: int, **values: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": values}


def _row_name(thread: str) -> str:
    """Return how the row of a thread is called: pools that follow each other share their rows."""
    pooled = _POOL_THREAD.fullmatch(thread)
    return f"transfer {int(pooled[1]):02d}" if pooled else thread


def _row_order(name: str) -> tuple[bool, str]:
    return name.startswith("transfer "), name
