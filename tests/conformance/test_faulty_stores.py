"""What the package makes of a store that fails, seen without a network in between."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest
import torch

from dcp_fsspec import CorruptCheckpointError, StorageWriteError
from dcp_fsspec.testing.conformance import Target
from dcp_fsspec.testing.faults import Delay, Drop, Fail, FaultyFileSystem, Flip, Truncate
from dcp_fsspec.testing.target import failure_of
from support.stores import MemoryStore
from support.tensors import assert_bits_equal, random_tensor

STATE = {f"w{number}": random_tensor(1 << 14, seed=number) for number in range(4)}
SMALL: dict[str, Any] = {"shard_bytes": 64 << 10}


class Faulty(Target):
    """A folder in memory behind a `FaultyFileSystem`."""

    def __init__(self, store: MemoryStore) -> None:
        self.fs = FaultyFileSystem(fsspec.filesystem("memory"))
        self.store = store
        super().__init__(store.url, filesystem=self.fs)


@pytest.fixture
def faulty() -> Any:
    store = MemoryStore()
    yield Faulty(store)
    store.close()


def _load(faulty: Faulty, **options: Any) -> None:
    assert_bits_equal(faulty.load("run", STATE, **options), STATE)


def test_one_write_for_each_file_and_nothing_is_moved_or_listed(faulty: Faulty) -> None:
    faulty.save("run", STATE, **SMALL)
    assert faulty.fs.count("pipe_file", "*.distcp") == len(faulty.store.raw_list()) - 2
    assert {call.verb for call in faulty.fs.calls} <= {"pipe_file", "cat_file", "invalidate_cache"}


@pytest.mark.parametrize("file", ["*.distcp", "*/checksums*", "*/.metadata"])
def test_a_write_whose_answer_was_lost_is_made_again(file: str, faulty: Faulty) -> None:
    faulty.fs.inject("pipe_file", Fail(ConnectionResetError("lost"), carried_out=True), path=file)
    faulty.save("run", STATE, **SMALL)
    _load(faulty)


def test_without_patience_a_fault_that_passes_is_final(faulty: Faulty) -> None:
    faulty.fs.inject("pipe_file", Fail(ConnectionResetError("broken")), path="*.distcp", nth=2)
    error = failure_of(lambda: faulty.save("run", STATE, retry_seconds=0, **SMALL))
    assert isinstance(error, StorageWriteError)
    assert faulty.store.raw_list() == {}


def test_an_answer_that_was_cut_is_asked_for_again(faulty: Faulty) -> None:
    faulty.save("run", STATE, **SMALL)
    faulty.fs.inject("cat_file", Truncate(), path="*.distcp", nth=2)
    _load(faulty)


def test_a_slow_shard_file_is_waited_for(faulty: Faulty) -> None:
    faulty.fs.inject("pipe_file", Delay(0.05), path="*__0_0.distcp")
    faulty.save("run", STATE, **SMALL)
    names = [call.path.rpartition("/")[2] for call in faulty.fs.calls if call.verb == "pipe_file"]
    assert names[-2:] == ["checksums.json", ".metadata"]
    assert "__0_0.distcp" in names[:-2]
    _load(faulty)


@pytest.mark.parametrize("fault", [Drop(), Truncate(), Flip()], ids=["drop", "truncate", "flip"])
def test_a_store_that_lies_about_a_write_is_found_out_when_loading(fault: Any, faulty: Faulty) -> None:
    faulty.fs.inject("pipe_file", fault, path="*.distcp", nth=2)
    faulty.save("run", STATE, **SMALL)
    error = failure_of(lambda: faulty.load("run", STATE))
    assert isinstance(error, CorruptCheckpointError)
    assert ".distcp" in str(error)


def test_python_values_are_checked_too(faulty: Faulty) -> None:
    faulty.save("run", {"text": "a" * 1000, "tensor": torch.zeros(0)})
    faulty.fs.inject("cat_file", Flip(), path="*.distcp", times=None)
    assert isinstance(failure_of(lambda: faulty.load("run", {"text": ""})), CorruptCheckpointError)
