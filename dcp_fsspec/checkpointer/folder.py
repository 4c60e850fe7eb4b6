"""What stands in the folder of one iteration, where the answer takes a look at storage."""

import logging

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageWriteError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage import names
from dcp_fsspec.storage.filesystem import Store

logger = logging.getLogger(__name__)


def check_files(record: CommitRecord, folder: Store) -> None:
    """Look whether the folder holds what is to be committed, and nothing else: one listing.

    Raises:
        StorageWriteError: it does not, so another job must have been there.
    """
    own: dict[str, list[int]] = {name: [] for name in record.components}
    foreign = []
    files = folder.list_files()
    for name, size in files.items():
        component, _, below = name.partition("/")
        if not below.endswith(names.SHARD_SUFFIX):
            continue
        if component in own and layout.is_of_save(below, record.components[component].save_id):
            own[component].append(size)
        else:
            foreign.append(name)
    other = "so the iteration was not committed. Another job must be saving into the same folder; give each its own."
    for name, wanted in record.components.items():
        there = len(own[name]), sum(own[name])
        if there != (wanted.num_files, wanted.num_bytes):
            raise StorageWriteError(
                f"{folder.child(name).url}: {wanted.num_files} shard files of {wanted.num_bytes} bytes were written, "
                f"{there[0]} of {there[1]} bytes are there, {other}"
            )
        if f"{name}/{names.FILE_NAME}" not in files:
            raise StorageWriteError(f"{folder.url}: {name}/{names.FILE_NAME} has gone again, {other}")
    if foreign:
        raise StorageWriteError(
            f"{folder.url}: {len(foreign)} shard files are there that this save has not written, such as "
            f"{min(foreign)}, {other}"
        )


def read_save_id(store: Store) -> str | None:
    """Return the id of the save that wrote the ``.metadata`` of a component, None if it cannot be read."""
    from dcp_fsspec.storage import metadata  # It needs torch, which takes seconds to import.

    try:
        return metadata.save_id_of(metadata.decode(store.read(metadata.FILE_NAME), store.url))
    except (CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError):
        return None


def read_record(folder: Store) -> CommitRecord | None:
    """Return the commit record in an iteration's folder, None if there is none that can be read as one."""
    try:
        return CommitRecord.decode(folder.read(layout.COMMIT_NAME), folder.url_of(layout.COMMIT_NAME))
    except CheckpointNotFoundError:
        return None
    except CorruptCheckpointError as error:
        logger.warning("%s; the iteration counts as not committed", error)
        return None
