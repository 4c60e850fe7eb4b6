"""B46: a stranger's checkpoint runs nothing; cut, flipped and emptied files are errors; honest old ones load."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_fsspec import CorruptCheckpointError, UnsafeCheckpointError
from support.checkpoints import assert_loads, fails, load, save
from support.stores import Store
from support.tensors import assert_bits_equal, blank_like, random_tensor

EVERYWHERE = ("path", "memory", "moto", "obstore", pytest.param("seaweed", marks=pytest.mark.server))
TENSORS = {f"tensor{number}": random_tensor(10_000, seed=number) for number in range(3)}
STATE: dict[str, Any] = {**TENSORS, "step": 12}

CALLS: list[str] = []


class Trap:
    """Runs `CALLS.append` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, ("sprung",)


def _spring(text: str) -> str:
    CALLS.append(text)
    return text


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def _shard_of(store: Store) -> str:
    (shard,) = (name for name in store.raw_list() if name.endswith(".distcp"))
    return shard


def test_b46_trap_works_when_it_is_unpickled() -> None:
    pickle.loads(pickle.dumps(Trap()))
    assert CALLS == ["sprung"]


@pytest.mark.parametrize("store", ["path"], indirect=True)
@pytest.mark.parametrize("content", [pickle.dumps(Trap()), pickle.dumps([1, {"a": Trap()}])], ids=["bare", "nested"])
def test_b46_metadata_that_would_run_code_is_refused_unrun(store: Store, content: bytes) -> None:
    save(STATE, store.below("c"), **store.arguments)
    store.raw_write("c/.metadata", content)
    with fails() as failure:
        load(STATE, store.below("c"), **store.arguments)
    assert isinstance(failure.causes[0], UnsafeCheckpointError)
    failure.names(store.below("c/.metadata"), "_spring")
    assert CALLS == []


@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_b46_real_metadata_with_a_trap_inside_is_refused_unrun(store: Store) -> None:
    save(STATE, store.below("c"), **store.arguments)
    metadata = pickle.loads(store.raw_read("c/.metadata"))
    metadata.planner_data = Trap()
    store.raw_write("c/.metadata", pickle.dumps(metadata))
    with fails() as failure:
        load(STATE, store.below("c"), **store.arguments)
    assert isinstance(failure.causes[0], UnsafeCheckpointError)
    assert CALLS == []


@pytest.mark.parametrize("store", ["path", "memory"], indirect=True)
def test_b46_value_that_would_run_code_is_refused_unrun_unless_trusted(store: Store) -> None:
    url = store.below("c")
    save({**TENSORS, "step": Trap()}, url, **store.arguments)
    with fails() as failure:
        load(STATE, url, **store.arguments)
    assert isinstance(failure.causes[0], UnsafeCheckpointError)
    failure.names("step", url, "trust_pickle")
    assert CALLS == []
    assert load(STATE, url, trust_pickle=True, **store.arguments)["step"] == "sprung"
    assert CALLS != []


@pytest.mark.parametrize("store", EVERYWHERE, indirect=True)
def test_b46_cut_shard_file_is_an_error_that_names_file_and_key(store: Store) -> None:
    url = store.below("c")
    save(TENSORS, url, **store.arguments)
    shard = _shard_of(store)
    whole = store.raw_read(shard)
    for left in (len(whole) - 50, 100, 0):
        store.raw_write(shard, whole[:left])
        with fails() as failure:
            load(TENSORS, url, **store.arguments)
        assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
        failure.names(store.below(shard), "tensor2")
    store.raw_delete(shard)
    with fails() as failure:
        load(TENSORS, url, **store.arguments)
    assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
    failure.names(store.below(shard))


@pytest.mark.parametrize("store", EVERYWHERE, indirect=True)
def test_b46_flipped_bit_in_any_tensor_is_an_error_that_names_it(store: Store) -> None:
    url = store.below("c")
    save(TENSORS, url, **store.arguments)
    shard = _shard_of(store)
    for number in range(3):
        # Items lie one after the other, each mostly payload.
        offset = int((number + 0.5) * store.raw_list()[shard] / 3)
        store.flip(shard, offset)
        with fails() as failure:
            load(TENSORS, url, **store.arguments)
        assert isinstance(failure.causes[0], CorruptCheckpointError)
        failure.names(f"tensor{number}", store.below(shard))
        store.flip(shard, offset)
    assert_loads(TENSORS, url, **store.arguments)


@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_b46_flipped_bit_anywhere_never_loads_wrong_values(store: Store) -> None:
    url = store.below("c")
    state = {"a": random_tensor(40, seed=1), "b": random_tensor(3, 5, seed=2), "n": 7}
    save(state, url, **store.arguments)
    shard = _shard_of(store)
    for offset in range(0, store.raw_list()[shard], 37):
        store.flip(shard, offset)
        with fails() as failure:
            load(state, url, **store.arguments)
        assert isinstance(failure.causes[0], CorruptCheckpointError)
        store.flip(shard, offset)


@pytest.mark.parametrize("store", ["path", "moto"], indirect=True)
@pytest.mark.parametrize("content", [b"", b"\x00", b"not a pickle", pickle.dumps(None), pickle.dumps({})])
def test_b46_empty_or_foreign_metadata_is_an_error_that_names_it(store: Store, content: bytes) -> None:
    url = store.below("c")
    save(TENSORS, url, **store.arguments)
    store.raw_write("c/.metadata", content)
    with fails() as failure:
        load(TENSORS, url, **store.arguments)
    assert isinstance(failure.causes[0], CorruptCheckpointError)
    failure.names(store.below("c/.metadata"))


@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_b46_metadata_cut_anywhere_is_an_error_that_names_it(store: Store) -> None:
    url = store.below("c")
    save(TENSORS, url, **store.arguments)
    whole = store.raw_read("c/.metadata")
    for length in range(1, len(whole), 97):
        store.raw_write("c/.metadata", whole[:length])
        with fails() as failure:
            load(TENSORS, url, **store.arguments)
        assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
        failure.names(store.below("c/.metadata"))


@pytest.mark.parametrize("store", ["path", "moto"], indirect=True)
def test_b46_lost_or_damaged_checksums_are_never_passed_over_in_silence(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    url = store.below("c")
    save(TENSORS, url, **store.arguments)
    for content in (b"", b"{}", b"[]", store.raw_read("c/checksums.json")[:-20]):
        store.raw_write("c/checksums.json", content)
        with fails() as failure:
            load(TENSORS, url, **store.arguments)
        assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
        failure.names(store.below("c/checksums.json"))
    store.raw_delete("c/checksums.json")
    assert_bits_equal(load(TENSORS, url, **store.arguments), TENSORS)
    assert any("checksums.json" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_b46_honest_checkpoint_of_stock_torch_still_loads(store: Store) -> None:
    state = {**STATE, "nested": {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a"]}, "empty": torch.empty(0, 3)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(store.below("c")))
    loaded = blank_like(state)
    loaded = load(state, store.below("c"), **store.arguments)
    assert_bits_equal(loaded, state)
