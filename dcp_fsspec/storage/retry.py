"""Which faults of a store pass by themselves, and for how long to try again.

A fault is judged by its type, its errno or the error code of the store's answer, never by its text. How long to go
on depends on the siblings: as long as other requests of the same store succeed, the store is alive and waiting is
worth it; when nothing has succeeded for `patience_seconds`, the fault is final.
"""

import asyncio
import errno
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import tenacity

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_PATIENCE_SECONDS = 60.0

_FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 10.0

_PASSING_ERRNO = {
    errno.EAGAIN,
    errno.EBUSY,  # s3fs: 503 SlowDown
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.EREMOTEIO,  # s3fs: 500 InternalError
    errno.ETIMEDOUT,
}
PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_PASSING_CLASSES = {
    # The libraries that these come from are optional, so they are known by name: package and class.
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("botocore", "ConnectionError"),
    ("botocore", "HTTPClientError"),
    ("botocore", "ResponseStreamingError"),
    ("httpx", "TransportError"),
    ("azure", "ServiceRequestError"),
    ("azure", "ServiceResponseError"),
    ("azure", "IncompleteReadError"),
}
_FINAL_CLASSES = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}


def passes(error: BaseException) -> bool:
    """Tell whether trying again can help."""
    if isinstance(error, _FINAL_CLASSES) or not isinstance(error, Exception) or untrusted(error):
        return False
    if isinstance(error, TimeoutError | asyncio.TimeoutError | ConnectionError | EOFError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNO:
        return True
    if _status(error) in PASSING_STATUS:
        return True
    return any((cls.__module__.partition(".")[0], cls.__name__) in _PASSING_CLASSES for cls in type(error).__mro__)


def expired(error: BaseException) -> bool:
    """Tell whether the store says that the credentials have expired."""
    return any(code in _EXPIRED_CODES for code in (_code(error), _code(error.__cause__)))


def untrusted(error: BaseException | None) -> bool:
    """Tell whether the store's certificate is not one that we trust, which clients call a failed connection.

    Only causes count: what was being handled when `error` came up may have been another store.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        seen.add(id(error))
        # Botocore puts the cause among the arguments of the message.
        error = error.__cause__ or getattr(error, "kwargs", {}).get("error")
    return False


def _status(error: BaseException) -> int | None:
    for source in (error, getattr(error, "response", None)):
        status = (
            getattr(source, "status_code", None) or getattr(source, "status", None) or getattr(source, "code", None)
        )
        if isinstance(status, int):
            return status
    return None


def _code(error: BaseException | None) -> str | None:
    response: Any = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


class Retries:
    """Tries calls to one store again, and counts. Shared by all threads that use the store.

    Args:
        patience_seconds: How long nothing at all may succeed before a passing fault is final. 0: try once.
    """

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._num_retries = 0
        self._last_success = 0.0
        self._stop = threading.Event()

    @property
    def num_retries(self) -> int:
        """Calls that were made again so far."""
        return self._num_retries

    @contextmanager
    def stoppable(self) -> Iterator[threading.Event]:
        """Give an event that ends all waiting for another try within this context."""
        self._stop = threading.Event()
        try:
            yield self._stop
        finally:
            self._stop = threading.Event()

    def call(self, where: str, function: Callable[[], T]) -> T:
        """Return what `function` returns in the end; raise its last error when it is final."""
        begin, stop = time.monotonic(), self._stop

        def final(state: tenacity.RetryCallState) -> bool:
            alive = max(begin, self._last_success)
            return stop.is_set() or time.monotonic() + state.upcoming_sleep - alive >= self.patience_seconds

        result: T = tenacity.Retrying(
            retry=tenacity.retry_if_exception(passes),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_SECONDS, max=_LONGEST_WAIT_SECONDS),
            stop=final,
            sleep=tenacity.sleep_using_event(stop),
            before_sleep=lambda state: self._count(where, state),
            reraise=True,
        )(function)
        self._last_success = time.monotonic()
        return result

    def _count(self, where: str, state: tenacity.RetryCallState) -> None:
        with self._lock:
            self._num_retries += 1
        error = state.outcome.exception() if state.outcome else None
        logger.info("%s: %s, trying again in %.1f s", where, type(error).__name__, state.upcoming_sleep)
