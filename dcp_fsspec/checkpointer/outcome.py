"""How a save ended."""

import dataclasses

from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.storage.report import speed_text


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the save of one iteration ended.

    Attributes:
        iteration: The training iteration.
        seconds: From the snapshot to the commit, or to the failure.
        record: What was committed; None after a failure.
        error: Why nothing was committed; None after a success.
        num_requests: Calls made to the filesystem by all ranks.
        num_retries: Those of them that repeated a failed one.
        may_be_committed: After a failure: the commit was under way, and may still arrive at the store.
    """

    iteration: int
    seconds: float
    record: CommitRecord | None = None
    error: BaseException | None = None
    num_requests: int = 0
    num_retries: int = 0
    may_be_committed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard files of all ranks."""
        return sum(one.num_bytes for one in self.record.components.values()) if self.record else 0

    @property
    def numbers(self) -> dict[str, float]:
        """The save in plain numbers, by name: for a log, a graph, an alarm."""
        return {
            "seconds": self.seconds,
            "bytes": self.num_bytes,
            "bytes_per_second": self.num_bytes / self.seconds if self.seconds else 0.0,
            "requests": self.num_requests,
            "retries": self.num_retries,
        }

    def __str__(self) -> str:
        """Return one line for a log."""
        if self.record is None:
            return f"iteration {self.iteration} was not saved: {self.error}"
        return (
            f"iteration {self.iteration} saved: {speed_text(self.num_bytes, self.seconds)}, "
            f"{self.num_requests} requests, {self.num_retries} retries"
        )
