"""Which checkpoint a job starts from: the rules of `resume` applied to what is on storage.

Called on one rank, which tells the others.
"""

import os
from collections.abc import Mapping, Sequence

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.folder import read_record
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.checkpointer.resume import Decision, ResumeConfig, components_to_load
from dcp_fsspec.errors import CheckpointNotFoundError, UncommittedCheckpointError
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.filesystem import Store


def decide(catalog: Catalog, config: ResumeConfig, known: Sequence[str], iteration: int | None = None) -> Decision:
    """Return what to load.

    Args:
        catalog: The job's own checkpoints.
        config: Settings.
        known: Names of the job's components.
        iteration: Go back to this one of the job's own iterations instead of the latest.

    Raises:
        ConfigurationError: settings that cannot work.
        CheckpointNotFoundError: `iteration` or ``load_path`` was given, and there is nothing.
        UncommittedCheckpointError: what was asked for by name is incomplete.
        StorageReadError: the store did not answer, which is not the same as "there is none".
    """
    warm = components_to_load(config, known, auto_resume=False)  # Wrong names are an error in any case.
    found = catalog.find(iteration, pointed=True) if iteration is not None else catalog.latest()
    if found is not None:
        folder = catalog.folder(found.iteration)
        notes = list(found.notes)
        if config.load_path:
            notes.append(f"the job has checkpoints of its own, so load_path {config.load_path} is not used")
        return Decision(
            folder.location,
            components_to_load(config, known, auto_resume=True),
            is_auto_resume=True,
            iteration=found.iteration,
            flat=found.record is None and folder.exists(metadata.FILE_NAME),
            save_ids=_save_ids(found.record),
            notes=tuple(notes),
        )
    if config.is_single_file:
        return Decision(None, notes=(f"load_path {config.load_path} is a single file, which is yours to load",))
    if config.load_path:
        return _warm_start(open_store(catalog, config, config.load_path), warm)
    return Decision(None, notes=(f"{catalog.url} holds no checkpoint: fresh start",))


def open_store(catalog: Catalog, config: ResumeConfig, location: str) -> Store:
    """Return the store of a warm start.

    It is reached by its own options if it has any, else by those of the job if it has the same protocol.
    """
    location = os.fspath(location)
    if config.load_storage_options is not None:
        return Store(location, config.load_storage_options)
    if _protocol(location) != _protocol(catalog.store.location):
        return Store(location)
    return catalog.store.at(location)


def _protocol(location: str) -> str:
    protocol, separator, _ = location.partition("://")
    return protocol if separator and protocol != "file" else ""


def _warm_start(store: Store, components: tuple[str, ...]) -> Decision:
    """Find the checkpoint at, or below, the folder that the user named."""
    entries = store.list_folder()
    iteration = layout.iteration_told_by(store.url.rpartition("/")[2])
    notes: tuple[str, ...] = ()
    if iteration is None and not _is_checkpoint(entries):
        store, iteration, notes = _latest_below(store, entries)
        entries = store.list_folder()
    if not entries:
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.url}")
    flat = entries.get(metadata.FILE_NAME) is False
    record = read_record(store) if layout.COMMIT_NAME in entries else None
    if record is None and not flat:
        _check_complete(store, entries, components)
        notes += (f"{store.url} has no {layout.COMMIT_NAME}: other software wrote it, or the save was not completed",)
    return Decision(store.location, components, False, iteration, flat, _save_ids(record), notes)


def _is_checkpoint(entries: Mapping[str, bool]) -> bool:
    return metadata.FILE_NAME in entries or any(entries.get(name) for name in layout.STANDARD_COMPONENTS)


def _latest_below(store: Store, entries: Mapping[str, bool]) -> tuple[Store, int, tuple[str, ...]]:
    """Take `store` for a checkpoints folder, or for a job's folder that has one."""
    is_job_folder = bool(entries.get(layout.CHECKPOINTS_FOLDER)) and layout.POINTER_NAME not in entries
    catalog = Catalog.of(store.child(layout.CHECKPOINTS_FOLDER) if is_job_folder else store)
    found = catalog.latest()
    if found is None:
        raise CheckpointNotFoundError(
            f"there is neither a checkpoint at {store.url} nor a committed iteration below it"
        )
    return catalog.folder(found.iteration), found.iteration, found.notes


def _check_complete(store: Store, entries: Mapping[str, bool], components: tuple[str, ...]) -> None:
    missing = [name for name in components if not entries.get(name) or not store.child(name).exists(metadata.FILE_NAME)]
    if missing:
        raise UncommittedCheckpointError(
            f"{store.url} is incomplete: {', '.join(f'{name}/{metadata.FILE_NAME}' for name in missing)} is missing. "
            "Use another checkpoint, or leave the component out by keys_not_to_resume."
        )


def _save_ids(record: CommitRecord | None) -> Mapping[str, str]:
    return {name: one.save_id for name, one in record.components.items()} if record else {}
