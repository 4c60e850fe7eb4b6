"""A save on a rank that SIGKILL ends at a chosen change of the store, or that is watched to learn what there are.

changes = values(pool.run(save_until_killed, Victim(url, options, number=3)))
strike = Strike(rank=1, change="pipe_file shard", number=0, arrives=True, whole_group=True)
pool.run(save_until_killed, Victim(url, options, number=4, strike=strike))
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from support.changes import Change, Changes

SHARD_BYTES = 64 << 10
NUM_TENSORS = 4


@dataclass(frozen=True)
class Strike:
    """When SIGKILL comes.

    Attributes:
        rank: whose change it is.
        change: name of the change.
        number: how many changes of that name this rank makes before it.
        arrives: it comes just after the change; else just before.
        whole_group: all ranks are killed, else that one alone.
    """

    rank: int
    change: str
    number: int
    arrives: bool
    whole_group: bool

    def hits(self, change: Change) -> bool:
        return (change.name, change.number) == (self.change, self.number)


@dataclass(frozen=True)
class Victim:
    """What the ranks save, and when they are killed.

    Attributes:
        url: of the checkpoint.
        storage_options: of s3fs, or None for a local folder.
        number: of the state, see `state_of`.
        strike: None to let them live.
    """

    url: str
    storage_options: dict[str, Any] | None
    number: int
    strike: Strike | None = None


def state_of(number: int, rank: int = 0, num_ranks: int = 1) -> dict[str, Any]:
    """Return a rank's part of one of many states of the same keys and shapes, no two alike in any item."""
    from support.tensors import random_tensor

    tensors = {f"tensor{key}": random_tensor(15_000, seed=100 * number + key) for key in range(NUM_TENSORS)}
    own = {name: tensor for key, (name, tensor) in enumerate(tensors.items()) if key % num_ranks == rank}
    return {**own, "shared": random_tensor(500, seed=100 * number + 50), "number": number}


def save_until_killed(rank: int, victim: Victim) -> list[str]:
    """Save, if we live; return the names of this rank's changes, in order."""
    import fsspec
    import torch.distributed as dist

    from support.checkpoints import save

    pids: list[Any] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    strike = victim.strike if victim.strike and victim.strike.rank == rank else None
    names = []

    def before(change: Change) -> None:
        names.append(change.name)
        if strike and strike.hits(change) and not strike.arrives:
            _kill(pids if strike.whole_group else [])

    def after(change: Change) -> None:
        if strike and strike.hits(change):
            _kill(pids if strike.whole_group else [])

    arguments: dict[str, Any] = {}
    if victim.storage_options is not None:
        arguments["filesystem"] = fsspec.filesystem("s3", **victim.storage_options)
    state = state_of(victim.number, rank, dist.get_world_size())
    dist.barrier()
    with Changes(victim.url, arguments.get("filesystem"), before, after):
        save(state, victim.url, shard_bytes=SHARD_BYTES, **arguments)
    return names


def _kill(pids: list[int]) -> None:
    others = [pid for pid in pids if pid != os.getpid()]
    for pid in (*others, os.getpid()):
        os.kill(pid, signal.SIGKILL)
