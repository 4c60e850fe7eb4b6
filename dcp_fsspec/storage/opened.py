"""The two small files of a checkpoint, read from its folder and checked."""

import logging

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec.errors import CheckpointNotFoundError
from dcp_fsspec.storage import checksums, metadata
from dcp_fsspec.storage.filesystem import Store

logger = logging.getLogger(__name__)


def read_metadata(store: Store, rank: int | None = None) -> tuple[Metadata, int]:
    """Return the checked metadata of a checkpoint, or of one rank's part of it, and the CRC32C of its file.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError, UnsafeCheckpointError: it was refused.
        StorageReadError: the store did not deliver it.
    """
    name = metadata.file_name(rank)
    try:
        data = store.read(name)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.url}: {error}") from error.__cause__
    return metadata.decode(data, store.url_of(name)), checksums.crc_of([data])


def read_checksums(store: Store, dcp_metadata: Metadata) -> checksums.Section | None:
    """Return the checksums that go with `dcp_metadata`, or None if there are none.

    Raises:
        CorruptCheckpointError: they are damaged, or belong to another save.
        StorageReadError: the store did not deliver them.
    """
    save_id = metadata.save_id_of(dcp_metadata)
    name = checksums.file_name(save_id)
    if save_id is None or name is None:
        return None
    try:
        data = store.read(name)
    except CheckpointNotFoundError:
        logger.warning("%s has lost its %s: what it holds cannot be checked", store.url, name)
        return None
    return checksums.decode(data, save_id, store.url_of(name))
