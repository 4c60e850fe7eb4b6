"""Save and load PyTorch distributed checkpoints on any storage that fsspec can reach.

The names below are imported when they are first asked for: importing torch takes seconds, and parts of the command line
do without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dcp_fsspec import errors
from dcp_fsspec.version import __version__

if TYPE_CHECKING:
    from dcp_fsspec.checkpointer.callbacks import CheckpointCallback
    from dcp_fsspec.checkpointer.catalog import Catalog
    from dcp_fsspec.checkpointer.checkpointer import DistributedCheckpointer
    from dcp_fsspec.checkpointer.credentials import CosmosCredentials
    from dcp_fsspec.checkpointer.loading import LoadReport
    from dcp_fsspec.checkpointer.preemption import PreemptionGuard
    from dcp_fsspec.checkpointer.resume import ResumeConfig
    from dcp_fsspec.checkpointer.retention import AnyOf, KeepBest, KeepEvery, KeepLatest
    from dcp_fsspec.checkpointer.rng import RandomState
    from dcp_fsspec.checkpointer.state import PerRank
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
    from dcp_fsspec.storage.inspecting import CheckpointView, open_checkpoint, read_tensor
    from dcp_fsspec.storage.progress import Progress
    from dcp_fsspec.storage.reader import FsspecStorageReader
    from dcp_fsspec.storage.verifying import VerifyReport, verify
    from dcp_fsspec.storage.writer import FsspecStorageWriter

__all__ = [
    "AnyOf",
    "AsyncSaveError",
    "Catalog",
    "CheckpointCallback",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointView",
    "ConfigurationError",
    "CorruptCheckpointError",
    "CosmosCredentials",
    "DcpFsspecError",
    "DistributedCheckpointer",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompatibleStateError",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "LoadReport",
    "PerRank",
    "PreemptionGuard",
    "Progress",
    "RandomState",
    "ResumeConfig",
    "StorageReadError",
    "StorageWriteError",
    "UncommittedCheckpointError",
    "UnsafeCheckpointError",
    "VerifyReport",
    "__version__",
    "open_checkpoint",
    "read_tensor",
    "verify",
]

_HOMES = {
    "checkpointer.callbacks": ("CheckpointCallback",),
    "checkpointer.catalog": ("Catalog",),
    "checkpointer.checkpointer": ("DistributedCheckpointer",),
    "checkpointer.credentials": ("CosmosCredentials",),
    "checkpointer.loading": ("LoadReport",),
    "checkpointer.preemption": ("PreemptionGuard",),
    "checkpointer.resume": ("ResumeConfig",),
    "checkpointer.retention": (
        "AnyOf",
        "KeepBest",
        "KeepEvery",
        "KeepLatest",
    ),
    "checkpointer.rng": ("RandomState",),
    "checkpointer.state": ("PerRank",),
    "errors": tuple(errors.__all__),
    "storage.inspecting": (
        "CheckpointView",
        "open_checkpoint",
        "read_tensor",
    ),
    "storage.progress": ("Progress",),
    "storage.reader": ("FsspecStorageReader",),
    "storage.verifying": (
        "VerifyReport",
        "verify",
    ),
    "storage.writer": ("FsspecStorageWriter",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
