"""How a folder is reached: its url, its filesystem, and what becomes of each call to it.

Every call is counted, tried again while its fault may pass, made anew with new credentials when the old ones have
expired, and its errors are translated.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import fsspec
from fsspec import AbstractFileSystem

from dcp_fsspec.errors import ConfigurationError
from dcp_fsspec.storage.capabilities import Capabilities, capabilities_of
from dcp_fsspec.storage.clients import Client, client_of
from dcp_fsspec.storage.location import normalize_root, normalize_url, redact, secrets_of
from dcp_fsspec.storage.opening import open_filesystem
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS, Retries, expired
from dcp_fsspec.storage.translation import Translator

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLEAN_UP_SECONDS = 5.0
"""Patience for removing what nothing refers to."""


class Connection:
    """One folder on any filesystem, reached. Safe to use from many threads, to pickle and to fork.

    Args:
        url: Url or path of the folder.
        storage_options: As in fsspec; merged into what fsspec's own configuration says.
        filesystem: An fsspec filesystem to use instead of one made from `url`.
        retry_seconds: How long nothing may succeed before a fault that usually passes is final; see `retry`.

    Raises:
        ConfigurationError: the url, its protocol or an option cannot work.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        filesystem: AbstractFileSystem | None = None,
        retry_seconds: float = DEFAULT_PATIENCE_SECONDS,
    ) -> None:
        if filesystem is not None and storage_options:
            raise ConfigurationError("pass storage_options or a filesystem, not both: the filesystem has its own")
        self._location = normalize_url(url)
        # The mapping itself is kept: it may follow a file of credentials that changes.
        self._storage_options = storage_options or {}
        self._given = filesystem
        self._secrets: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._requests = 0
        self._retries = Retries(retry_seconds)
        self._clean_up = Retries(min(retry_seconds, _CLEAN_UP_SECONDS))
        self._made_in = os.getpid()
        self._connect()

    def at(self, url: str | os.PathLike[str]) -> Self:
        """Return the one for another folder, reached by the same options or filesystem."""
        return type(self)(url, self._storage_options, self._given, self._retries.patience_seconds)

    def child(self, name: str) -> Self:
        """Return the one for the folder `name` in this one."""
        return self.at(f"{self._location.rstrip('/')}/{name}")

    def _connect(self, **extra: Any) -> None:
        options = dict(self._storage_options)
        self._secrets = secrets_of({"now": options, "key of before": list(self._secrets)})
        self._errors = Translator(self._secrets)
        self._fs, path = self._resolve(options, extra)
        self._client = client_of(self._fs)
        self._pid, self._connected_by = os.getpid(), options
        self.root = normalize_root(path)
        self.capabilities: Capabilities = capabilities_of(self._fs)
        if self.capabilities.local and "://" not in self._location:
            # A relative path means the folder of now, also after a chdir and in another process.
            self._location = self.root
        if getattr(self._fs, "asynchronous", False):
            raise ConfigurationError(f"{self.url}: pass a filesystem that was made with asynchronous=False")
        forbidden = sorted(set(self.root) & set(self.capabilities.forbidden))
        if forbidden:
            client = type(self._fs).__name__
            raise ConfigurationError(f"{self.url}: {client} cannot have {' '.join(forbidden)} in a name")
        if not self.root and not self.capabilities.local:
            raise ConfigurationError(f"{self.url}: a bucket or a folder is missing in the url")

    def _resolve(self, options: dict[str, Any], extra: dict[str, Any]) -> tuple[AbstractFileSystem, str]:
        try:
            return open_filesystem(self._location, options, self._given, **extra)
        except ConfigurationError:
            raise
        except OSError as error:
            with self._errors.translated("read", self.url):
                raise error
        except Exception as error:  # Constructors raise whatever their libraries do.
            known = ", ".join(sorted(fsspec.available_protocols()))
            raise ConfigurationError(
                f"{self.url}: no filesystem for this url and these storage_options: {self._errors.quote(error)}. "
                f"fsspec knows the protocols {known}."
            ) from self._errors.cause(error)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "url": self._location,
            "storage_options": self._storage_options,
            "filesystem": self._given,
            "retry_seconds": self._retries.patience_seconds,
            "made_in": self._made_in,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_in = state.pop("made_in")
        self.__init__(**state)  # type: ignore[misc]
        self._made_in = made_in

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """The folder as it was given, without secrets."""
        shown = redact(self._location, self._secrets)
        scheme, separator, rest = shown.partition("://")
        return f"{scheme}{separator}{rest.rstrip('/')}" if separator else shown.rstrip("/") or "/"

    @property
    def location(self) -> str:
        """The folder as it was given, to make a `Store` from; it may hold secrets."""
        return self._location

    @property
    def num_requests(self) -> int:
        """Calls made to the filesystem so far, by this object in this process."""
        return self._requests

    @property
    def num_retries(self) -> int:
        """Calls of these that were made again because of a passing fault, beyond what the filesystem retries."""
        return self._retries.num_retries

    def stoppable(self) -> contextlib.AbstractContextManager[threading.Event]:
        """Give an event that ends all waiting for another try; see `Transfer`."""
        return self._retries.stoppable()

    @property
    def fs(self) -> AbstractFileSystem:
        """The filesystem.

        It is made anew in a forked child, since event loops and sockets do not survive a fork, and when the options
        are a mapping that has changed, such as one that follows a file of credentials.
        """
        self._renew()
        return self._fs

    @property
    def client(self) -> Client:
        """How bytes get into the filesystem and out of it."""
        self._renew()
        return self._client

    def _renew(self) -> None:
        if self._is_outdated:
            with self._lock:
                if self._is_outdated:
                    self._reconnect()

    @property
    def _is_outdated(self) -> bool:
        followed = not isinstance(self._storage_options, dict) and dict(self._storage_options) != self._connected_by
        return followed or self._pid != os.getpid()

    def _reconnect(self) -> None:
        """Make the filesystem anew, and with it its session and its credentials."""
        if self._given is not None:
            given = self._given
            self._given = type(given)(*given.storage_args, **given.storage_options, skip_instance_cache=True)
        self._connect(skip_instance_cache=True)

    def path(self, name: str) -> str:
        """Return the filesystem's path of the file `name` in this folder."""
        return f"{self.root.rstrip('/')}/{name}" if self.root else name

    def url_of(self, name: str) -> str:
        """Return the url of the file `name`, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def _where(self, name: str) -> str:
        return self.url_of(name) if name else self.url

    # Calls -------------------------------------------------------------------------------------------

    def reading(self, name: str, call: Callable[[], T]) -> T:
        """Return what `call` returns, which reads the file `name` (empty: the folder) by the `fs` of that moment.

        Raises:
            CheckpointNotFoundError: there is no such file, folder or bucket.
            StorageReadError: anything else.
        """
        with self._errors.translated("read", self._where(name), folder=not name):
            return self._tried(name, call)

    def writing(self, name: str, call: Callable[[], T]) -> T:
        """Return what `call` returns, which writes or removes; see `reading`. It may be made more than once.

        Raises:
            CheckpointExistsError, CheckpointNotFoundError: as the filesystem says.
            StorageWriteError: anything else.
        """
        if self.capabilities.of_process and self._made_in != os.getpid():
            raise ConfigurationError(
                f"{self.url} lives in the memory of one process; this is another one, what it writes would be lost. "
                "Save from the process that made the writer."
            )
        with self._errors.translated("write", self._where(name), folder=not name):
            return self._tried(name, call)

    def _tried(self, name: str, call: Callable[[], T]) -> T:
        session = self._fs

        def counted() -> T:
            with self._lock:
                self._requests += 1
            return call()

        try:
            return self._retries.call(self._where(name), counted)
        except PermissionError as error:
            if not expired(error):
                raise
        # Rotated credentials are read again by a new session. One thread makes it for all.
        with self._lock:
            if self._fs is session:
                logger.info("%s: the credentials have expired, reading them again", self.url)
                self._reconnect()
        return self._retries.call(self._where(name), counted)
