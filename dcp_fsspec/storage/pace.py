"""How many ranks ask a store for how much at a time: limits for a host, and starts that do not all fall together."""

import os
import threading
from dataclasses import dataclass

import torch.distributed as dist

from dcp_fsspec.errors import ConfigurationError
from dcp_fsspec.storage.tracing import Trace


@dataclass(frozen=True)
class Pace:
    """See `FsspecStorageWriter` and `FsspecStorageReader`.

    Attributes:
        max_per_host: Requests in flight of all ranks of one host; None: each rank counts for itself.
        stagger_seconds: Over how long a time the ranks begin.
        process_group: The ranks that save or load together; None: all.
    """

    max_per_host: int | None = None
    stagger_seconds: float = 0.0
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.max_per_host is not None and self.max_per_host < 1:
            raise ConfigurationError(f"max_concurrency_per_host must be at least 1, got {self.max_per_host}")
        if not 0 <= self.stagger_seconds < threading.TIMEOUT_MAX:
            raise ConfigurationError(f"stagger_seconds must be a time from 0 on, got {self.stagger_seconds}")

    def threads(self, num_threads: int) -> int:
        """Return how many of the `num_threads` that a rank would like to use are its part of what its host may."""
        return num_threads if self.max_per_host is None else min(num_threads, share(self.max_per_host, ranks_here()))

    def wait(self, stop: threading.Event, trace: Trace) -> None:
        """Wait until it is this rank's turn to begin, or until `stop` is set."""
        if self.stagger_seconds and dist.is_available() and dist.is_initialized():
            seconds = turn(
                self.stagger_seconds, dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
            )
            with trace.span("wait for the turn", seconds=seconds):
                stop.wait(seconds)


def ranks_here() -> int:
    """Return how many ranks of the job run on this host, by what the launcher says; 1 if it does not."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    return max(1, int(said)) if said.isdecimal() else 1


def share(limit: int, num_ranks: int) -> int:
    """Return each rank's part of a limit; a rank that could do nothing would never end."""
    return max(1, limit // num_ranks)


def turn(seconds: float, rank: int, num_ranks: int) -> float:
    """Return when `rank` begins if `num_ranks` spread over `seconds`: always the same, evenly, rank 0 at once."""
    return seconds * rank / num_ranks
