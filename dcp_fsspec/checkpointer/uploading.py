"""What runs the writing of an iteration: here, in the calling thread. `background` has the others, by one protocol."""

import time
from collections.abc import Callable
from typing import Protocol

from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import IterationWriter
from dcp_fsspec.checkpointer.snapshot import Snapshot


class Uploader(Protocol):
    """Takes one snapshot at a time and tells how its upload ended.

    `start` is collective: all ranks call it. After it, `stage`; and `submit` only if all ranks have staged.
    """

    def start(self) -> None:
        """Make ready for the next snapshot; make anew what has died."""
        ...

    def stage(self, snapshot: Snapshot) -> None:
        """Take what is to be written, with copies of its tensors.

        Raises:
            IncompatibleStateError, StorageWriteError: that is not possible; nothing is under way.
        """
        ...

    def submit(self, *, wait_for_staging: bool) -> None:
        """Begin to write it. Unless `wait_for_staging`, the job's tensors must not change until `finish_staging`."""
        ...

    def finish_staging(self) -> None:
        """Wait until the job's tensors may be changed again."""
        ...

    def is_busy(self) -> bool:
        """Tell whether an upload is under way."""
        ...

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of what was submitted, once; None if there is none within the time.

        0: look, do not wait. None: wait for as long as the upload may take.
        """
        ...

    def close(self) -> None:
        """End all that runs, within a deadline. What was under way has been waited for. May be called again."""
        ...


def run(writer: IterationWriter, snapshot: Snapshot, before_commit: Callable[[], None] = lambda: None) -> Outcome:
    """Write `snapshot` and return how that ended, whatever went wrong."""
    begin = time.monotonic()
    try:
        return writer.write(snapshot, before_commit)
    except (Exception, CheckpointException) as error:
        return Outcome(snapshot.iteration, time.monotonic() - begin, error=error)


class InlineUploader:
    """Writes in the calling thread: `submit` returns when all is done."""

    def __init__(self, writer: IterationWriter) -> None:
        self._writer = writer
        self._snapshot: Snapshot | None = None
        self._outcome: Outcome | None = None

    def start(self) -> None:
        """Nothing to make ready."""

    def stage(self, snapshot: Snapshot) -> None:
        """Take the snapshot as it is: the job waits."""
        self._snapshot = snapshot

    def submit(self, *, wait_for_staging: bool) -> None:
        """Write the snapshot."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        self._outcome = run(self._writer, snapshot)

    def finish_staging(self) -> None:
        """Nothing is copied."""

    def is_busy(self) -> bool:
        """Nothing runs."""
        return False

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome, once."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        """Nothing runs."""
