"""What several ranks need alike is read from the store by one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter, StorageReadError
from dcp_fsspec.storage import filesystem
from support.ranks import RankPool, values
from support.tensors import assert_bits_equal, random_tensor

pytestmark = pytest.mark.distributed

MIB = 1 << 20


def _whole() -> dict[str, torch.Tensor]:
    return {
        **{f"layer{number}": random_tensor(1024, 1031, seed=number) for number in range(6)},
        "half": random_tensor(700, 640, seed=90).to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "empty": torch.empty(0, 3),
    }


def _laid_out(kind: str) -> dict[str, Any]:
    whole = _whole()
    if kind == "plain":
        return dict(whole)
    if kind == "replicated":
        mesh = init_device_mesh("cpu", (4,))
        return {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in whole.items()}
    mesh2 = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    state: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(whole.items()):
        mixed = kind == "mixed" and number % 2
        is_sharded = tensor.dim() > 0 and not mixed
        state[name] = distribute_tensor(tensor, mesh2, placements) if is_sharded else tensor
    return state


def _save(rank: int, url: str, kind: str) -> None:
    dcp.save(_laid_out(kind), storage_writer=FsspecStorageWriter(url))


def _load(rank: int, url: str, kind: str, settings: dict[str, Any]) -> tuple[int, int]:
    state = _laid_out(kind)
    for value in state.values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    reader = FsspecStorageReader(url, **settings)
    dcp.load(state, storage_reader=reader)
    expected = _laid_out(kind)
    for name, value in state.items():
        mine, right = (one.to_local() if isinstance(one, DTensor) else one for one in (value, expected[name]))
        assert_bits_equal({name: mine}, {name: right})
    return reader.last_report.num_bytes, reader.last_report.num_bytes_received


@pytest.mark.parametrize("kind", ["plain", "replicated", "hsdp", "mixed"])
def test_the_ranks_fetch_each_byte_once_in_all(kind: str, four_ranks: RankPool, tmp_path: Path) -> None:
    url = str(tmp_path)
    values(four_ranks.run(_save, url, kind))
    num_bytes = sum(tensor.nbytes for tensor in _whole().values())
    fetched = values(four_ranks.run(_load, url, kind, {}))
    assert sum(one for one, _ in fetched) <= 1.05 * num_bytes
    assert all(received for _, received in fetched)
    assert max(one for one, _ in fetched) < 0.5 * num_bytes, "one rank reads for all"
    alone = values(four_ranks.run(_load, url, kind, {"read_once": False}))
    assert all(received == 0 for _, received in alone)


def test_small_buckets_and_small_budgets_carry_the_same_bits(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save, str(tmp_path), "mixed"))
    values(four_ranks.run(_load, str(tmp_path), "mixed", {"memory_budget_bytes": MIB}))


def _load_other_dtype_on_one_rank(rank: int, url: str) -> None:
    whole = _whole()
    state = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    if rank == 2:
        state["layer3"] = state["layer3"].double()
    dcp.load(state, storage_reader=FsspecStorageReader(url))
    for name, tensor in state.items():
        assert_bits_equal({name: tensor}, {name: whole[name].to(tensor.dtype)})


def test_a_rank_with_another_dtype_reads_for_itself(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save, str(tmp_path), "plain"))
    values(four_ranks.run(_load_other_dtype_on_one_rank, str(tmp_path)))


def _load_different_keys(rank: int, url: str) -> None:
    whole = _whole()
    keys = {0: ["layer0", "layer1", "step"], 1: ["layer1", "layer2"], 2: [], 3: ["layer1", "layer5", "half"]}[rank]
    state = {name: torch.zeros_like(whole[name]) for name in keys}
    dcp.load(state, storage_reader=FsspecStorageReader(url))
    assert_bits_equal(state, {name: whole[name] for name in keys})


def test_ranks_that_want_different_things_or_nothing_get_what_they_want(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save, str(tmp_path), "plain"))
    values(four_ranks.run(_load_different_keys, str(tmp_path)))


def _load_alone(rank: int, url: str) -> None:
    if rank != 1:
        return
    state = {name: torch.zeros_like(tensor) for name, tensor in _whole().items()}
    dcp.load(state, storage_reader=FsspecStorageReader(url), no_dist=True)
    assert_bits_equal(state, _whole())


def _load_in_a_subgroup(rank: int, url: str, tell: bool) -> int:
    group = dist.new_group([1, 3])
    received = 0
    if rank in (1, 3):
        state = {name: torch.zeros_like(tensor) for name, tensor in _whole().items()}
        reader = FsspecStorageReader(url, process_group=group if tell else None)
        dcp.load(state, storage_reader=reader, process_group=group)
        assert_bits_equal(state, _whole())
        received = reader.last_report.num_bytes_received
    return received


def test_a_rank_alone_and_a_subgroup_load_without_waiting_for_the_others(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save, str(tmp_path), "plain"))
    values(four_ranks.run(_load_alone, str(tmp_path)))
    assert sum(values(four_ranks.run(_load_in_a_subgroup, str(tmp_path), False))) == 0
    assert all(values(four_ranks.run(_load_in_a_subgroup, str(tmp_path), True))[1::2])


def _load_with_a_fault(rank: int, url: str, faulty_rank: int, with_other_keys: bool) -> str:
    state = {name: torch.zeros_like(tensor) for name, tensor in _whole().items()}
    reader = FsspecStorageReader(url, retry_seconds=0)
    if rank == faulty_rank:
        filesystem.Store.read_range = _broken  # type: ignore[method-assign]
        filesystem.Store.read_into = _broken  # type: ignore[method-assign,assignment]
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        dist.barrier()
        return str(error)
    raise AssertionError("a load with a fault went well")


def _broken(self: filesystem.Store, name: str, *_: object) -> bytes:
    raise StorageReadError(f"{self.url_of(name)}: the cable is cut")


def test_when_a_reading_rank_fails_every_rank_hears_why(tmp_path: Path) -> None:
    with RankPool(4) as pool:  # The fault stays in its process.
        values(pool.run(_save, str(tmp_path), "plain"))
        for text in values(pool.run(_load_with_a_fault, str(tmp_path), 2, False, deadline_seconds=30)):
            assert "the cable is cut" in text
            assert "rank 2" in text or "rank:2" in text.replace(" ", "")


def _load_and_die(rank: int, url: str) -> str:
    import os

    state = {name: torch.zeros_like(tensor) for name, tensor in _whole().items()}
    if rank == 3:
        filesystem.Store.read_range = lambda *_: os._exit(9)  # type: ignore[method-assign,assignment]
        filesystem.Store.read_into = lambda *_: os._exit(9)  # type: ignore[method-assign,assignment]
    try:
        dcp.load(state, storage_reader=FsspecStorageReader(url))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def test_when_a_reading_rank_dies_the_others_end_by_the_timeout_of_their_group(tmp_path: Path) -> None:
    with RankPool(4) as pool:
        values(pool.run(_save, str(tmp_path), "plain"))
        outcomes = pool.run(_load_and_die, str(tmp_path), deadline_seconds=60, collective_timeout_seconds=10)
        for outcome in outcomes[:3]:
            assert "rror" in str(outcome.value or outcome.error), outcome
        assert outcomes[3].error is not None
