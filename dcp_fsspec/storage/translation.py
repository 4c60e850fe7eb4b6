"""Errors of any backend, turned into errors of this package: by type or errno, with the cause kept, without secrets."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Literal

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DcpFsspecError,
    StorageReadError,
    StorageWriteError,
)
from dcp_fsspec.storage.location import redact
from dcp_fsspec.storage.retry import expired, untrusted

_DENIED = ". Check the credentials, and the rights to get, put and delete objects there"
_EXPIRED = ". The credentials have expired: renew them where they come from, the next save reads them again"
_UNTRUSTED = (
    ". The store's certificate is not trusted. If it is the right store and another authority has signed it, name the "
    'file of that one, for S3 by storage_options={"client_kwargs": {"verify": "/path/ca.pem"}} or the environment '
    "variable AWS_CA_BUNDLE"
)

NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError)

_FALLBACK: dict[str, type[StorageReadError | StorageWriteError]] = {
    "read": StorageReadError,
    "write": StorageWriteError,
}


class Translator:
    """Translates the errors of one store.

    Args:
        secrets: Texts that must not appear in any message.
    """

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = secrets

    @contextlib.contextmanager
    def translated(self, verb: Literal["read", "write"], where: str, *, folder: bool = False) -> Iterator[None]:
        """Raise an error of this package for whatever is raised inside.

        Args:
            verb: What is being done.
            where: The url that it is done to.
            folder: `where` is the folder itself, not a file in it.
        """
        try:
            yield
        except DcpFsspecError:
            raise
        except FileExistsError as error:
            if folder:
                raise StorageWriteError(f"{where} is a file, a folder was wanted") from self.cause(error)
            raise CheckpointExistsError(f"{where} exists already") from self.cause(error)
        except NO_SUCH_FILE as error:
            hint = "" if verb == "read" else "; buckets are not created here, make it first"
            raise CheckpointNotFoundError(
                f"cannot {verb} {where}: no such file, folder or bucket{hint} ({self.quote(error)})"
            ) from self.cause(error)
        except Exception as error:
            if verb == "write" and _precondition_failed(error):
                raise CheckpointExistsError(f"{where} exists already") from self.cause(error)
            denied = isinstance(error, PermissionError)
            hint = _hint(error)
            translated = _FALLBACK[verb](f"cannot {verb} {where}: {self.quote(error)}{hint}")
            translated.errno = errno.EACCES if denied else getattr(error, "errno", None)
            raise translated from self.cause(error)

    def quote(self, error: BaseException) -> str:
        """Return `error` as text."""
        return f"{type(error).__name__}: {redact(str(error), self._secrets)}"

    def cause(self, error: BaseException) -> BaseException:
        """Return `error` as a cause to show, or a stand-in when its text, or its own cause's, holds a secret."""
        if any(redact(text, self._secrets) != text for text in _texts(error, set())):
            return RuntimeError(self.quote(error))
        return error


def _hint(error: Exception) -> str:
    if expired(error):
        return _EXPIRED
    if untrusted(error):
        return _UNTRUSTED
    return _DENIED if isinstance(error, PermissionError) else ""


def _texts(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    """Return all that a traceback of `error` may show of its values: its own, its notes', its causes', its group's."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield str(error)
    yield repr(error)
    yield from map(str, getattr(error, "__notes__", ()))
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for inner in (error.__cause__, error.__context__, *members):
        yield from _texts(inner, seen)


def _precondition_failed(error: Exception) -> bool:
    """Tell an S3 answer 412, which s3fs gives as EINVAL when the server does not name the condition."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412
