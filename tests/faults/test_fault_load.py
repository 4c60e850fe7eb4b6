"""One rank cannot read: every rank learns what and where, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from support.checkpoints import Failure, assert_loads, fails, impatient, load, save, threads_of_ours
from support.faultproxy import Corrupt, Cut, FaultProxy, Reset, Status
from support.faults import Action, Exchange
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = [pytest.mark.distributed, pytest.mark.server]

SHARD_BYTES = 64 << 10


@dataclass(frozen=True)
class Fault:
    """One rank's GET of the file `name` meets `action`."""

    rank: int
    name: str
    action: Action
    cause: str


FAULTS = {
    "server_error": Fault(2, "__2_1.distcp", Status(500, "InternalError"), "StorageReadError"),
    "reset": Fault(0, "__0_0.distcp", Reset(), "StorageReadError"),
    "cut": Fault(1, "__1_2.distcp", Cut(), "StorageReadError"),
    "missing": Fault(3, "__3_1.distcp", Status(404, "NoSuchKey"), "CorruptCheckpointError"),
    "wrong_bytes": Fault(1, "__1_0.distcp", Corrupt(), "CorruptCheckpointError"),
    "metadata_denied": Fault(3, ".metadata", Status(403, "AccessDenied"), "StorageReadError"),
    "metadata_missing": Fault(2, ".metadata", Status(404, "NoSuchKey"), "CheckpointNotFoundError"),
    "metadata_of_coordinator": Fault(0, ".metadata", Status(500, "InternalError"), "StorageReadError"),
    "checksums": Fault(1, "checksums.json", Status(500, "InternalError"), "StorageReadError"),
}


def _state(rank: int) -> dict[str, Any]:
    return {f"rank{rank}.{number}": random_tensor(15_000, seed=10 * rank + number) for number in range(3)}


def _arguments(rank: int, store_options: dict[str, Any]) -> dict[str, Any]:
    return impatient(store_options, user_agent_extra=f"rank/{rank}.")


def _by_rank(rank: int) -> Callable[[Exchange], bool]:
    return lambda exchange: f"rank/{rank}." in exchange.headers["user-agent"]


def _save_all(rank: int, urls: dict[str, str], options: dict[str, Any]) -> None:
    for url in urls.values():
        save(_state(rank), url, shard_bytes=SHARD_BYTES, **_arguments(rank, options))


def _load_all(rank: int, urls: dict[str, str], options: dict[str, Any]) -> dict[str, Failure]:
    seen = {}
    for name, url in urls.items():
        with fails() as failure:
            load(_state(rank), url, **_arguments(rank, options))
        dist.barrier()
        assert threads_of_ours() == []
        seen[name] = failure
    return seen


def _load_well(rank: int, urls: dict[str, str], options: dict[str, Any]) -> None:
    for url in urls.values():
        assert_loads(_state(rank), url, **_arguments(rank, options))
    assert threads_of_ours() == []


def test_fault_in_any_read_of_any_rank_is_raised_on_all_and_the_next_load_is_right(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    options = proxied_store.storage_options
    urls = {name: proxied_store.below(name) for name in FAULTS}
    values(four_ranks.run(_save_all, urls, options))
    for name, fault in FAULTS.items():
        where = f"*/{name}/{fault.name}"
        proxy.add(fault.action, operation="GET", key=where, when=_by_rank(fault.rank), times=None)

    of_ranks = values(four_ranks.run(_load_all, urls, options))

    for name, fault in FAULTS.items():
        for failures in of_ranks:
            assert failures[name].ranks == [fault.rank], (name, failures[name].text)
            failures[name].names(f"RANK {fault.rank}", f"{urls[name]}/{fault.name}", fault.cause)

    proxy.clear()
    values(four_ranks.run(_load_well, urls, options))
