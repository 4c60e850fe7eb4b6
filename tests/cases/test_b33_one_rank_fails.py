"""B33: one rank fails, the others learn it at once instead of waiting for a timeout."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.checkpoints import Failure, assert_loads, fails, load, save, threads_of_ours
from support.ranks import RankPool, values
from support.tensors import random_tensor
from support.worlds import world

pytestmark = pytest.mark.distributed

NUM_RANKS = 3


def _state(rank: int) -> dict[str, Any]:
    return {f"rank{rank}": random_tensor(50_000, seed=rank), "step": 3}


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Let the system refuse this process files beyond 64 KiB, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_with_full_disk_on(failing: int, rank: int, url: str) -> Failure:
    with fails() as failure, _full_disk() if rank == failing else contextlib.nullcontext():
        save(_state(rank), url)
    dist.barrier()
    assert threads_of_ours() == []
    return failure


def _write(rank: int, folder: str) -> tuple[list[Failure], list[str]] | None:
    url = f"{folder}/checkpoint"
    with world(rank, NUM_RANKS, f"{folder}/write") as inside:
        if not inside:
            return None
        failures = [_save_with_full_disk_on(failing, rank, url) for failing in (1, 0)]
        dist.barrier()
        left = sorted(path.name for path in Path(url).iterdir())
        dist.barrier()
        save(_state(rank), url)
        assert_loads(_state(rank), url)
        return failures, left


def test_b33_every_rank_raises_when_one_cannot_write_and_the_next_save_is_good(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = four_ranks.run(_write, str(tmp_path), collective_timeout_seconds=40)
    for outcome in values(outcomes)[:NUM_RANKS]:
        of_rank_1, of_rank_0 = outcome[0]
        assert (of_rank_1.ranks, of_rank_0.ranks) == ([1], [0])
        of_rank_1.names("RANK 1", f"{tmp_path}/checkpoint/__1_0.distcp", "OSError", f"[Errno {errno.EFBIG}]")
        of_rank_0.names("RANK 0", f"{tmp_path}/checkpoint/__0_0.distcp")
        # What is left is whole: no metadata, no temporary file, nothing of the rank that failed last.
        assert set(outcome[1]) <= {"__1_0.distcp", "__2_0.distcp"}


def _read(rank: int, folder: str) -> list[Failure] | None:
    url = f"{folder}/checkpoint"
    with world(rank, NUM_RANKS, f"{folder}/read") as inside:
        if not inside:
            return None
        save(_state(rank), url)
        failures = []
        for name, own in (("__2_0.distcp", 2), (".metadata", 0)):
            path = Path(url, name)
            dist.barrier()
            if rank == own:
                path.rename(f"{path}.away")
            dist.barrier()
            with fails() as failure:
                load(_state(rank), url)
            failures.append(failure)
            dist.barrier()
            if rank == own:
                Path(f"{path}.away").rename(path)
            dist.barrier()
        assert_loads(_state(rank), url)
        assert threads_of_ours() == []
        return failures


def test_b33_every_rank_raises_when_one_cannot_read_and_the_next_load_is_good(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = four_ranks.run(_read, str(tmp_path), collective_timeout_seconds=40)
    for failures in values(outcomes)[:NUM_RANKS]:
        shard, metadata = failures
        assert shard.ranks == [2]
        shard.names("RANK 2", f"{tmp_path}/checkpoint/__2_0.distcp", "CorruptCheckpointError")
        assert metadata.ranks == [0, 1, 2]
        metadata.names("RANK 0", f"{tmp_path}/checkpoint", "CheckpointNotFoundError")
