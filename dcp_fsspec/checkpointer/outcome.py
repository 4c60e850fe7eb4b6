"""How a save ended."""

import dataclasses

from dcp_fsspec.checkpointer.records import CommitRecord


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the save of one iteration ended.

    Attributes:
        iteration: The training iteration.
        seconds: From the snapshot to the commit, or to the failure.
        record: What was committed; None after a failure.
        error: Why nothing was committed; None after a success.
    """

    iteration: int
    seconds: float
    record: CommitRecord | None = None
    error: BaseException | None = None
