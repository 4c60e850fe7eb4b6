"""Upload in the background: by a thread, or by a process beside the trainer. Both keep the protocol of `uploading`.

One snapshot at a time: its memory is used again by the next one. What ends an upload is told once, by `wait`.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group
from dcp_fsspec.checkpointer.layout import folder_of
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import IterationWriter, WriteOptions
from dcp_fsspec.checkpointer.snapshot import Snapshot
from dcp_fsspec.checkpointer.staging import Stager
from dcp_fsspec.checkpointer.uploading import run
from dcp_fsspec.errors import AsyncSaveError, DcpFsspecError
from dcp_fsspec.storage import tracing

logger = logging.getLogger(__name__)


class Staging:
    """The part that both have in common: a snapshot is staged, and handed over as soon as its copies are complete.

    Args:
        shared: The memory is for another process as well.
        hand_over: What takes the staged snapshot.
        url: Of the checkpoints, for the trace.
        options: Of the writer, which say whether there is a trace.
    """

    def __init__(self, *, shared: bool, hand_over: Callable[[Snapshot], None], url: str, options: WriteOptions) -> None:
        self.stager = Stager(shared=shared)
        self._hand_over = hand_over
        self._url, self._trace_folder = url, options.writer.get("trace")
        self._trace = tracing.OFF
        self._staged: Snapshot | None = None
        self.is_pending = False
        """Whether a snapshot was submitted and is not handed over yet."""

    def stage(self, snapshot: Snapshot) -> None:
        """Begin to copy `snapshot`; copies from a GPU go on after this returns."""
        self._trace = tracing.begin("stage", f"{self._url}/{folder_of(snapshot.iteration)}", self._trace_folder)
        with self._trace.span("stage"):
            self._staged = self.stager.stage(snapshot)

    def submit(self, *, wait: bool) -> None:
        """Hand the snapshot over: now, or when its copies are complete."""
        self.is_pending = True
        if wait:
            self.finish()
        else:
            self.advance()

    def advance(self) -> None:
        """Hand the snapshot over if its copies are complete."""
        if self.is_pending and self.stager.is_ready():
            self.finish()

    def finish(self) -> None:
        """Wait for the copies, and hand the snapshot over if it was submitted."""
        with self._trace.span("wait for copies"):
            self.stager.synchronize()
        if self.is_pending and self._staged is not None:
            snapshot, self._staged, self.is_pending = self._staged, None, False
            self._hand_over(snapshot)
        self._trace.write()
        self._trace = tracing.OFF


class Deadline:
    """Until when an upload may take.

    Args:
        iteration: What is uploaded.
        timeout_seconds: How long it may take, from now on.
    """

    def __init__(self, iteration: int, timeout_seconds: float) -> None:
        self.iteration = iteration
        self._timeout_seconds = timeout_seconds
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._began

    @property
    def left_seconds(self) -> float:
        """How long it may still take; negative if it is late."""
        return self._timeout_seconds - self.seconds

    def failed(self, error: BaseException, *, may_be_committed: bool) -> Outcome:
        """Return the outcome of an upload that nobody knows the end of."""
        return Outcome(self.iteration, self.seconds, error=error, may_be_committed=may_be_committed)

    def late(self) -> AsyncSaveError:
        """Return the error for an upload that takes too long."""
        return AsyncSaveError(
            f"the upload of iteration {self.iteration} was given up after {self._timeout_seconds:.0f} s. Look at the "
            "store and the network, or raise upload_timeout_seconds."
        )


class _Upload(threading.Thread):
    """One upload. It has all that it changes to itself, so that one which was given up cannot touch the next.

    Args:
        writer: What it uses.
        snapshot: What it uploads.
        deadline: Until when.
        rank: This rank.
    """

    def __init__(
        self,
        writer: IterationWriter,
        snapshot: Snapshot,
        deadline: Deadline,
        rank: int,
    ) -> None:
        # A daemon, so that one which hangs cannot keep the program from ending; see before_threads_end.
        super().__init__(name="dcp_fsspec_upload", daemon=True)
        self.deadline = deadline
        self.outcome: Outcome | None = None
        self._writer = writer
        self._snapshot: Snapshot | None = snapshot
        self._rank = rank
        self._lock = threading.Lock()
        self._given_up = False
        self._committing = False

    def run(self) -> None:
        """Called by the thread."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        try:
            outcome = run(self._writer, snapshot, self._before_commit)
        except BaseException as error:
            outcome = self.deadline.failed(error, may_be_committed=self._committing)
        if outcome.error is not None:
            settle_traceback(outcome.error, f"in the upload thread of rank {self._rank}")
        self.outcome = outcome

    def _before_commit(self) -> None:
        with self._lock:
            if self._given_up:
                raise self.deadline.late()
            self._committing = True

    def give_up(self) -> Outcome:
        """Leave it to itself. It commits nothing from now on, unless it is at that already."""
        with self._lock:
            self._given_up = True
        return self.deadline.failed(self.deadline.late(), may_be_committed=self._committing)


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
        self._staging = self._make_staging()
        self._writer: IterationWriter | None = None
        self._deadline: Deadline | None = None
        self._upload: _Upload | None = None
        self._make_writer()
        before_threads_end(self._at_exit)

    def _make_staging(self) -> Staging:
        return Staging(shared=False, hand_over=self._begin, url=self._catalog.url, options=self._options)

    def _make_writer(self) -> None:
        # A group of its own: what runs beside the training must not mix with the training's collectives.
        group = Group(self._trainers.process_group, own=True, timeout_seconds=self._timeout_seconds)
        self._writer = IterationWriter(self._catalog.copy(), group, self._options)

    def start(self) -> None:
        """Make a new group if an upload broke the old one on any rank. Collective."""
        if any(self._trainers.gather(self._writer is None)):
            self._make_writer()

    def stage(self, snapshot: Snapshot) -> None:
        """Copy `snapshot`."""
        self._staging.stage(snapshot)
        self._deadline = Deadline(snapshot.iteration, self._timeout_seconds)

    def submit(self, *, wait_for_staging: bool) -> None:
        """Begin to upload it."""
        self._staging.submit(wait=wait_for_staging)

    def finish_staging(self) -> None:
        """Wait until the job's tensors may be changed again."""
        self._staging.finish()

    def _begin(self, snapshot: Snapshot) -> None:
        assert self._deadline is not None
        assert self._writer is not None
        self._upload = _Upload(self._writer, snapshot, self._deadline, self._trainers.rank)
        self._upload.start()

    def is_busy(self) -> bool:
        """Tell whether an upload is under way."""
        self._staging.advance()
        if self._staging.is_pending:
            return True
        upload = self._upload
        return upload is not None and upload.is_alive() and upload.deadline.left_seconds > 0

    def wait(self, timeout_seconds: float | None) -> Outcome | None:
        """Return the outcome of the upload, once."""
        self._staging.finish()
        upload = self._upload
        if upload is None:
            return None
        left = max(0.0, upload.deadline.left_seconds)
        upload.join(left if timeout_seconds is None else min(timeout_seconds, left))
        outcome = upload.outcome
        if outcome is None:
            if upload.deadline.left_seconds > 0:
                return None
            outcome = upload.give_up()
            # It hangs, with its memory and its group: leave both to it.
            self._staging = self._make_staging()
            self._writer = None
        elif outcome.error is not None and not is_agreed(outcome.error):
            self._writer = None
        self._upload = None
        return outcome

    def close(self) -> None:
        """Give the memory back."""
        if not self.is_busy():
            self._staging.stager.close()

    def _at_exit(self) -> None:
        report_at_exit(self.wait, self._upload.deadline.iteration if self._upload is not None else None)


def is_agreed(error: BaseException) -> bool:
    """Tell whether all ranks know of `error`, so that their group can go on: it did not come from the group itself."""
    return isinstance(error, DcpFsspecError | OSError | CheckpointException)


def settle_traceback(error: BaseException, where: str) -> None:
    """Keep the traceback of `error` as text only: its frames hold the memory that the upload used."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"{where}:\n{text}")
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        links += [link.__cause__, link.__context__]


def report_at_exit(wait: Callable[[float | None], Outcome | None], iteration: int | None) -> None:
    """Wait for the upload when the program ends, and say loudly if an iteration that it believes to have saved is lost.

    Args:
        wait: Waits for the upload.
        iteration: What is uploaded, if anything is.
    """
    try:
        outcome = wait(None)
    except BaseException as error:
        logger.error("the program was stopped before iteration %s was saved: %r", iteration, error)
        raise
    if outcome is not None and outcome.error is not None:
        logger.error(
            "the program ends and iteration %d was NOT saved: %s\n%s",
            outcome.iteration,
            outcome.error,
            "".join(traceback.format_exception(outcome.error)),
        )


def before_threads_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the program ends, while threads can still be started; not when a forked copy of it does.

    ``atexit`` comes too late: the pools that upload refuse work by then. Python has no public hook for this moment;
    the pools of ``concurrent.futures`` use the same one, and the last one registered runs first.
    """
    pid = os.getpid()
    threading._register_atexit(  # type: ignore[attr-defined]
        lambda: callback() if os.getpid() == pid else None
    )
