"""One rank's upload fails: every rank learns it, nothing half-done is left, and the job goes on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from support.checkpoints import (
    Failure,
    assert_loads,
    fails,
    folder_files,
    impatient,
    open_uploads,
    save,
    threads_of_ours,
)
from support.faultproxy import CutUpload, FaultProxy, Reset, Status
from support.faults import Action
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = [pytest.mark.distributed, pytest.mark.server]

SHARD_BYTES = 64 << 10
FILES_A_RANK = 3


@dataclass(frozen=True)
class Fault:
    """One rank's n-th shard file, or a small file of the coordinator, meets `action`."""

    rank: int
    name: str
    action: Action
    cause: str


FAULTS = {
    "first_of_coordinator": Fault(0, "__0_0.distcp", Status(500, "InternalError"), "answered 500"),
    "last_of_rank_1": Fault(1, "__1_2.distcp", Status(500, "InternalError"), "answered 500"),
    "middle_of_rank_2": Fault(2, "__2_1.distcp", Reset(), "Connect"),
    "cut_on_its_way": Fault(3, "__3_0.distcp", CutUpload(), "Connect"),
    "denied": Fault(3, "__3_2.distcp", Status(403, "AccessDenied"), "PermissionError"),
    "checksums": Fault(0, "checksums.json", Status(500, "InternalError"), "answered 500"),
    "commit": Fault(0, ".metadata", Status(500, "InternalError"), "answered 500"),
}


def _state(rank: int) -> dict[str, Any]:
    own = {f"rank{rank}.{number}": random_tensor(15_000, seed=10 * rank + number) for number in range(FILES_A_RANK)}
    return {**own, "step": 7}


def _save_into(rank: int, urls: dict[str, str], arguments: dict[str, Any]) -> dict[str, Failure]:
    seen = {}
    for name, url in urls.items():
        with fails() as failure:
            save(_state(rank), url, shard_bytes=SHARD_BYTES, **arguments)
        dist.barrier()
        assert threads_of_ours() == []
        seen[name] = failure
    return seen


def _save_and_load(rank: int, urls: dict[str, str], arguments: dict[str, Any]) -> None:
    for url in urls.values():
        save(_state(rank), url, shard_bytes=SHARD_BYTES, **arguments)
        assert_loads(_state(rank), url, **arguments)
    assert threads_of_ours() == []


def test_fault_in_any_upload_of_any_rank_is_raised_on_all_and_leaves_nothing_half_done(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    arguments = impatient(proxied_store.storage_options)
    sound = {"sound": proxied_store.below("sound")}
    values(four_ranks.run(_save_and_load, sound, arguments))
    whole = folder_files(proxied_store, "sound")
    for name, fault in FAULTS.items():
        proxy.add(fault.action, operation="PUT", key=f"*/{name}/{fault.name}", times=None)

    urls = {name: proxied_store.below(name) for name in FAULTS}
    of_ranks = values(four_ranks.run(_save_into, urls, arguments))

    for name, fault in FAULTS.items():
        for failures in of_ranks:
            assert failures[name].ranks == [fault.rank]
            failures[name].names(f"RANK {fault.rank}", f"{urls[name]}/{fault.name}", fault.cause)
        left = folder_files(proxied_store, name)
        assert ".metadata" not in left
        shards = {file: data for file, data in left.items() if file.endswith(".distcp")}
        assert shards.items() <= whole.items(), "a file is not whole"
        if fault.name.startswith("__"):
            assert [file for file in left if file.startswith(f"__{fault.rank}_")] == []
    assert open_uploads(proxied_store) == []

    proxy.clear()
    values(four_ranks.run(_save_and_load, urls, arguments))


def _save_in_parts(rank: int, url: str, options: dict[str, Any], *, faulty: bool) -> Failure | None:
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    filesystem.pipe_file = functools.partial(filesystem.pipe_file, chunksize=5 << 20)
    state = {"large": torch.full((11 << 18,), rank + 1.0)} if rank == 1 else {f"small{rank}": torch.ones(3)}
    arguments = {"filesystem": filesystem, "retry_seconds": 0}
    if not faulty:
        save(state, url, shard_bytes=16 << 20, **arguments)
        assert_loads(state, url, **arguments)
        return None
    with fails() as failure:
        save(state, url, shard_bytes=16 << 20, **arguments)
    dist.barrier()
    assert threads_of_ours() == []
    return failure


def test_failed_part_of_a_multipart_upload_leaves_no_open_upload(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    options = impatient(proxied_store.storage_options)["storage_options"]
    url = proxied_store.below("parts")
    proxy.add(Status(500, "InternalError"), operation="PART", skip=1, times=None)
    for failure in values(four_ranks.run(functools.partial(_save_in_parts, faulty=True), url, options)):
        assert failure.ranks == [1]
        failure.names("RANK 1", f"{url}/__1_0.distcp")
    assert open_uploads(proxied_store) == []
    assert [name for name in proxied_store.raw_list() if "__1_" in name or name.endswith(".metadata")] == []

    proxy.clear()
    values(four_ranks.run(functools.partial(_save_in_parts, faulty=False), url, options))
    assert proxy.requests("COMPLETE_MPU")
