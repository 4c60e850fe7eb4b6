"""Saves and loads in one line, and what a failed one says and leaves behind."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.stores import S3Store
from support.tensors import assert_bits_equal, blank_like

FEW_RETRIES = {"retries": {"max_attempts": 0}}
"""botocore's own retries switched off, for the `config_kwargs` of s3fs. Its own few remain."""


def impatient(storage_options: dict[str, Any] | None, **config_kwargs: Any) -> dict[str, Any]:
    """Return arguments for a writer or a reader whose every fault is soon final, on s3fs."""
    options = {**(storage_options or {}), "config_kwargs": {**FEW_RETRIES, **config_kwargs}}
    return {"storage_options": options, "retry_seconds": 0}


def save(state: dict[str, Any], url: str, **arguments: Any) -> FsspecStorageWriter:
    """Save by the package; return its writer."""
    writer = FsspecStorageWriter(url, **arguments)
    dcp.save(state, storage_writer=writer)
    return writer


def load(like: dict[str, Any], url: str, **arguments: Any) -> dict[str, Any]:
    """Return a state of the structure of `like`, loaded by the package into blank targets."""
    loaded: dict[str, Any] = blank_like(like)
    dcp.load(loaded, storage_reader=FsspecStorageReader(url, **arguments))
    return loaded


def assert_loads(wanted: dict[str, Any], url: str, **arguments: Any) -> None:
    """Load all of `wanted`, every item compared with its checksum, and compare it bit for bit.

    Raises:
        AssertionError: something differs, or an item was loaded unchecked.
    """
    loaded: dict[str, Any] = blank_like(wanted)
    reader = FsspecStorageReader(url, **{"verify": "full", **arguments})
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)
    report = reader.last_report
    assert (report.checksums, report.num_unverified) == ("checked", 0), report


@dataclass
class Failure:
    """A failed save or load, picklable.

    Attributes:
        ranks: those that failed, in order.
        text: what the user reads, of all ranks.
        causes: what each of them raised.
        notes: further failures that the causes carry.
    """

    ranks: list[int]
    text: str
    causes: list[BaseException]
    notes: list[str]

    def names(self, *words: str) -> None:
        """Assert that the text contains each of `words`.

        Raises:
            AssertionError: it does not.
        """
        missing = [word for word in words if word not in self.text]
        assert not missing, f"{missing} not in:\n{self.text}"


@contextlib.contextmanager
def fails() -> Iterator[Failure]:
    """Expect torch's `CheckpointException` and tell what was in it."""
    failure = Failure([], "", [], [])
    try:
        yield failure
    except CheckpointException as error:
        failure.ranks.extend(sorted(error.failures))
        failure.text = str(error)
        failure.causes.extend(error.failures[rank][0] for rank in failure.ranks)
        failure.notes.extend(note for cause in failure.causes for note in getattr(cause, "__notes__", ()))
    else:
        raise AssertionError("it went well, a failure was expected")


def threads_of_ours() -> list[str]:
    """Return the names of the package's threads that run in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp_fsspec")]


def open_uploads(store: S3Store) -> list[str]:
    """Return the keys below `store` of multipart uploads that were begun and neither completed nor aborted."""
    answer = store.client.list_multipart_uploads(Bucket=store.bucket, Prefix=f"{store.prefix}/")
    return [upload["Key"] for upload in answer.get("Uploads", [])]


def folder_files(store: Any, folder: str) -> dict[str, bytes]:
    """Return the content of every file below one folder of a test store, read behind the package's back."""
    names = [name for name in store.raw_list() if name.startswith(f"{folder}/")]
    return {os.path.relpath(name, folder): store.raw_read(name) for name in names}
