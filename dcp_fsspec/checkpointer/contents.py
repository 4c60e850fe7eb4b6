"""What is on storage below a job's checkpoints folder. It only looks."""

import logging
from collections.abc import Set
from dataclasses import dataclass

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.folder import read_record
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.checkpointer.retention import Committed
from dcp_fsspec.errors import CheckpointNotFoundError, UncommittedCheckpointError
from dcp_fsspec.storage.filesystem import Store

logger = logging.getLogger(__name__)

_MAX_POINTER_BYTES = 4096


@dataclass(frozen=True)
class Found:
    """A committed iteration.

    Attributes:
        iteration: The training iteration.
        record: Its commit record; None if other software wrote it.
        notes: What the user should know about how it was found.
    """

    iteration: int
    record: CommitRecord | None
    notes: tuple[str, ...] = ()


class Contents:
    """The iterations below one folder, and which of them is the latest; see `Catalog`, which also changes them.

    Args:
        store: The folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._records: dict[int, CommitRecord] = {}

    @property
    def url(self) -> str:
        """The checkpoints folder, without secrets."""
        return self.store.url

    def folder(self, iteration: int) -> Store:
        """Return the store of one iteration's folder."""
        return self.store.child(layout.folder_of(iteration))

    def iterations(self) -> list[int]:
        """Return the iterations that have a folder, committed or not, in order. One listing."""
        entries = self.store.list_folder()
        found = (layout.iteration_of(name) for name, is_folder in entries.items() if is_folder)
        return sorted(iteration for iteration in found if iteration is not None)

    def pointer(self) -> str | None:
        """Return what the pointer says, without whitespace around it; None if there is no pointer.

        Raises:
            StorageReadError: whether there is one could not be found out.
        """
        try:
            return pointer_says(self.store.read(layout.POINTER_NAME))
        except CheckpointNotFoundError:
            return None

    def pointee(self) -> int | None:
        """Return the iteration that the pointer names, None if it names none."""
        return layout.iteration_of(self.pointer() or "")

    def temporaries(self, before: float | None = None) -> list[str]:
        """Return the names of files that a crash while the pointer moved has left, or that are just being written.

        Args:
            before: Only those that were written before; seconds since 1970. None: all.
        """
        names = [name for name, is_folder in self.store.list_folder().items() if not is_folder]
        found = sorted(filter(layout.is_temporary_pointer, names))
        if before is None or not found:
            return found
        times = {name: when for name, (_, when) in self.store.list_times().items()}
        return [name for name in found if (when := times.get(name)) is not None and when <= before]

    def record(self, iteration: int) -> CommitRecord | None:
        """Return the commit record of `iteration`, None if there is none that can be read as one."""
        if iteration in self._records:
            return self._records[iteration]
        folder = self.folder(iteration)
        record = read_record(folder)
        if record is not None and record.iteration != iteration:
            logger.warning("%s holds the commit record of iteration %d; ignored", folder.url, record.iteration)
            return None
        return record

    def find(self, iteration: int, *, pointed: bool = False) -> Found:
        """Return the committed `iteration`.

        Committed is what has a commit record. Without one, written by other software: what has all of model, optim,
        scheduler and trainer complete or, if it is what the pointer names, all of the components that it has.

        Raises:
            CheckpointNotFoundError: there is no such folder.
            UncommittedCheckpointError: it is not complete; the message names what is missing.
        """
        record = self.record(iteration)
        if record is not None:
            return Found(iteration, record)
        folder = self.folder(iteration)
        files = folder.list_files()
        if not files:
            raise CheckpointNotFoundError(f"there is nothing at {folder.url}")
        missing = layout.missing_marks(files, all_standard=not pointed)
        if not missing:
            return Found(iteration, None)
        raise UncommittedCheckpointError(
            f"{folder.url} was never completed, or was removed in part: it has no {layout.COMMIT_NAME} that can be "
            f"read, and {', '.join(missing)}. Use an older iteration."
        )

    def latest(self) -> Found | None:
        """Return the iteration to resume from: what the pointer names, else the newest that is committed.

        Two requests when the pointer is good, one listing more when it is not.

        Raises:
            StorageReadError: that could not be found out, which is not the same as "there is none".
        """
        text = self.pointer()
        notes: list[str] = []
        pointee = layout.iteration_of(text) if text else None
        if pointee is not None:
            try:
                return self.find(pointee, pointed=True)
            except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
                notes.append(f"{self._pointer_url} names {text}, which cannot be used: {error}")
        elif text is not None:
            notes.append(f"{self._pointer_url} holds {text[:80]!r}, which names no iteration")
        return self._newest(notes, without=pointee)

    def _newest(self, notes: list[str], without: int | None) -> Found | None:
        for iteration in reversed(self.iterations()):
            if iteration == without:
                continue
            try:
                found = self.find(iteration)
            except (CheckpointNotFoundError, UncommittedCheckpointError) as error:
                notes.append(str(error))
                continue
            notes.append(f"{layout.folder_of(iteration)} is the newest that is committed")
            return Found(iteration, found.record, tuple(notes))
        for note in notes:
            logger.warning("%s", note)
        return None

    @property
    def _pointer_url(self) -> str:
        return self.store.url_of(layout.POINTER_NAME)

    def _is_committed(self, pointee: int) -> bool:
        try:
            self.find(pointee, pointed=True)
        except (CheckpointNotFoundError, UncommittedCheckpointError):
            return False
        return True

    def _committed(self, iteration: int) -> Committed | None:
        try:
            found = self.find(iteration)
        except (CheckpointNotFoundError, UncommittedCheckpointError):
            return None
        if found.record is not None:
            self._records[iteration] = found.record
        return Committed(iteration, found.record.metrics if found.record else {})

    def _committed_beyond(self, iteration: int) -> Set[int]:
        return {one for one in self.iterations() if one > iteration and self._committed(one) is not None}


def pointer_says(data: bytes) -> str:
    """Return what a pointer file of this content says, without whitespace around it."""
    return data[:_MAX_POINTER_BYTES].decode(errors="replace").strip()
