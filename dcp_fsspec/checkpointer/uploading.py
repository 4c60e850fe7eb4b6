"""What runs the writing of an iteration: here, in the calling thread. `background` has the others, by one protocol."""

import time
from typing import Protocol

from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import IterationWriter
from dcp_fsspec.checkpointer.snapshot import Snapshot


class Uploader(Protocol):
    """Takes one snapshot at a time and tells how its upload ended.

    `start` and `submit` are collective: all ranks call them in the same order. The others are not.
    """

    def start(self) -> None:
        """Make ready for the next snapshot; make anew what has died."""
        ...

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write `snapshot`, whose memory may be used again once `wait` has returned its outcome."""
        ...

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of what was submitted, once; None if there is none within the time.

        0: look, do not wait. None: wait for as long as the upload may take.
        """
        ...

    def close(self) -> None:
        """End all that runs, within a deadline. What is under way has been waited for."""
        ...


def run(writer: IterationWriter, snapshot: Snapshot) -> Outcome:
    """Write `snapshot` and return how that ended, whatever went wrong."""
    begin = time.monotonic()
    try:
        record = writer.write(snapshot)
    except (Exception, CheckpointException) as error:
        return Outcome(snapshot.iteration, time.monotonic() - begin, error=error)
    return Outcome(snapshot.iteration, time.monotonic() - begin, record)


class InlineUploader:
    """Writes in the calling thread: `submit` returns when all is done."""

    def __init__(self, writer: IterationWriter) -> None:
        self._writer = writer
        self._outcome: Outcome | None = None

    def start(self) -> None:
        """Nothing to make ready."""

    def submit(self, snapshot: Snapshot) -> None:
        """Write the snapshot."""
        self._outcome = run(self._writer, snapshot)

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome, once."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        """Nothing runs."""
