"""Secrets planted in options and urls are found nowhere: not in errors, logs, reprs or files."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import DcpFsspecError, FsspecStorageReader, FsspecStorageWriter, verify
from support.checkpoints import impatient

MARK = "hUnTeR2"
OPTIONS: dict[str, Any] = {
    "key": f"{MARK}-access",
    "secret": f"{MARK}/secret+with=signs",
    "token": {"type": "service_account", "private_key": f"-----BEGIN KEY-----\n{MARK}private\n-----END KEY-----\n"},
    "connection_string": f"DefaultEndpointsProtocol=https;AccountName=me;AccountKey={MARK}account==;EndpointSuffix=x",
    "sas_token": f"?sv=2024-01-01&sp=rw&sig={MARK}%2Fsig%3D",
    "account_key": f"{MARK}azure==",
    "password": f"{MARK} pass word",
    "passphrase": f"{MARK}phrase",
    "client_kwargs": {"headers": {"Authorization": f"Bearer {MARK}bearer"}, "aws_session_token": f"{MARK}session"},
    "credentials": [f"{MARK}first", (f"{MARK}second",)],
}


def _values(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _values(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _values(inner)]
    return [value]


def leak() -> Exception:
    """Return an error that shows every option in every way that libraries have."""
    texts = _values(OPTIONS)
    url = "https://me:{0}@host/b/o?X-Amz-Signature={0}&sig={0}".format(f"{MARK}url")
    parts = f"AccountKey={MARK}account== was refused; sig={MARK}%2Fsig%3D"
    text = " ".join(
        [*texts, *map(repr, texts), *(quote(text, safe="") for text in texts), *map(quote, texts), url, parts]
    )
    first = ValueError(text)
    second = RuntimeError("see above")
    second.__context__ = first
    error = OSError(5, text)
    error.__cause__ = second
    error.add_note(text)
    return error


class LeakyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Fails with an error that shows all it was given, in the verbs that are named."""

    protocol = "leaky"
    cachable = False
    broken: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        if "__init__" in self.broken:
            raise ValueError(str(leak()))
        super().__init__()

    def _fail_if(self, verb: str) -> None:
        if verb in self.broken:
            raise leak()

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._fail_if("pipe_file" if not path.endswith(".metadata") else "commit")
        super().pipe_file(path, value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self._fail_if("cat_file" if path.endswith(".distcp") else "open")
        return super().cat_file(path, start=start, end=end)

    def rm_file(self, path: str) -> None:
        self._fail_if("rm_file")
        super().rm_file(path)

    def find(self, *args: Any, **options: Any) -> Any:
        self._fail_if("find")
        return super().find(*args, **options)


fsspec.register_implementation("leaky", LeakyFileSystem, clobber=True)


def shown_by(call: Callable[[], object]) -> str:
    """Return all that a user sees of the error of `call`: its texts, tracebacks, reprs, and what pickle carries."""
    try:
        call()
    except (Exception, CheckpointException) as error:
        failures = (
            [reason for reason, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        )
        assert all(isinstance(failure, DcpFsspecError) for failure in failures), failures
        texts = ["".join(traceback.format_exception(one)) + repr(one) + str(one) for one in (error, *failures)]
        return "\n".join([*texts, *(repr(pickle.dumps(failure)) for failure in failures)])
    raise AssertionError("it went well, a failure was expected")


def assert_clean(text: str) -> None:
    found = re.findall(rf".{{0,60}}{MARK}.{{0,20}}", text)
    assert not found, found


@pytest.mark.parametrize("verb", ["__init__", "open", "pipe_file", "commit", "rm_file", "cat_file", "find"])
def test_no_secret_is_shown_when_the_store_fails(
    verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dcp_fsspec")
    url = f"leaky://user:{MARK}pass@secrets/{verb}"
    state = {"w": torch.ones(3), "v": [1]}
    arguments: dict[str, Any] = {"storage_options": OPTIONS, "retry_seconds": 0}

    def save() -> None:
        dcp.save(state, storage_writer=FsspecStorageWriter(url, **arguments))

    def load() -> None:
        dcp.load(state, storage_reader=FsspecStorageReader(url, **arguments))

    save()
    monkeypatch.setattr(LeakyFileSystem, "broken", (verb,))
    calls = {
        "__init__": [save, load],
        "open": [save, load],
        "pipe_file": [save],
        "commit": [save],
        "cat_file": [load],
        "find": [lambda: verify(url, **arguments)],
    }
    for call in calls.get(verb, []):
        assert_clean(shown_by(call))
    if verb == "rm_file":
        save()  # It leaves files of the old checkpoint, and says so in the log.
    monkeypatch.setattr(LeakyFileSystem, "broken", ())
    assert_clean(caplog.text)
    if verb == "rm_file":
        assert "some stay" in caplog.text


def test_no_secret_is_in_a_file_or_a_repr(tmp_path: Path) -> None:
    url = f"leaky://user:{MARK}pass@secrets/files"
    writer = FsspecStorageWriter(url, storage_options=OPTIONS)
    dcp.save({"w": torch.ones(3), "v": [1]}, storage_writer=writer)
    reader = FsspecStorageReader(url, storage_options=OPTIONS)
    dcp.load({"w": torch.zeros(3), "v": None}, storage_reader=reader)
    for thing in (writer, reader, writer._store, reader._store, writer.last_report, reader.last_report):
        assert_clean(f"{thing!r} {thing}")
    assert_clean(f"{writer.checkpoint_id} {reader.checkpoint_id} {writer.storage_meta()!r}")
    files = {path: bytes(file.getvalue()) for path, file in MemoryFileSystem.store.items() if "secrets/files" in path}
    assert len(files) == 3
    for content in files.values():
        assert MARK.encode() not in content


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("abfs://container/x", {"connection_string": f"AccountKey={MARK}key;nonsense"}),
        ("gs://bucket/x", {"token": {"private_key": f"{MARK}\nkey", "client_email": "a@b"}}),
        ("gs://bucket/x", {"token": f"/nowhere/{MARK}.json"}),
        ("s3://bucket/x", {"key": f"{MARK}key", "secret": f"{MARK}secret", "client_kwargs": {"bogus": 1}}),
    ],
)
def test_no_secret_is_shown_when_a_real_client_refuses_its_options(
    url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dcp_fsspec")

    def load() -> None:
        dcp.load({"w": torch.zeros(3)}, storage_reader=FsspecStorageReader(url, storage_options=options))

    assert_clean(shown_by(load))
    assert_clean(caplog.text)


def test_no_secret_is_shown_when_a_real_store_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dcp_fsspec")
    closed = {"endpoint_url": "http://127.0.0.1:9", "region_name": "us-east-1"}
    options = {"key": f"{MARK}key", "secret": f"{MARK}secret", "client_kwargs": closed}
    writer = FsspecStorageWriter("s3://bucket/x", **impatient(options))
    assert_clean(shown_by(lambda: dcp.save({"w": torch.zeros(3)}, storage_writer=writer)))
    assert_clean(caplog.text)


@pytest.mark.parametrize(
    "url", [f"s3:/user:{MARK}@host/x", f"http://{MARK}@host/x?versionId=3", f"nothing://u:{MARK}@h/x?token={MARK}&y=1"]
)
def test_no_secret_of_a_url_is_shown_when_the_url_is_refused(url: str) -> None:
    assert_clean(shown_by(lambda: FsspecStorageWriter(url)))
