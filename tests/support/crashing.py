"""A save on a rank that SIGKILL ends at a chosen change of the store, or that is watched to learn what there are.

    changes = values(pool.run(save_until_killed, Victim(url, options, number=3)))
    strike = Strike(rank=1, change="pipe_file shard", number=0, arrives=True, whole_group=True)
    pool.run(save_until_killed, Victim(url, options, number=4, strike=strike))

A change is one call that writes: of the operating system for a local folder, of the filesystem for any other. Its name
says what is called and for what kind of file.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    changes = _Changes(victim.url, victim.strike if victim.strike and victim.strike.rank == rank else None, pids)
    arguments: dict[str, Any] = {}
    if victim.storage_options is None:
        changes.watch_system()
    else:
        filesystem = fsspec.filesystem("s3", **victim.storage_options)
        changes.watch(filesystem, "pipe_file")
        changes.watch(filesystem, "rm_file")
        arguments["filesystem"] = filesystem
    dist.barrier()
    state = state_of(victim.number, rank, dist.get_world_size())
    try:
        save(state, victim.url, shard_bytes=SHARD_BYTES, **arguments)
    finally:
        changes.unwatch()
    return changes.names


class _Changes:
    """Counts the calls that it watches, and strikes."""

    def __init__(self, url: str, strike: Strike | None, pids: list[int]) -> None:
        self.names: list[str] = []
        self._folder = url.partition("://")[2] or url
        self._strike, self._pids = strike, pids
        self._lock = threading.Lock()
        self._watched: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, verb: str, only: Callable[..., bool] = lambda *_: True) -> None:
        """Count the calls of `owner.verb` below the folder, or just above it, whose arguments satisfy `only`."""
        original = getattr(owner, verb)

        def watched(*arguments: Any, **options: Any) -> Any:
            path = _path_of(arguments[1] if verb in ("replace", "link") else arguments[0])
            if not path.startswith(os.path.dirname(self._folder)) or not only(*arguments):
                return original(*arguments, **options)
            due = self._count(f"{verb} {self._kind(path)}")
            if due and not due.arrives:
                self._kill(due)
            result = original(*arguments, **options)
            if due:
                self._kill(due)
            return result

        self._watched.append((owner, verb, original))
        setattr(owner, verb, watched)

    def watch_system(self) -> None:
        """Count what the operating system is told to change."""
        self.watch(os, "open", lambda _, flags, *__: bool(flags & os.O_WRONLY))
        for verb in ("mkdir", "writev", "fsync", "replace", "link", "unlink", "remove"):
            self.watch(os, verb)

    def unwatch(self) -> None:
        """Put everything back."""
        for owner, verb, original in self._watched:
            setattr(owner, verb, original)
        self._watched.clear()

    def _kind(self, path: str) -> str:
        if path == self._folder:
            return "folder"
        kinds = {".metadata": "commit", "checksums": "checksums", "__": "shard"}
        file = path.removeprefix(f"{self._folder}/")
        return next((kind for beginning, kind in kinds.items() if file.startswith(beginning)), "above")

    def _count(self, name: str) -> Strike | None:
        with self._lock:
            strike, number = self._strike, self.names.count(name)
            self.names.append(name)
        return strike if strike and (strike.change, strike.number) == (name, number) else None

    def _kill(self, strike: Strike) -> None:
        others = [pid for pid in self._pids if pid != os.getpid()]
        for pid in (*(others if strike.whole_group else ()), os.getpid()):
            os.kill(pid, signal.SIGKILL)


def _path_of(file: Any) -> str:
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
