"""What is on storage below a job's checkpoints folder, and every change of it: commit, advance, prune, sweep.

Usable without a trainer. Nothing here is collective: the checkpointer calls it on one rank, which tells the others.
The order of writes is what makes a crash harmless:

- an iteration is written completely, then ``commit.json`` makes it valid, then the pointer moves to it;
- an iteration goes the other way round: its commit record first, then all else;
- what a crash left without a commit record is removed before the iteration is written again, and by `Catalog.sweep`.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

from fsspec import AbstractFileSystem

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.contents import Contents, pointer_says
from dcp_fsspec.checkpointer.folder import check_files, read_record, read_save_id
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.checkpointer.retention import RetentionPolicy
from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    DcpFsspecError,
    StorageWriteError,
    UncommittedCheckpointError,
)
from dcp_fsspec.storage import names
from dcp_fsspec.storage.conditional import exchange, guards
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS

logger = logging.getLogger(__name__)

_MAX_TURNS = 20
"""How often the pointer may change under the hands of one that moves it."""


class Catalog(Contents):
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
        self._over(Store(url, storage_options, filesystem, retry_seconds))

    def _over(self, store: Store) -> None:
        super().__init__(store)
        self._beyond: dict[int, Set[int]] = {}
        """By iteration that is being saved: later ones that were committed when that began."""
        self._conditions = True

    @classmethod
    def of(cls, store: Store) -> "Catalog":
        """Return the catalog of the folder that `store` is."""
        catalog = cls.__new__(cls)
        catalog._over(store)
        return catalog

    def copy(self) -> "Catalog":
        """Return a catalog of the same folder, for another thread."""
        return Catalog.of(self.store.at(self.store.location))

    # Writing ---------------------------------------------------------------------------------------------

    def begin(self, iteration: int, *, overwrite: bool = False) -> None:
        """Make the folder of `iteration` empty for a save.

        A committed iteration beyond the one that the pointer names was abandoned: nothing resumes from it, and a job
        that went back to the pointer comes past it again. It is replaced, with a warning.

        Raises:
            CheckpointExistsError: `iteration` is committed and not beyond the pointer, and `overwrite` is false.
            StorageWriteError: leftovers could not be removed.
        """
        if not (self._conditions and guards(self.store)):
            self._beyond = {iteration: self._committed_beyond(iteration)}
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
        self.store.prepare()
        beyond = self._beyond.pop(iteration, None)
        for _ in range(_MAX_TURNS):
            moved = self._advance_once(iteration, backward, beyond)
            if moved is not None:
                return moved
        raise StorageWriteError(f"{self._pointer_url} has changed {_MAX_TURNS} times while it was to be moved")

    def _advance_once(self, iteration: int, backward: bool, beyond: Set[int] | None) -> bool | None:
        """Do what `advance` does, unless another job moves the pointer at the same time; then return None."""
        with exchange(self.store, layout.POINTER_NAME, conditions=self._conditions) as pointer:
            if beyond is None and not pointer.is_guarded:
                beyond = self._committed_beyond(iteration)
            pointee = layout.iteration_of(pointer_says(pointer.read() or b""))
            if pointee is not None and pointee > iteration and not backward and self._is_committed(pointee):
                logger.warning(
                    "%s names iteration %d already and is not moved back to %d. Does another job save here?",
                    self._pointer_url,
                    pointee,
                    iteration,
                )
                return False
            if pointee == iteration:
                return True
            if not pointer.replace(layout.pointer_text(iteration)):
                self._conditions = pointer.is_guarded
                return None
            self.store.flush()
        return pointer.is_guarded or backward or self._make_good(iteration, beyond or frozenset())

    def _make_good(self, iteration: int, beyond: Set[int]) -> bool:
        """Move the pointer on if it was moved back by mistake: the store could not tell that another job was faster.

        Args:
            iteration: What it names now.
            beyond: Later iterations that were committed, and not what it named, before: those are abandoned.
        """
        others = self._committed_beyond(iteration) - beyond
        if not others:
            return True
        logger.warning("%s: another job has saved iteration %d meanwhile", self._pointer_url, max(others))
        self.advance(max(others))
        return False

    # Removing --------------------------------------------------------------------------------------------

    def prune(self, policy: RetentionPolicy, *, protected: Iterable[int] = (), dry_run: bool = False) -> list[int]:
        """Remove the committed iterations that `policy` does not keep, and return which.

        Never what the pointer names, never one of `protected`. Incomplete ones neither count nor go; see `sweep`. Nor
        do those beyond the pointer, from which no job goes on: one that went back replaces them, or counts them once
        it has come past.

        Args:
            policy: What to keep.
            protected: Iterations to keep in any case, such as one that is being written or read.
            dry_run: Only say which would go.
        """
        protected = set(protected)
        for iteration in protected:
            self._records.pop(iteration, None)  # It may have been replaced since it was read.
        committed = [one for one in map(self._committed, self.iterations()) if one is not None]
        pointee = self.pointee()
        if pointee is not None and self._is_committed(pointee):
            committed = [one for one in committed if one.iteration <= pointee]
        kept = policy.keep(committed) | protected | ({pointee} if pointee is not None else set())
        goes = [one.iteration for one in committed if one.iteration not in kept]
        if pointee is None and goes and goes == [one.iteration for one in committed]:
            goes = goes[:-1]
        removed = []
        for iteration in goes:
            if not dry_run:
                try:
                    self.remove(iteration)
                except DcpFsspecError as error:
                    # Once its record is gone it no longer counts, so no later run finds it again.
                    logger.warning("iteration %d could not be pruned, a sweep removes the rest: %s", iteration, error)
                    continue
            removed.append(iteration)
        return removed

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

    def sweep(
        self, *, protected: Iterable[int] = (), before: float | None = None, dry_run: bool = False
    ) -> dict[int, int]:
        """Remove what crashed saves and interrupted removals have left.

        Do not call it while another process saves here: a save that is not yet committed looks the same. What has a
        commit record that cannot be read was committed once, perhaps by a later version: it stays, with a warning.

        Args:
            protected: Iterations to leave alone.
            before: Leave `temporaries` alone that were written later than this; seconds since 1970.
            dry_run: Only say what would go.

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
            if layout.COMMIT_NAME in files:
                logger.warning("%s stays: delete its %s first if nobody needs it", folder.url, layout.COMMIT_NAME)
                continue
            if not files and not (folder.capabilities.local or folder.capabilities.folders):
                continue
            if not dry_run:
                self._remove(folder, files)
            swept[iteration] = sum(files.values())
        if not dry_run:
            self.store.remove(self.temporaries(before))
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
                if names.FILE_NAME in inside and read_save_id(store) == save_id:
                    store.remove([names.FILE_NAME])
                own = [name for name in inside if layout.is_of_save(name, save_id) and name != names.FILE_NAME]
                store.remove_all(own, "left behind by a failed save")
        except DcpFsspecError as error:
            logger.warning("%s: leftovers of a failed save stay: %s", folder.url, error)

    def _remove(self, folder: Store, files: Mapping[str, int]) -> None:
        """Remove `files` of an iteration: first what makes it valid, each in an own request, then the rest."""
        if layout.COMMIT_NAME in files:
            folder.remove([layout.COMMIT_NAME])
        self._records.pop(layout.iteration_of(folder.url.rpartition("/")[2]) or -1, None)
        marks = [name for name in files if name.rpartition("/")[2] == names.FILE_NAME]
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
