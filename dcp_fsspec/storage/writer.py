"""`FsspecStorageWriter`: save a DCP state to any url, whole or not at all.

The calls that DCP makes, in order, and where they run::

    reset                  every rank     another checkpoint begins, perhaps at another url
    set_up_storage_writer  every rank     who am I
    prepare_local_plan     every rank     cut large tensors; the coordinator looks whether a checkpoint stands there
    prepare_global_plan    coordinator    how shard files are named
    write_data             every rank     frame, publish shard files
    finish                 coordinator    checksums.json, then .metadata: the commit; then old files go
"""

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_fsspec.errors import ConfigurationError, DcpFsspecError
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.pace import Pace
from dcp_fsspec.storage.progress import ProgressWish
from dcp_fsspec.storage.report import SaveReport
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS
from dcp_fsspec.storage.saving import Save, SaveOptions
from dcp_fsspec.storage.torch_internals import StreamTransformExtension
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, check_limits

_MIN_SHARD_BYTES = 64 << 10
_MAX_SHARD_BYTES = 4 << 30


class FsspecStorageWriter(StorageWriter):
    """Write a distributed checkpoint to any url that fsspec can write.

    What it writes is stock DCP format, which every DCP reader opens. Nothing becomes visible as a checkpoint
    before all shard files of all ranks are there; a checkpoint that stood at the url stays good until the new one
    has taken its place in one write.

    Args:
        url: Url or path of the checkpoint's folder. Buckets are never created.
        storage_options: As in fsspec, for the filesystem of `url`.
        filesystem: An fsspec filesystem to use instead, for instance one of obstore.
        shard_bytes: Aimed size of a shard file. Must be the same on all ranks. Default: what suits the store,
            8 MiB on object stores, 256 MiB on local disks.
        max_concurrency: Shard files written at a time by one rank. Default: what suits the store.
        max_concurrency_per_host: Shard files in flight of all ranks on one host, which share it evenly (torchrun says
            how many they are, by ``LOCAL_WORLD_SIZE``). Default: each rank counts for itself.
        stagger_seconds: The ranks begin to upload one after the other, spread over so long a time: for a store that
            would refuse many at once.
        spread_keys: Put each shard file into one of 256 folders in the checkpoint's, by a hash of its name. Stores
            that limit requests by the beginning of the key can then share the load out. Any DCP reader follows.
        memory_budget_bytes: Memory for everything on its way, beyond the state itself, on one rank.
        retry_seconds: A fault of the store that usually passes (throttling, resets, timeouts) is final when
            nothing has succeeded for so long; 0: at once. Filesystems have retries of their own beneath this.
        overwrite: Replace a checkpoint that stands at `url`. Otherwise `CheckpointExistsError` is raised on all
            ranks (inside torch's ``CheckpointException``) before anything is written.
        extensions: Torch's stream transforms, applied to each item, for instance its ``ZStandard``.
        trace: Path or url of a folder for a trace of each save, one file a rank, which Perfetto shows. Default: what
            the environment variable ``DCP_FSSPEC_TRACE`` says; without it there is no trace.
        progress: True: a save that takes long shows a bar on the coordinator, where standard error is a terminal and
            rich is installed. False: none. A function: called on every rank, with what that rank writes; see
            `Progress`.

    Raises:
        ConfigurationError: an argument that cannot work.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: AbstractFileSystem | None = None,
        shard_bytes: int | None = None,
        max_concurrency: int | None = None,
        max_concurrency_per_host: int | None = None,
        stagger_seconds: float = 0.0,
        spread_keys: bool = False,
        memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        retry_seconds: float = DEFAULT_PATIENCE_SECONDS,
        overwrite: bool = True,
        extensions: Sequence[StreamTransformExtension] = (),
        trace: str | os.PathLike[str] | None = None,
        progress: ProgressWish = True,
    ) -> None:
        super().__init__()
        if shard_bytes is not None and not _MIN_SHARD_BYTES <= shard_bytes <= _MAX_SHARD_BYTES:
            raise ConfigurationError(
                f"shard_bytes must be between {_MIN_SHARD_BYTES} and {_MAX_SHARD_BYTES}, got {shard_bytes}"
            )
        check_limits(max_concurrency, memory_budget_bytes)
        self._options = SaveOptions(
            shard_bytes,
            max_concurrency,
            memory_budget_bytes,
            overwrite=overwrite,
            extensions=tuple(extensions),
            trace=trace,
            progress=progress,
            spread_keys=spread_keys,
            pace=Pace(max_concurrency_per_host, stagger_seconds),
        )
        self._store = Store(url, storage_options, filesystem, retry_seconds)
        self._current = _Current()
        self.last_report = SaveReport()

    @classmethod
    def at(cls, store: Store, **settings: Any) -> "FsspecStorageWriter":
        """Return a writer to the folder that `store` is; `settings` are keyword arguments of the constructor."""
        writer = cls(store.location, filesystem=store.fs, **settings)
        writer._store = store
        # Part of something larger, which has a line in the log of its own and no use for what ``dcp.save`` returns.
        writer._options = dataclasses.replace(writer._options, log_level=logging.DEBUG, returns_metadata=False)
        return writer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._current = _Current()

    @property
    def _save(self) -> Save:
        """The save that the calling thread is at.

        DCP makes all calls of one save in one thread, and saves in the background may overlap.
        """
        if self._current.save is None:
            self._begin()
        assert self._current.save is not None
        return self._current.save

    def _begin(self, store: Store | None = None) -> None:
        previous = self._current.save
        self._current.save = Save(store or (previous.store if previous else self._store), self._options)
        self._current.under_way = False

    # Called on every rank --------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at `checkpoint_id` if given, by the same options or filesystem."""
        store = self._store.at(checkpoint_id) if checkpoint_id else self._store
        self._store = store
        self._begin(store)

    def storage_meta(self) -> StorageMeta:
        """Return where and in which save ``.metadata`` will be written. DCP asks first thing in each save."""
        if self._current.under_way:
            self._begin()
        return self._save.storage_meta

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's part in the save that begins."""
        if self._current.under_way:
            self._begin()
        self._save.set_up(
            is_coordinator=is_coordinator,
            rank=kwargs.get("rank"),
            use_collectives=kwargs.get("use_collectives", True),
        )
        self._current.under_way = True

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's url, without secrets."""
        return self._save.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this class could write to `checkpoint_id`."""
        try:
            Store(checkpoint_id)
        except DcpFsspecError:
            return False
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Cut what is large; on the coordinator also look what stands at the url.

        Raises:
            CheckpointExistsError: a checkpoint does, and overwriting is not allowed.
            StorageReadError: that could not be found out.
        """
        return self._save.prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into shard files, all or none.

        Raises:
            StorageWriteError: the first write that failed; this rank's files are gone again.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._save.write_data(plan, planner))
        self.last_report = self._save.report
        return future

    # Called on the coordinator only ----------------------------------------------------------------------

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the shard files: stock names for a first save, names never used before for any other."""
        named = self._save.prepare_global_plan(plans)
        self.last_report = self._save.report
        return named

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: all shard files of all ranks are durable, now one write makes them a checkpoint.

        Raises:
            StorageWriteError: nothing was committed.
            CheckpointExistsError: another writer was faster and overwriting is not allowed.
        """
        self._save.finish(metadata, results)
        self.last_report = self._save.report


class _Current(threading.local):
    """What each thread is at."""

    def __init__(self) -> None:
        self.save: Save | None = None
        self.under_way = False
