"""What one operation cost the process that ran it (Linux)."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Usage:
    """Costs of one operation.

    Attributes:
        wall_seconds: elapsed time.
        cpu_seconds: user and system time of all threads.
        peak_bytes: highest resident memory during the operation less that just before it.
        read_bytes: returned by read calls to files and sockets.
        written_bytes: handed to write calls to files and sockets.
    """

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    read_bytes: int
    written_bytes: int


def measure(operation: Callable[[], None]) -> Usage:
    """Run `operation` and return what it cost."""
    gc.collect()
    reset_peak_memory()
    resident_bytes = _status_bytes("VmRSS")
    read_bytes, written_bytes = _io_bytes()
    cpu_seconds = _cpu_seconds()
    began = time.perf_counter()
    operation()
    wall_seconds = time.perf_counter() - began
    cpu_seconds = _cpu_seconds() - cpu_seconds
    read_after, written_after = _io_bytes()
    return Usage(
        wall_seconds,
        cpu_seconds,
        max(0, _status_bytes("VmHWM") - resident_bytes),
        read_after - read_bytes,
        written_after - written_bytes,
    )


class MemoryTimeline:
    """Notes the resident memory again and again while the body of a `with` runs.

    Args:
        every_seconds: How often.

    Attributes:
        points: Seconds since the beginning and bytes beyond what was resident then.
    """

    def __init__(self, every_seconds: float = 0.05) -> None:
        self.points: list[tuple[float, int]] = []
        self._every_seconds = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._note, name="memory_timeline", daemon=True)

    def __enter__(self) -> Self:
        self._began, self._before = time.perf_counter(), _resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join()

    def _note(self) -> None:
        while True:
            self.points.append((round(time.perf_counter() - self._began, 3), _resident_bytes() - self._before))
            if self._ended.wait(self._every_seconds):
                return


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak_memory() -> None:
    """Let VmHWM start again from what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in /proc/self/status")


def _io_bytes() -> tuple[int, int]:
    values = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(values["rchar"]), int(values["wchar"])
