"""What is on storage below a job's checkpoints folder, and every change of it: commit, advance, prune, sweep.

Usable without a trainer. Nothing here is collective: the checkpointer calls it on one rank, which tells the others.
The order of writes is what makes a crash harmless:

- an iteration is written completely, then ``commit.json`` makes it valid, then the pointer moves to it;
- an iteration goes the other way round: its commit record first, then all else;
- what a crash left without a commit record is removed before the iteration is written again, and by `Catalog.sweep`.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.folder import check_files, read_record, read_save_id
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.checkpointer.retention import Committed, RetentionPolicy
from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    DcpFsspecError,
    StorageWriteError,
    UncommittedCheckpointError,
)
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS

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


class Catalog:
    """The iterations below one folder. Not safe to use from several threads at once.

    Args:
        url: Url or path of the checkpoints folder.
        storage_options: As in fsspec.
        filesystem: An fsspec filesystem to use instead of one made from `url`.
        retry_seconds: As in `FsspecStorageWriter`.

    Raises:
        ConfigurationError: an argument that cannot work.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: AbstractFileSystem | None = None,
        retry_seconds: float = DEFAULT_PATIENCE_SECONDS,
    ) -> None:
        self.store = Store(url, storage_options, filesystem, retry_seconds)
        self._records: dict[int, CommitRecord] = {}

    @classmethod
    def of(cls, store: Store) -> "Catalog":
        """Return the catalog of the folder that `store` is."""
        catalog = cls.__new__(cls)
        catalog.store, catalog._records = store, {}
        return catalog

    def copy(self) -> "Catalog":
        """Return a catalog of the same folder, for another thread."""
        return Catalog.of(self.store.at(self.store.location))

    @property
    def url(self) -> str:
        """The checkpoints folder, without secrets."""
        return self.store.url

    def folder(self, iteration: int) -> Store:
        """Return the store of one iteration's folder."""
        return self.store.child(layout.folder_of(iteration))

    # Looking ---------------------------------------------------------------------------------------------

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
            data = self.store.read(layout.POINTER_NAME)
        except CheckpointNotFoundError:
            return None
        return data[:_MAX_POINTER_BYTES].decode(errors="replace").strip()

    def pointee(self) -> int | None:
        """Return the iteration that the pointer names, None if it names none."""
        return layout.iteration_of(self.pointer() or "")

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

    # Writing ---------------------------------------------------------------------------------------------

    def begin(self, iteration: int, *, overwrite: bool = False) -> None:
        """Make the folder of `iteration` empty for a save.

        A committed iteration beyond the one that the pointer names was abandoned: nothing resumes from it, and a job
        that went back to the pointer comes past it again. It is replaced, with a warning.

        Raises:
            CheckpointExistsError: `iteration` is committed and not beyond the pointer, and `overwrite` is false.
            StorageWriteError: leftovers could not be removed.
        """
        folder = self.folder(iteration)
        files = folder.list_files()
        if not files:
            return
        pointee = self.pointee()
        try:
            self.find(iteration, pointed=iteration == pointee)
        except (UncommittedCheckpointError, CheckpointNotFoundError):
            logger.info("%s: removing the leftovers of a save that was not completed", folder.url)
        else:
            if not overwrite and not (pointee is not None and iteration > pointee):
                raise CheckpointExistsError(
                    f"{folder.url} is committed already. Another job may be saving here: give each job a folder of "
                    "its own; or pass overwrite=True."
                )
            logger.warning("%s is committed and will be replaced", folder.url)
        self._remove(folder, files)

    def commit(self, record: CommitRecord, *, overwrite: bool = False) -> None:
        """Make an iteration valid: the one write that does.

        Raises:
            CheckpointExistsError: another job has committed the same iteration meanwhile.
            StorageWriteError: it is not committed; also if another job has changed the folder since.
        """
        folder = self.folder(record.iteration)
        check_files(record, folder)
        folder.prepare()
        folder.swap(layout.COMMIT_NAME, record.encode(), create_only=not overwrite)
        folder.flush()
        self._records[record.iteration] = record

    def advance(self, iteration: int, *, backward: bool = False) -> bool:
        """Let the pointer name `iteration`, which must be committed. Returns whether it does afterwards.

        Args:
            iteration: The iteration.
            backward: Allow to move it to an older iteration than it names now. It is moved in any case if what it
                names is gone or incomplete.

        Raises:
            CheckpointNotFoundError, UncommittedCheckpointError: it is not committed; the pointer stays.
            StorageWriteError: the pointer stays.
        """
        if iteration not in self._records:
            self.find(iteration, pointed=True)
        pointee = self.pointee()
        if pointee is not None and pointee > iteration and not backward and self._is_committed(pointee):
            logger.warning(
                "%s names iteration %d already and is not moved back to %d. Does another job save here?",
                self._pointer_url,
                pointee,
                iteration,
            )
            return False
        if pointee != iteration:
            self.store.prepare()
            self.store.swap(layout.POINTER_NAME, layout.pointer_text(iteration))
            self.store.flush()
        return True

    # Removing --------------------------------------------------------------------------------------------

    def prune(self, policy: RetentionPolicy, *, protected: Iterable[int] = (), dry_run: bool = False) -> list[int]:
        """Remove the committed iterations that `policy` does not keep, and return which.

        Never what the pointer names, never one of `protected`. Incomplete ones neither count nor go; see `sweep`.

        Args:
            policy: What to keep.
            protected: Iterations to keep in any case, such as one that is being written or read.
            dry_run: Only say which would go.
        """
        committed = [one for one in map(self._committed, self.iterations()) if one is not None]
        pointee = self.pointee()
        kept = policy.keep(committed) | set(protected) | ({pointee} if pointee is not None else set())
        goes = [one.iteration for one in committed if one.iteration not in kept]
        if pointee is None and goes and goes == [one.iteration for one in committed]:
            goes = goes[:-1]
        removed = []
        for iteration in goes:
            if not dry_run:
                try:
                    self.remove(iteration)
                except DcpFsspecError as error:
                    logger.warning("iteration %d could not be pruned, it will be tried again: %s", iteration, error)
                    continue
            removed.append(iteration)
        return removed

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

    def remove(self, iteration: int) -> None:
        """Remove one iteration. Not collective.

        Raises:
            ConfigurationError: the pointer names it.
            StorageWriteError: not all of it is gone; it is no longer committed.
        """
        if self.pointee() == iteration:
            raise ConfigurationError(f"{self._pointer_url} names iteration {iteration}; let it name another one first")
        folder = self.folder(iteration)
        self._remove(folder, folder.list_files())
        self._records.pop(iteration, None)

    def discard(self, iteration: int) -> None:
        """Remove what a failed save has left, on the way out with its error. A failure is logged.

        Nothing happens to an iteration that is committed.
        """
        folder = self.folder(iteration)
        try:
            if folder.exists(layout.COMMIT_NAME):
                return
            folder.remove_all(folder.list_files(), "left behind by a failed save")
        except DcpFsspecError as error:
            logger.warning("%s: leftovers of a failed save stay: %s", folder.url, error)

    def sweep(self, *, protected: Iterable[int] = (), dry_run: bool = False) -> dict[int, int]:
        """Remove what crashed saves and interrupted removals have left.

        Do not call it while another process saves here: a save that is not yet committed looks the same.

        Returns:
            By iteration, how many bytes it held.
        """
        swept = {}
        keep = set(protected)
        pointee = self.pointee()
        for iteration in self.iterations():
            if iteration in keep or iteration == pointee or self._committed(iteration) is not None:
                continue
            folder = self.folder(iteration)
            files = folder.list_files()
            if not files and not (folder.capabilities.local or folder.capabilities.folders):
                continue
            if not dry_run:
                self._remove(folder, files)
            swept[iteration] = sum(files.values())
        return swept

    def discard_save(self, iteration: int, save_ids: Mapping[str, str]) -> None:
        """Remove what a save that failed has written of `iteration`, and nothing of another save. A failure is logged.

        Args:
            iteration: The iteration.
            save_ids: The save, by component.
        """
        folder = self.folder(iteration)
        try:
            files = folder.list_files()
            for component, save_id in save_ids.items():
                store = folder.child(component)
                inside = [name.removeprefix(f"{component}/") for name in files if name.startswith(f"{component}/")]
                if metadata.FILE_NAME in inside and read_save_id(store) == save_id:
                    store.remove([metadata.FILE_NAME])
                own = [name for name in inside if layout.is_of_save(name, save_id) and name != metadata.FILE_NAME]
                store.remove_all(own, "left behind by a failed save")
        except DcpFsspecError as error:
            logger.warning("%s: leftovers of a failed save stay: %s", folder.url, error)

    def _remove(self, folder: Store, files: Mapping[str, int]) -> None:
        """Remove `files` of an iteration: first what makes it valid, each in an own request, then the rest."""
        if layout.COMMIT_NAME in files:
            folder.remove([layout.COMMIT_NAME])
        self._records.pop(layout.iteration_of(folder.url.rpartition("/")[2]) or -1, None)
        marks = [name for name in files if name.rpartition("/")[2] == metadata.FILE_NAME]
        folder.remove(marks)
        folder.remove(name for name in files if name not in marks and name != layout.COMMIT_NAME)
        left = folder.list_files()
        if layout.COMMIT_NAME in left:
            self._refuse_commit(folder)
        if left:
            raise StorageWriteError(
                f"{folder.url}: {len(left)} of {len(files)} files could not be removed, such as {min(left)}. "
                "Look at the permissions of the store."
            )
        folder.remove_folder()

    def _refuse_commit(self, folder: Store) -> None:
        """Deal with a commit record that another job has written while its iteration was being removed here.

        Raises:
            CheckpointExistsError: what it committed is whole, and stays.
            StorageWriteError: it lost files; the record has been removed, so that nobody takes it for a checkpoint.
        """
        other = "Another job is saving into the same folder; give each its own."
        record = read_record(folder)
        try:
            if record is not None:
                check_files(record, folder)
                raise CheckpointExistsError(f"{folder.url} has been committed meanwhile. {other}")
        except StorageWriteError as error:
            folder.remove([layout.COMMIT_NAME])
            raise StorageWriteError(
                f"{folder.url} has lost files to two jobs and is no longer committed. {other}"
            ) from error
