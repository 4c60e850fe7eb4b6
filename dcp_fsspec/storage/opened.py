"""The two small files of a checkpoint, read from its folder and checked."""

import logging
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec.errors import CheckpointNotFoundError
from dcp_fsspec.storage import checksums, metadata
from dcp_fsspec.storage.filesystem import Store

logger = logging.getLogger(__name__)


class SmallFiles:
    """The content of the two small files, for ranks that did not read them themselves.

    Each rank opens the metadata once, however often it is asked for; what is sent to another rank is the content.

    Args:
        metadata: That of ``.metadata``.
        checksums: That of the checksums file, if there is one.
        opened: The metadata, if it was opened before.
    """

    def __init__(self, metadata: bytes, checksums: bytes | None, opened: Metadata | None = None) -> None:
        self.metadata = metadata
        self.checksums = checksums
        self._opened = opened

    def __reduce__(self) -> tuple[Any, ...]:
        return SmallFiles, (self.metadata, self.checksums)

    def opened(self, where: str) -> Metadata:
        """Return the checked metadata.

        Args:
            where: Its url, for messages.

        Raises:
            CorruptCheckpointError, UnsafeCheckpointError: it was refused.
        """
        if self._opened is None:
            self._opened = metadata.decode(self.metadata, where)
        return self._opened


def read_small_files(store: Store) -> SmallFiles:
    """Return the content of both files.

    Raises:
        CheckpointNotFoundError: there is no ``.metadata``.
        CorruptCheckpointError, UnsafeCheckpointError: it was refused.
        StorageReadError: the store did not deliver.
    """
    data = _read_metadata_file(store, metadata.FILE_NAME)
    opened = metadata.decode(data, store.url_of(metadata.FILE_NAME))
    name = checksums.file_name(metadata.save_id_of(opened))
    return SmallFiles(data, _read_checksums_file(store, name) if name else None, opened)


def read_metadata(store: Store, rank: int | None = None, files: SmallFiles | None = None) -> tuple[Metadata, int]:
    """Return the checked metadata of a checkpoint, or of one rank's part of it, and the CRC32C of its file.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError, UnsafeCheckpointError: it was refused.
        StorageReadError: the store did not deliver it.
    """
    name = metadata.file_name(rank)
    if files is None or rank is not None:
        files = SmallFiles(_read_metadata_file(store, name), None)
    return files.opened(store.url_of(name)), checksums.crc_of([files.metadata])


def _read_metadata_file(store: Store, name: str) -> bytes:
    try:
        return store.read(name)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint at {store.url}: {error}") from error.__cause__


def read_checksums(
    store: Store, dcp_metadata: Metadata, crc: int | None, files: SmallFiles | None = None
) -> checksums.Section | None:
    """Return the checksums that go with `dcp_metadata`, or None if there are none.

    Args:
        store: The checkpoint's folder.
        dcp_metadata: What stands in its ``.metadata``.
        crc: CRC32C of that file, to be compared; None if the metadata came from elsewhere.
        files: The content of both files, if it was read before.

    Raises:
        CorruptCheckpointError: they are damaged, or belong to another save; or ``.metadata`` is damaged.
        StorageReadError: the store did not deliver them.
    """
    save_id = metadata.save_id_of(dcp_metadata)
    name = checksums.file_name(save_id)
    if save_id is None or name is None:
        return None
    data = files.checksums if files is not None else _read_checksums_file(store, name)
    return checksums.decode(data, save_id, store.url_of(name), crc) if data is not None else None


def _read_checksums_file(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except CheckpointNotFoundError:
        logger.warning("%s has lost its %s: what it holds cannot be checked", store.url, name)
        return None
