"""From a url and its options to an fsspec filesystem and the path of a folder on it."""

import inspect
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.config import conf as fsspec_config

from dcp_fsspec.errors import ConfigurationError
from dcp_fsspec.storage.capabilities import look_through
from dcp_fsspec.storage.location import redact

_S3_CONNECTIONS = 64


def open_filesystem(
    location: str, storage_options: Mapping[str, Any], given: AbstractFileSystem | None, **extra: Any
) -> tuple[AbstractFileSystem, str]:
    """Return the filesystem of `location` (or `given`, if there is one) and the path of `location` on it.

    Args:
        location: A url, a chained url or a path.
        storage_options: As in fsspec; merged into what fsspec's own configuration says.
        given: A filesystem that the caller holds already.
        extra: Passed to the filesystem's class when one is made.

    Raises:
        Exception: fsspec knows no such protocol, or the options do not fit it.
        ConfigurationError: `given` speaks another protocol.
    """
    if given is not None:
        return look_through(given, _path_on(given, location), chained=False)
    if "::" in location and not _is_chain(location):
        if "://" in location:
            raise ConfigurationError(
                f"{redact(location)}: fsspec reads '::' as a chain of filesystems, and these links are none. "
                "Choose another name."
            )
        fs = fsspec.filesystem("file")
        return fs, fs._strip_protocol(location)
    options = _with_defaults(location, dict(storage_options))
    fs, path = fsspec.core.url_to_fs(location, **options, **extra)
    if type(fs).__module__.partition(".")[0] == "s3fs":
        fs.retries = 1  # Trying again is left to us; see `_with_defaults`.
        _check_s3_options(fs, location)
    if "?" in location.partition("::")[0] and "?" not in path:
        raise ConfigurationError(f"{redact(location)}: {type(fs).__name__} drops what follows '?'")
    return look_through(fs, fs._strip_protocol(path), chained=True)


def _is_chain(location: str) -> bool:
    links = location.split("::")
    return all(
        link.partition("://")[0] in fsspec.available_protocols() or (number > 0 and link.startswith("/"))
        for number, link in enumerate(links)
    )


def _path_on(fs: AbstractFileSystem, location: str) -> str:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    scheme, separator, path = location.partition("://")
    if not separator or "::" in location or protocols == {"abstract"}:
        return str(fs._strip_protocol(location))
    if scheme not in protocols:
        speaks = ", ".join(sorted(protocols))
        raise ConfigurationError(f"{redact(location)}: the filesystem that was passed speaks {speaks}, not {scheme}")
    # Not every filesystem knows its protocol when it is to strip it.
    return str(fs._strip_protocol(path)) if "file" not in protocols else str(fs._strip_protocol(location))


def _with_defaults(location: str, options: dict[str, Any]) -> dict[str, Any]:
    """Merge `options` into fsspec's configuration, nested dicts too, and add what a fast save needs."""
    scheme = location.partition("://")[0] if "::" not in location else ""
    if scheme not in ("s3", "s3a"):
        return options
    chosen: dict[str, Any] = {}
    for layer in (fsspec_config.get("s3", {}), fsspec_config.get("s3a", {}), options):
        chosen = _merge(chosen, layer)
    config: dict[str, Any] = {
        # The default of ten connections would hold back every thread above the tenth.
        "max_pool_connections": _S3_CONNECTIONS,
        # `Retries` tries again, counts, and knows when to give up. Beneath it two more layers would do the same, each
        # for each try of the other: against a store that does not answer that lasts for the better part of an hour.
        "retries": {"max_attempts": 0},
        # What comes down is compared with our own checksums, and ranges have no others.
        "response_checksum_validation": "when_required",
    }
    if chosen.get("config_kwargs", {}).get("request_checksum_calculation") != "when_required":
        # Each object goes up with a CRC32C, computed anyway, which is signed and which the store compares; hashing the
        # body a second time, by SHA-256, would cost more than sending it.
        config["s3"] = {"payload_signing_enabled": False}
    # A listing remembered by one process hides what another one wrote.
    return _merge({"use_listings_cache": False, "config_kwargs": config}, chosen)


def _check_s3_options(fs: AbstractFileSystem, location: str) -> None:
    """Refuse options that s3fs would take now and stumble over when it connects.

    Raises:
        ConfigurationError: names the one that nobody knows.
    """
    from aiobotocore.config import AioConfig
    from botocore.session import Session

    try:
        inspect.signature(Session.__init__).bind_partial(None, **fs.kwargs)
        inspect.signature(Session.create_client).bind_partial(None, "s3", **fs.client_kwargs)
        AioConfig(**fs.config_kwargs)
    except TypeError as error:
        raise ConfigurationError(f"{redact(location)}: s3fs has no such storage option: {error}") from error


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = _merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged
