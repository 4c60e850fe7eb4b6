"""Where a checkpoint lives: urls and paths as people write them, turned into one normal form.

Pure: nothing here touches a filesystem.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import quote, quote_plus

from dcp_fsspec.errors import ConfigurationError

_SCHEME = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://")
_SWALLOWED_SLASH = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")
_SWALLOWED_IN_PATH = re.compile(r"/(?P<scheme>s3a?|gc?s|abfss?|az|https?|memory|webdav|sftp):/(?!/)")
_USERINFO = re.compile(
    # user:password@ anywhere, a lone token@ in web addresses; not the container of
    # abfs://container@account; and user:password@ where one of the slashes was lost.
    r"(?<=://)[^/@\s:]*:[^/@\s]+@|(?<=http://)[^/@\s]+@|(?<=https://)[^/@\s]+@"
    r"|(?<=[A-Za-z0-9]:/)[^/@\s:]*:[^/@\s]+@"
)
_SIGNED_QUERY = re.compile(
    r"(?i)\b(x-amz-[a-z\-]+|x-goog-[a-z\-]+|sig|signature|awsaccesskeyid|token|access_token|api_?key|client_secret|"
    r"password|accountkey|sharedaccesssignature)=[^&;\s'\"]+"
)
_SECRET_NAME = re.compile(
    r"(?i)key|secret|token|passw|passphrase|pwd|credential|sas|signature|connection_?string|auth|bearer|cookie"
)
_MIN_SECRET_LENGTH = 6
"""Shorter option values are not hidden: replacing them would garble ordinary words."""


def normalize_url(url: str | os.PathLike[str]) -> str:
    """Return `url` as a string that has a protocol or is a local path.

    Raises:
        ConfigurationError: empty; a protocol that lost one of its slashes in a path library, which would
            otherwise fill a local folder of that name; or a part that the store would read as a version.
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"a checkpoint needs a url or a path, got {url!r}")
    swallowed = next(filter(None, map(_SWALLOWED_SLASH.match, text.split("::"))), None)
    if swallowed is None and os.path.isabs(text):
        swallowed = _SWALLOWED_IN_PATH.search(text)
    if swallowed:
        scheme = swallowed["scheme"]
        raise ConfigurationError(
            f"{redact(text)!r} has one slash after '{scheme}:': a path library (pathlib, os.path.normpath) swallowed "
            f"the other one. Pass the url as a plain string, '{scheme}://...'."
        )
    if "?versionId=" in text and _SCHEME.match(text):
        raise ConfigurationError(
            f"{redact(text)!r} contains '?versionId=', which object stores read as a version of one object, not as a "
            "name. Choose another name."
        )
    if "::" in text or _SCHEME.match(text):
        return text
    return os.path.expanduser(text)


def normalize_root(path: str) -> str:
    """Drop trailing slashes and empty segments of a filesystem path (it has no protocol)."""
    scheme, separator, rest = path.rpartition("://")  # http:// paths keep their protocol
    lead = "/" if rest.startswith("/") and not separator else ""
    return scheme + separator + lead + "/".join(segment for segment in rest.split("/") if segment)


def is_safe_relative(name: str) -> bool:
    """Tell whether `name`, read from a checkpoint, stays inside the checkpoint's folder."""
    if not name or "\0" in name or "\\" in name or "://" in name or "::" in name or len(name) > 1024:
        return False
    parts = name.split("/")
    return not name.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def checkpoint_id_text(checkpoint_id: object) -> str:
    """Return the text of a checkpoint id for messages and metadata, always a str and without secrets."""
    return redact(checkpoint_id.as_posix() if isinstance(checkpoint_id, PurePath) else str(checkpoint_id))


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Hide user:password@, signatures of signed urls, and every one of `secrets` in `text`."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return _SIGNED_QUERY.sub(r"\1=***", _USERINFO.sub("***@", text))


def secrets_of(storage_options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the values in nested `storage_options` whose names say that they are secret, longest first.

    Each comes in every form in which a library may show it: as it is, escaped, quoted as in a url, and the parts of a
    connection string alone.
    """
    plain = set(_secret_values(storage_options or {}, False))
    parts = {part.partition("=")[2] for value in plain for part in re.split("[;&?]", value) if _is_secret_part(part)}
    secrets = {value for value in plain | parts if len(value) >= _MIN_SECRET_LENGTH}
    forms = (str, _escaped, lambda text: quote(text, safe=""), quote, quote_plus)
    return tuple(sorted({form(secret) for secret in secrets for form in forms}, key=len, reverse=True))


def _is_secret_part(part: str) -> bool:
    name = part.partition("=")[0]
    return bool(_SECRET_NAME.search(name)) or name.lower() == "sig"


def _escaped(text: str) -> str:
    return repr(text)[1:-1]


def is_secret_name(name: str) -> bool:
    """Tell whether the name of an option says that its value is secret."""
    return bool(_SECRET_NAME.search(name))


def _secret_values(value: object, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secret_values(inner, secret or is_secret_name(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_values(inner, secret)
    elif secret and isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif secret and isinstance(value, str):
        yield value
