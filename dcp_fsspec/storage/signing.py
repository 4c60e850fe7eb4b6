"""Requests that a filesystem's own client has signed, to be sent by `direct`.

A signed url carries all that a store asks for, so bytes can move without the client between; who may do what, where the
store is and with which credentials stays the client's business. Where a client does more to a request than sign it
(keys for encryption, who pays, a proxy, a certificate of one's own), there is no signer for it.
"""

import datetime
import functools
import os
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from dcp_fsspec.version import __version__

_USER_AGENT = f"dcp-fsspec/{__version__}"
_VALID_SECONDS = 900
_KEPT_SECONDS = 300.0
_MAX_KEPT = 4096

_S3FS_PLAIN = {
    *("connect_timeout", "read_timeout", "max_pool_connections", "retries", "tcp_keepalive", "parameter_validation"),
    *("request_checksum_calculation", "response_checksum_validation", "disable_request_compression"),
    *("region_name", "signature_version", "sigv4a_signing_region_set", "s3", "use_dualstack_endpoint"),
    *("use_fips_endpoint", "ignore_configured_endpoint_urls", "inject_host_prefix", "defaults_mode"),
    *("user_agent", "user_agent_extra", "user_agent_appid"),
}
"""Settings of botocore that a signed url takes care of, or that have no part in it. Not so those for proxies, for a
certificate of one's own, for the connections of aiohttp."""
_OBSTORE_SIGNED = {
    *("access_key_id", "secret_access_key", "token", "session_token"),
    *("bucket", "endpoint", "region", "default_region", "virtual_hosted_style_request"),
}
"""Settings of obstore that a signed url takes care of."""
_OBSTORE_POOL = {"allow_http", "timeout", "connect_timeout", "pool_idle_timeout", "pool_max_idle_per_host"}
"""Settings of obstore for its own connections."""
_OBSTORE_ENVIRONMENT = re.compile(
    "AWS_(SERVER_SIDE_ENCRYPTION|SSE|SKIP_SIGNATURE|REQUEST_PAYER|CHECKSUM|PROXY|ALLOW_INVALID|S3_EXPRESS"
    "|DEFAULT_HEADERS|DEFAULT_CONTENT_TYPE)"
)
"""Variables, by their beginnings, by which obstore does more to a request than sign it."""
_DURATION = re.compile(r"(\d+)(h|ms|m|s) ?")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_ours: ContextVar[bool] = ContextVar("_ours", default=False)


@dataclass(frozen=True)
class Signed:
    """A request that a store will take.

    Attributes:
        url: With the signature in its query. It is as good as a password while it lasts.
        headers: To be sent along.
        connect_seconds: How long to wait for a connection; None: for ever.
        read_seconds: How long to wait for the next byte to go or to come.
        verify: False, or the path of the certificates to trust; None for those of the machine.
        signed_at: When, by `time.monotonic`.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_seconds: float | None = 5.0
    read_seconds: float | None = 15.0
    verify: str | bool | None = None
    signed_at: float = field(default_factory=time.monotonic)


class Signer(Protocol):
    """Signs requests for objects of one filesystem."""

    def get(self, path: str) -> Signed | None:
        """Return a request for `path`, to which a range may be added; None where it takes more than a signature."""

    def put(self, path: str, **options: Any) -> Signed | None:
        """Return a request that makes `path`; `options` are those of ``pipe_file``."""

    def forget(self) -> None:
        """Sign anew what was signed before: credentials may have changed."""


def signer_of(fs: AbstractFileSystem) -> Signer | None:
    """Return who signs for `fs`, None where its requests take more than a signature."""
    package = type(fs).__module__.partition(".")[0]
    if package == "s3fs":
        plain = not (fs.req_kw or fs.s3_additional_kwargs) and set(fs.config_kwargs) <= _S3FS_PLAIN
        return _S3fs(fs) if plain else None
    plain = package == "obstore" and "s3" in fs.protocol and not any(map(_OBSTORE_ENVIRONMENT.match, os.environ))
    return _Obstore(fs) if plain else None


@functools.lru_cache
def _through_proxy(scheme: str, host: str) -> bool:
    """Tell whether the environment wants requests to `host` to go through a proxy."""
    proxies = urllib.request.getproxies()
    return (scheme in proxies or "all" in proxies) and not urllib.request.proxy_bypass(host)


class _S3fs:
    def __init__(self, fs: AbstractFileSystem) -> None:
        self._fs = fs
        self._lock = threading.Lock()
        self._kept: dict[str, Signed] = {}

    def get(self, path: str) -> Signed | None:
        signed = self._kept.get(path)
        if signed is None or time.monotonic() > signed.signed_at + _KEPT_SECONDS:
            signed = self._sign(path, "get_object", {})
            if signed is not None:
                with self._lock:
                    if len(self._kept) >= _MAX_KEPT:
                        self._kept.clear()
                    self._kept[path] = signed
        return signed

    def put(self, path: str, **options: Any) -> Signed | None:
        crc = options.pop("ChecksumCRC32C", None)
        if options:
            return None
        return self._sign(path, "put_object", {"ChecksumCRC32C": crc} if crc else {})

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()

    def _sign(self, path: str, method: str, parameters: Mapping[str, str]) -> Signed | None:
        url, config = sync(self._fs.loop, self._presigned, path, method, parameters)
        checksum = {"x-amz-checksum-crc32c": parameters["ChecksumCRC32C"]} if parameters else {}
        parts = urllib.parse.urlsplit(url)
        signed_headers = urllib.parse.parse_qs(parts.query).get("X-Amz-SignedHeaders", [""])[0]
        all_signed = self._fs.anon or set(signed_headers.split(";")) == {"host", *checksum}
        if not all_signed or _through_proxy(parts.scheme, parts.hostname or ""):
            return None
        verify = self._fs.client_kwargs.get("verify")
        if verify is None or verify is True:
            verify = self._fs.session.get_config_variable("ca_bundle")
        headers = {**checksum, "User-Agent": f"{_USER_AGENT} {config.user_agent_extra or ''}".strip()}
        return Signed(url, headers, config.connect_timeout, config.read_timeout, verify)

    async def _presigned(self, path: str, method: str, parameters: Mapping[str, str]) -> tuple[str, Any]:
        bucket, key, version = self._fs.split_path(path)
        await self._fs.set_session()
        client = await self._fs.get_s3(bucket)
        operation = client.meta.method_to_api_mapping[method]
        client.meta.events.register_first(
            f"choose-signer.s3.{operation}", _fourth_version, unique_id=f"{__name__}.{operation}"
        )
        _ours.set(True)
        target = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
        url = await client.generate_presigned_url(method, Params={**target, **parameters}, ExpiresIn=_VALID_SECONDS)
        return url, client.meta.config


def _fourth_version(signature_version: Any, **_: object) -> str | None:
    """Sign by version 4 where botocore would take version 2 for urls, which many stores no longer know."""
    return "s3v4-query" if _ours.get() and signature_version in ("s3-query", "s3v4-query", "v4-query") else None


class _Obstore:
    def __init__(self, fs: AbstractFileSystem) -> None:
        self._fs = fs

    def get(self, path: str) -> Signed | None:
        return self._sign(path, "GET")

    def put(self, path: str, **options: Any) -> Signed | None:
        return None if options else self._sign(path, "PUT")

    def forget(self) -> None:
        pass  # Nothing is kept.

    def _sign(self, path: str, method: Literal["GET", "PUT"]) -> Signed | None:
        import obstore

        bucket, key = self._fs._split_path(path)
        store = self._fs._construct_store(bucket)
        if not isinstance(store, obstore.store.S3Store):
            return None
        options = store.client_options or {}
        patience = _seconds(str(options.get("connect_timeout", "5s"))), _seconds(str(options.get("timeout", "15s")))
        if None in patience or not (set(store.config) <= _OBSTORE_SIGNED and set(options) <= _OBSTORE_POOL):
            return None
        url = obstore.sign(store, method, key, datetime.timedelta(seconds=_VALID_SECONDS))
        parts = urllib.parse.urlsplit(url)
        if _through_proxy(parts.scheme, parts.hostname or ""):
            return None
        return Signed(url, {"User-Agent": _USER_AGENT}, *patience)


def _seconds(duration: str) -> float | None:
    """Return a duration as obstore tells it, such as ``1m 30s``; None if it has other units."""
    if _DURATION.sub("", duration) or not duration:
        return None
    return sum(int(count) * _UNITS[unit] for count, unit in _DURATION.findall(duration))
