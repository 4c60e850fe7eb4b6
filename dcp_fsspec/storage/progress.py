"""How far a long operation has come, told to whoever asks: a progress bar, a log, a trainer."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far an operation has come.

    Attributes:
        what: The operation, in one word, and the url that it reads.
        done_bytes: Bytes dealt with so far.
        total_bytes: Bytes in all.
    """

    what: str
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]
"""Called at the start, from time to time and at the end, by one thread at a time. It should be quick.

One that raises is not called again; what it was told about goes on.
"""

ProgressWish = bool | ProgressCallback
"""A callback; or True: a bar, where standard error is a terminal and rich is installed; or False: nothing."""


class Meter:
    """Counts bytes and tells a callback. Safe to use from many threads.

    Args:
        what: See `Progress`.
        total_bytes: Bytes in all.
        callback: Whom to tell; None: nobody.
    """

    def __init__(self, what: str, total_bytes: int, callback: ProgressCallback | None) -> None:
        self._what, self._total_bytes, self._callback = what, total_bytes, callback
        self._done_bytes = 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more."""
        with self._lock:
            self._done_bytes += num_bytes
            if self._callback is None:
                return
            try:
                self._callback(Progress(self._what, self._done_bytes, self._total_bytes))
            except Exception:
                logger.exception("the callback for the progress of %s failed, it is not called again", self._what)
                self._callback = None
