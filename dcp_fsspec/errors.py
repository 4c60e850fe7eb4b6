"""The exceptions of this package, grouped by what the caller does about them.

::

    DcpFsspecError
    ├── ConfigurationError (ValueError)             change the arguments
    ├── CheckpointNotFoundError (FileNotFoundError)  change the url, or create the bucket
    ├── CheckpointExistsError (FileExistsError)      choose another url, or allow overwriting
    ├── UncommittedCheckpointError                   use an older checkpoint
    ├── CorruptCheckpointError                       use another copy or an older checkpoint
    ├── UnsafeCheckpointError                        trust it explicitly, or do not load it
    ├── StorageReadError (OSError)                   look at the store, then try again
    ├── StorageWriteError (OSError)                  look at the store, then try again
    ├── AsyncSaveError                               look at its cause
    └── IncompatibleStateError                       change the model or the load options

Each carries one message that names what failed, where (the url, without secrets) and what to do; the
error of the layer below is its ``__cause__``. All of them survive pickling, since ranks exchange them.

``torch.distributed.checkpoint`` gathers the failures of all ranks in its own ``CheckpointException``,
which is a ``BaseException``; the errors above are then found in its ``failures``, by rank.
"""

__all__ = [
    "AsyncSaveError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "CorruptCheckpointError",
    "DcpFsspecError",
    "IncompatibleStateError",
    "StorageReadError",
    "StorageWriteError",
    "UncommittedCheckpointError",
    "UnsafeCheckpointError",
]


class DcpFsspecError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigurationError(DcpFsspecError, ValueError):
    """An argument cannot work, or cannot work together with another one."""


class CheckpointNotFoundError(DcpFsspecError, FileNotFoundError):
    """There is no checkpoint at the url, or no bucket or folder to hold one."""


class CheckpointExistsError(DcpFsspecError, FileExistsError):
    """A checkpoint stands at the url already and overwriting was not allowed."""


class UncommittedCheckpointError(DcpFsspecError):
    """The checkpoint was never completed."""


class CorruptCheckpointError(DcpFsspecError):
    """Stored bytes are missing, cut short, contradictory or not the ones that were written."""


class UnsafeCheckpointError(DcpFsspecError):
    """Opening the checkpoint would run code or reach files that it has no business with."""


class _StoreError(DcpFsspecError, OSError):
    """Keeps its errno when it is sent to another rank, which an `OSError` with a message of its own does not."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.args, {**self.__dict__, "errno": self.errno}


class StorageReadError(_StoreError):
    """The store did not deliver. Nothing can be said about the checkpoint itself."""


class StorageWriteError(_StoreError):
    """The store did not accept a write. What stood there before is intact."""


class AsyncSaveError(DcpFsspecError):
    """A save in the background failed or was lost."""


class IncompatibleStateError(DcpFsspecError):
    """The checkpoint and the state to load into do not fit: keys, shapes or types."""
