"""Upload in the background: by a thread, or by a process beside the trainer. Both keep the protocol of `uploading`.

One snapshot at a time: its memory is used again by the next one. What ends an upload is told once, by `wait`.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import IterationWriter, WriteOptions
from dcp_fsspec.checkpointer.snapshot import Snapshot
from dcp_fsspec.checkpointer.staging import Stager
from dcp_fsspec.checkpointer.uploading import run
from dcp_fsspec.errors import AsyncSaveError, DcpFsspecError

logger = logging.getLogger(__name__)


class Staging:
    """The part that both have in common: a snapshot is staged, and handed over as soon as its copies are complete.

    Args:
        shared: The memory is for another process as well.
        hand_over: What takes the staged snapshot.
    """

    def __init__(self, *, shared: bool, hand_over: Callable[[Snapshot], None]) -> None:
        self.stager = Stager(shared=shared)
        self._hand_over = hand_over
        self._staged: Snapshot | None = None
        self._submitted = False

    def stage(self, snapshot: Snapshot) -> None:
        """Begin to copy `snapshot`; copies from a GPU go on after this returns."""
        self._staged = self.stager.stage(snapshot)

    def submit(self, *, wait: bool) -> None:
        """Hand the snapshot over: now, or when its copies are complete."""
        self._submitted = True
        if wait:
            self.finish()
        else:
            self.advance()

    def advance(self) -> None:
        """Hand the snapshot over if its copies are complete."""
        if self._submitted and self.stager.is_ready():
            self.finish()

    def finish(self) -> None:
        """Wait for the copies, and hand the snapshot over if it was submitted."""
        self.stager.synchronize()
        if self._submitted and self._staged is not None:
            snapshot, self._staged, self._submitted = self._staged, None, False
            self._hand_over(snapshot)


class ThreadUploader:
    """Uploads in a thread of this process.

    Args:
        catalog: Where to; a copy of its own is used.
        group: The ranks; a gloo group of its own is made.
        options: For the writer.
        timeout_seconds: An upload that takes longer is given up.
    """

    def __init__(self, catalog: Catalog, group: Group, options: WriteOptions, timeout_seconds: float) -> None:
        self._catalog = catalog
        self._trainers = group
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._staging = Staging(shared=False, hand_over=self._begin)
        self._writer: IterationWriter | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._iteration = 0
        self._began = 0.0
        self._make_writer()
        before_threads_end(self._at_exit)

    def _make_writer(self) -> None:
        # A group of its own: what runs beside the training must not mix with the training's collectives.
        group = Group(self._trainers.process_group, own=True)
        self._writer = IterationWriter(self._catalog.copy(), group, self._options)

    def start(self) -> None:
        """Make a new group if an upload broke the old one on any rank. Collective."""
        if any(self._trainers.gather(self._writer is None)):
            self._make_writer()

    def stage(self, snapshot: Snapshot) -> None:
        """Copy `snapshot`."""
        self._iteration, self._began, self._outcome = snapshot.iteration, time.monotonic(), None
        self._staging.stage(snapshot)

    def submit(self, *, wait_for_staging: bool) -> None:
        """Begin to upload it."""
        self._staging.submit(wait=wait_for_staging)

    def finish_staging(self) -> None:
        """Wait until the job's tensors may be changed again."""
        self._staging.finish()

    def _begin(self, snapshot: Snapshot) -> None:
        # A daemon, so that one which hangs cannot keep the program from ending; see before_threads_end.
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="dcp_fsspec_upload", daemon=True)
        self._thread.start()

    def _run(self, snapshot: Snapshot) -> None:
        assert self._writer is not None
        try:
            outcome = run(self._writer, snapshot)
        except BaseException as error:
            outcome = Outcome(snapshot.iteration, time.monotonic() - self._began, error=error)
        if outcome.error is not None and not is_agreed(outcome.error):
            self._writer = None
        self._outcome = outcome

    def is_busy(self) -> bool:
        """Tell whether an upload is under way."""
        self._staging.advance()
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of the upload, once."""
        self._staging.finish()
        if self._thread is None:
            return None
        left = self._timeout_seconds - (time.monotonic() - self._began)
        self._thread.join(max(0.0, left if timeout_seconds is None else min(timeout_seconds, left)))
        if self._thread.is_alive():
            if timeout_seconds is not None and left > timeout_seconds:
                return None
            self._outcome = Outcome(
                self._iteration, self._timeout_seconds, error=late(self._iteration, self._timeout_seconds)
            )
            # It hangs, with its memory and its group: leave both to it.
            self._writer = None
            self._staging = Staging(shared=False, hand_over=self._begin)
        self._thread = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        """Give the memory back."""
        if not self.is_busy():
            self._staging.stager.close()

    def _at_exit(self) -> None:
        report_at_exit(self.wait(None))


def is_agreed(error: BaseException) -> bool:
    """Tell whether all ranks know of `error`, so that their group can go on: it did not come from the group itself."""
    return isinstance(error, DcpFsspecError | OSError | CheckpointException)


def late(iteration: int, timeout_seconds: float) -> AsyncSaveError:
    """Return the error for an upload that takes too long."""
    return AsyncSaveError(
        f"the upload of iteration {iteration} was given up after {timeout_seconds:.0f} s. Look at the store and the "
        "network, or raise upload_timeout_seconds."
    )


def report_at_exit(outcome: Outcome | None) -> None:
    """Say loudly that the program ends without an iteration that it believes to have saved."""
    if outcome is not None and outcome.error is not None:
        logger.error(
            "the program ends and iteration %d was NOT saved: %s\n%s",
            outcome.iteration,
            outcome.error,
            "".join(traceback.format_exception(outcome.error)),
        )


def before_threads_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the program ends, while threads can still be started.

    ``atexit`` comes too late: the pools that upload refuse work by then. Python has no public hook for this moment;
    the pools of ``concurrent.futures`` use the same one, and the last one registered runs first.
    """
    threading._register_atexit(callback)  # type: ignore[attr-defined]
