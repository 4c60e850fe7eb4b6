"""A progress bar on standard error, where somebody sees it and only if it takes long."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from dcp_fsspec.storage.progress import Progress, ProgressCallback, ProgressWish

logger = logging.getLogger(__name__)

_LONG_SECONDS = 1.0
"""What is done sooner shows no bar."""


@contextlib.contextmanager
def told(wish: ProgressWish, *, here: bool = True) -> Iterator[ProgressCallback | None]:
    """Give whom to tell of progress: the callback that was wished for, a bar, or nobody.

    Args:
        wish: See `ProgressWish`.
        here: A bar may be drawn by this rank.
    """
    if callable(wish):
        yield wish
        return
    bar = _Bar.made() if wish and here and _is_watched() else None
    try:
        yield bar
    finally:
        if bar is not None:
            bar.close()


def _is_watched() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # There is none, or it is closed.
        return False


class _Bar:
    """A line for each operation, drawn from when the first has taken a while."""

    def __init__(self, bars: Any) -> None:
        self._bars, self._begin = bars, time.monotonic()
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._drawn = self._lost = False

    @classmethod
    def made(cls) -> "_Bar | None":
        """Return one, or None where rich is not installed."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bars
        except ImportError:
            return None
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        # Standard output and error stay what they are: they belong to the program.
        bars = Bars(
            TextColumn("{task.description}", markup=False),
            *columns,
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        return cls(bars)

    def __call__(self, now: Progress) -> None:
        with self._lock:
            if not self._lost:
                self._try(lambda: self._draw(now))

    def _draw(self, now: Progress) -> None:
        if now.what not in self._tasks:
            self._tasks[now.what] = self._bars.add_task(now.what, total=now.total_bytes)
        self._bars.update(self._tasks[now.what], completed=now.done_bytes)
        if not self._drawn and time.monotonic() - self._begin >= _LONG_SECONDS:
            self._bars.start()
            self._drawn = True

    def close(self) -> None:
        """Take the bar away."""
        if self._drawn:
            self._try(self._bars.stop)

    def _try(self, draw: Callable[[], None]) -> None:
        """Draw, or never again: the program may draw there itself, or have closed it, and a bar is not worth a save."""
        try:
            draw()
        except (Exception, SystemExit) as error:  # Rich ends the program when nobody reads any more.
            self._lost = True
            logger.debug("the bar is not drawn: %s", error)
