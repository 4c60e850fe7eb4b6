"""`FsspecStorageReader`: load a DCP checkpoint from any url, reading only the bytes that are needed.

The calls that DCP makes, in order, on every rank::

    reset                  another checkpoint begins, perhaps at another url
    read_metadata          .metadata, opened by an allow-list
    set_up_storage_reader  checksums.json
    prepare_local_plan     which .metadata this rank has read; the coordinator compares
    prepare_global_plan    on the coordinator: who reads what several ranks need
    read_data              merge ranges, fetch, check, decode, copy into the target tensors
"""

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_fsspec.errors import CheckpointNotFoundError, ConfigurationError, DcpFsspecError, StorageReadError
from dcp_fsspec.storage import checksums, fanout, metadata, tracing
from dcp_fsspec.storage.bars import told
from dcp_fsspec.storage.fetching import Source
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.location import checkpoint_id_text
from dcp_fsspec.storage.opened import SmallFiles, read_checksums, read_metadata
from dcp_fsspec.storage.pace import Pace
from dcp_fsspec.storage.progress import ProgressWish
from dcp_fsspec.storage.reading import ItemReader
from dcp_fsspec.storage.report import ReadReport, speed_text
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS
from dcp_fsspec.storage.torch_internals import ExtensionRegistry, called_by_dcp_load
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, Transfer, check_limits

logger = logging.getLogger(__name__)

Verify = Literal["read", "off", "full"]

_BUCKETS_IN_BUDGET = 8


class FsspecStorageReader(StorageReader):
    """Read a distributed checkpoint, of whatever writer, from any url that fsspec can read.

    Args:
        url: Url or path of the checkpoint's folder.
        storage_options: As in fsspec, for the filesystem of `url`.
        filesystem: An fsspec filesystem to use instead, for instance one of obstore.
        max_concurrency: Ranges read at a time by one rank. Default: what suits the store.
        max_concurrency_per_host: Ranges in flight of all ranks on one host, which share it evenly (torchrun says how
            many they are, by ``LOCAL_WORLD_SIZE``). Default: each rank counts for itself.
        stagger_seconds: The ranks begin to read one after the other, spread over so long a time: for a store that
            would refuse many at once.
        memory_budget_bytes: Memory for everything on its way, beyond the state itself, on one rank.
        retry_seconds: A fault of the store that usually passes (throttling, resets, timeouts) is final when
            nothing has succeeded for so long; 0: at once. Filesystems have retries of their own beneath this.
        verify: ``"read"`` compares the checksum of each item that is read whole; ``"full"`` reads every shard
            file that is needed at all as a whole and compares all of it; ``"off"`` compares nothing.
        trust_pickle: Python values are loaded by ``torch.load(weights_only=True)`` rules. ``True`` lets a
            checkpoint that you trust run any code; a sequence of types allows just these in addition.
        extension_registry: Torch's registry of stream transforms, for those that it does not know by default.
        read_once: What several ranks need alike is read by one of them and handed to the others, if all ranks of the
            process group take part in the load. Must be the same on all ranks.
        process_group: The ranks that load together, if not all; as given to ``dcp.load``. Needed for `read_once` only.
        trace: Path or url of a folder for a trace of each load, one file a rank, which Perfetto shows. Default: what
            the environment variable ``DCP_FSSPEC_TRACE`` says; without it there is no trace.
        progress: True: a load that takes long shows a bar on the coordinator, where standard error is a terminal and
            rich is installed. False: none. A function: called on every rank, with what that rank fetches; see
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
        max_concurrency: int | None = None,
        max_concurrency_per_host: int | None = None,
        stagger_seconds: float = 0.0,
        memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        retry_seconds: float = DEFAULT_PATIENCE_SECONDS,
        verify: Verify = "read",
        trust_pickle: bool | Sequence[type] = False,
        extension_registry: ExtensionRegistry | None = None,
        read_once: bool = True,
        process_group: dist.ProcessGroup | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: ProgressWish = True,
    ) -> None:
        super().__init__()
        self._store = Store(url, storage_options, filesystem, retry_seconds)
        self._files: SmallFiles | None = None
        check_limits(max_concurrency, memory_budget_bytes)
        if verify not in get_args(Verify):
            raise ConfigurationError(f"verify must be one of {get_args(Verify)}, got {verify!r}")
        self._max_concurrency = max_concurrency
        self._pace = Pace(max_concurrency_per_host, stagger_seconds, process_group)
        self._memory_budget_bytes = memory_budget_bytes
        self._verify = verify
        self._trust_pickle = trust_pickle
        self._extension_registry = extension_registry or ExtensionRegistry()
        self._read_once = read_once
        self._process_group = process_group
        self._trace_folder = trace
        self._progress = progress
        self._log_level = logging.INFO
        self._begin()

    @classmethod
    def at(cls, store: Store, files: SmallFiles | None = None, **settings: Any) -> "FsspecStorageReader":
        """Return a reader of the folder that `store` is.

        Args:
            store: The checkpoint's folder.
            files: Its small files, which another rank has read.
            settings: Keyword arguments of the constructor.
        """
        reader = cls(store.location, filesystem=store.fs, **settings)
        reader._store, reader._files = store, files
        # Part of something larger, which has a line in the log of its own.
        reader._log_level = logging.DEBUG
        reader._begin()
        return reader

    def _begin(self) -> None:
        self._metadata: Metadata | None = None
        self._checksums: checksums.Section | None = None
        self._metadata_crc: int | None = None
        self._fingerprint = 0
        self._failure: DcpFsspecError | None = None
        self._is_coordinator = False
        self._requests_before = self._store.num_requests
        self._retries_before = self._store.num_retries
        self._trace = tracing.begin("load", self.checkpoint_id, self._trace_folder)
        self.last_report = ReadReport()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from `checkpoint_id` if given, by the same options or filesystem."""
        if checkpoint_id:
            self._store = self._store.at(checkpoint_id)
            self._files = None
        self._begin()

    @property
    def stored_checksums(self) -> checksums.Section | None:
        """Checksums of the checkpoint that was opened; None if it has none, or if none are compared."""
        return self._checksums

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's url, without secrets."""
        return checkpoint_id_text(self._store.url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this class could read from `checkpoint_id`."""
        try:
            Store(checkpoint_id)
        except DcpFsspecError:
            return False
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata; with ``rank=`` the one that this rank wrote without collectives.

        Raises:
            CheckpointNotFoundError: there is none.
            UnsafeCheckpointError, CorruptCheckpointError: it was refused.
            StorageReadError: the store did not deliver it.
        """
        self._begin()
        deferrable = called_by_dcp_load() and not kwargs
        try:
            rank = kwargs.get("rank")
            with self._trace.span("GET", file=metadata.file_name(rank)):
                dcp_metadata, crc = read_metadata(self._store, rank, self._files)
            self._metadata_crc = crc
            self._fingerprint = crc if rank is None else 0  # Saved without collectives, each rank has its own.
            return dcp_metadata
        except DcpFsspecError as error:
            if not deferrable or self._has_metadata_per_rank(error):
                raise
            # dcp.load would replace this error by another one. What set_up_storage_reader raises arrives, on all
            # ranks, so the error waits until then.
            self._failure = error
            return Metadata(state_dict_metadata={})

    def _has_metadata_per_rank(self, error: DcpFsspecError) -> bool:
        if not isinstance(error, CheckpointNotFoundError):
            return False
        try:
            self._store.read(metadata.file_name(0))
        except DcpFsspecError:
            return False
        return True

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata and read the checksums that go with it."""
        if self._failure is not None:
            raise self._failure
        self._metadata = metadata
        self._is_coordinator = is_coordinator
        if self._verify != "off":
            with self._trace.span("GET", file=checksums.FILE_NAME):
                self._checksums = read_checksums(self._store, metadata, self._metadata_crc, self._files)
        self._trace.until_next("plan")  # The planner's part.

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add which ``.metadata`` this rank has read, for the coordinator to compare."""
        self._trace.until_next("collective")
        return dataclasses.replace(plan, storage_data=self._fingerprint)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Say which rank reads what several ranks need. Called on the coordinator only.

        Raises:
            StorageReadError: the checkpoint was replaced while the ranks opened it, so they hold a mix of two.
        """
        with self._trace.span("plan", ranks=len(plans)):
            shared = self._shared_out(plans)
        self._trace.until_next("collective")
        return shared

    def _shared_out(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise StorageReadError(f"{self._store.url} was replaced by another save while it was opened; load it again")
        if not self._can_share(len(plans)) or self._metadata is None:
            return plans
        assignments = fanout.share_out(plans, self._metadata.storage_data)
        return [dataclasses.replace(plan, storage_data=one) for plan, one in zip(plans, assignments, strict=True)]

    def _can_share(self, num_plans: int) -> bool:
        """Tell whether the ranks whose plans these are make up the process group."""
        if not self._read_once or num_plans < 2 or not dist.is_available() or not dist.is_initialized():
            return False
        return num_plans == dist.get_world_size(self._process_group)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for into the targets that `planner` gives.

        Raises:
            CorruptCheckpointError: a shard file is missing or short, or bytes are not those that were written.
            UnsafeCheckpointError: a Python value would run code.
            IncompatibleStateError: a target cannot take what is stored.
            StorageReadError: the store did not deliver, or another rank that reads for this one failed.
        """
        try:
            with self._trace.span("read", items=len(plan.items)):
                self._read_data(plan, planner)
        finally:
            self._trace.write()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        begin = time.monotonic()
        assignment = plan.storage_data if isinstance(plan.storage_data, fanout.Assignment) else fanout.Assignment()
        if assignment.shares:
            report = self._read_and_share(assignment, plan.items, planner)
        else:
            report = self._read_in_turn(plan.items, planner)
        report.seconds = time.monotonic() - begin
        report.num_requests = self._store.num_requests - self._requests_before
        report.num_retries = self._store.num_retries - self._retries_before
        report.checksums = "off" if self._verify == "off" else "checked" if self._checksums else "absent"
        self.last_report = report
        logger.log(
            self._log_level if self._is_coordinator else logging.DEBUG,
            "%s loaded on this rank: %s, %d requests, %d retries",
            self.checkpoint_id,
            speed_text(report.num_bytes, report.seconds),
            report.num_requests,
            report.num_retries,
        )

    def _read_in_turn(self, items: Sequence[ReadItem], planner: LoadPlanner) -> ReadReport:
        if items:
            with self._store.stoppable() as stop:
                self._pace.wait(stop, self._trace)
        return self._read(items, planner)

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> ReadReport:
        if self._metadata is None:
            raise AssertionError("read_data comes after set_up_storage_reader")
        source = Source(
            store=self._store,
            metadata=self._metadata,
            checksums=self._checksums,
            whole_files=self._verify == "full",
            trust_pickle=self._trust_pickle,
            extension_registry=self._extension_registry,
            trace=self._trace,
        )
        wanted = self._store.capabilities.threads_for(self._max_concurrency, reading=True)
        threads = self._pace.threads(wanted)
        with self._store.stoppable() as stop, told(self._progress, here=self._is_coordinator) as callback:
            transfer = Transfer(threads, self._memory_budget_bytes, stop, self._trace)
            return ItemReader(source, planner, transfer, callback).read(items)

    def _read_and_share(
        self, assignment: fanout.Assignment, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> ReadReport:
        """Read what falls to this rank, then hand round what is shared. Every rank takes part, whatever happens."""
        received = fanout.received(assignment, dist.get_rank(self._process_group))
        round_ = fanout.HandRound(
            self._process_group, assignment, items, planner, self._memory_budget_bytes // _BUCKETS_IN_BUDGET
        )
        report, failure = ReadReport(), None
        try:
            own = [item for place, item in enumerate(items) if place not in received]
            report = self._read_in_turn(own, planner)
        except BaseException as error:
            failure = error
        try:
            with self._trace.span("collective"):
                left = round_.agree(failure)
                num_shared = round_.run()
        except fanout.RankFailedError as error:
            raise StorageReadError(f"{self._store.url}: a rank that reads for others failed: {error}") from error
        except RuntimeError as error:
            if error is failure:
                raise
            raise StorageReadError(f"{self._store.url}: a rank was lost while tensors went round: {error}") from error
        if left:
            report.add(self._read([items[place] for place in left], planner))
        report.num_bytes_received = num_shared
        return report
