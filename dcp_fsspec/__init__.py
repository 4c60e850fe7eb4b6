"""Save and load PyTorch distributed checkpoints on any storage that fsspec can reach."""

from dcp_fsspec.errors import (
    AsyncSaveError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    IncompatibleStateError,
    StorageReadError,
    StorageWriteError,
    UncommittedCheckpointError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.verifying import VerifyReport, verify
from dcp_fsspec.storage.writer import FsspecStorageWriter

__all__ = [
    "AsyncSaveError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "CorruptCheckpointError",
    "DcpFsspecError",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompatibleStateError",
    "StorageReadError",
    "StorageWriteError",
    "UncommittedCheckpointError",
    "UnsafeCheckpointError",
    "VerifyReport",
    "verify",
]
