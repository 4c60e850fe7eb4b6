"""Storage options from a Cosmos credentials file: the JSON of keyword arguments of ``boto3.client("s3")``."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dcp_fsspec.errors import ConfigurationError

_RENAMED = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": "token"}
_LEFT_OUT = {"service_name", "config"}


class CosmosCredentials(Mapping[str, Any]):
    """Options for s3fs that follow a file of arguments for ``boto3.client``, wherever `storage_options` are taken.

    The file is read again when it has changed: each save and load, and each retry after expired credentials, uses what
    it says then.

    Args:
        path: The JSON file.

    Raises:
        ConfigurationError: it is missing or is not such a file. The message has none of its values.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None
        self._options: dict[str, Any] = {}
        self._current()

    def _current(self) -> dict[str, Any]:
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino
            if seen != self._seen:
                self._options = _to_s3fs(self._parse(self._path.read_bytes()))
                self._seen = seen
        except OSError as error:
            raise ConfigurationError(f"{self._path}: the credentials cannot be read: {error.strerror}") from error
        return self._options

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            arguments = json.loads(data)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ConfigurationError(f"{self._path} is not a JSON object of arguments for boto3.client")
        return arguments

    def __getitem__(self, name: str) -> Any:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._current()))

    def __len__(self) -> int:
        return len(self._current())

    def __repr__(self) -> str:
        return f"CosmosCredentials({str(self._path)!r})"


def _to_s3fs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    options = {_RENAMED[name]: value for name, value in arguments.items() if name in _RENAMED}
    client = {name: value for name, value in arguments.items() if name not in _RENAMED and name not in _LEFT_OUT}
    if client:
        options["client_kwargs"] = client
    if isinstance(arguments.get("config"), dict):
        options["config_kwargs"] = arguments["config"]
    return options
