"""One save on one rank: what stands at the url, how files are named, the upload, the commit.

`FsspecStorageWriter` makes one `Save` for each save and hands DCP's calls on to it.
"""

import dataclasses
import errno
import functools
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageReadError,
    StorageWriteError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage import checksums, metadata, returned, tracing
from dcp_fsspec.storage.bars import told
from dcp_fsspec.storage.bulk import collection_held_off
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.framing import is_framed_in_place
from dcp_fsspec.storage.location import checkpoint_id_text
from dcp_fsspec.storage.names import folders_of, spread
from dcp_fsspec.storage.pace import Pace
from dcp_fsspec.storage.progress import Meter, ProgressWish
from dcp_fsspec.storage.report import SaveReport, speed_text
from dcp_fsspec.storage.results import FileResult, Results, by_file
from dcp_fsspec.storage.splitting import MAX_PIECE_BYTES, file_bytes, item_bytes, pack, split_plan, whole_of
from dcp_fsspec.storage.torch_internals import StreamTransformExtension
from dcp_fsspec.storage.transfer import Job, Transfer
from dcp_fsspec.storage.upload import Upload

logger = logging.getLogger(__name__)

_FRAME_OVERHEAD_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class SaveOptions:
    """Settings of a save; see `FsspecStorageWriter`.

    Attributes:
        returns_metadata: `finish` leaves the metadata complete, for DCP to hand to the caller of ``dcp.save``.
    """

    shard_bytes: int | None
    max_concurrency: int | None
    memory_budget_bytes: int
    overwrite: bool
    extensions: Sequence[StreamTransformExtension]
    progress: ProgressWish
    trace: str | os.PathLike[str] | None = None
    spread_keys: bool = False
    pace: Pace = dataclasses.field(default_factory=Pace)
    log_level: int = logging.INFO
    returns_metadata: bool = True


@dataclasses.dataclass(frozen=True)
class _Naming:
    """What a rank and the coordinator tell each other in ``SavePlan.storage_data`` about one save.

    Attributes:
        token: Made by the rank for this save. A plan that a planner kept from an earlier save carries an old one.
        prefix: Set by the coordinator: how the rank's shard files begin.
        suffix: Set by the coordinator: how they end, before the extension.
    """

    token: str
    prefix: str = ""
    suffix: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the names of the attributes: it is all that thousands of ranks exchange when no plan has changed.
        return _Naming, (self.token, self.prefix, self.suffix)


class Save:
    """One save on one rank.

    Args:
        store: The checkpoint's folder.
        options: Settings.
    """

    def __init__(self, store: Store, options: SaveOptions) -> None:
        self.store = store
        self.report = SaveReport()
        self.trace = tracing.begin("save", self.url, options.trace)
        self._options = options
        self._threads = options.pace.threads(store.capabilities.threads_for(options.max_concurrency))
        self._shard_bytes = options.shard_bytes or store.capabilities.shard_bytes
        self._save_id = checksums.new_save_id(fresh=True)
        self._token = secrets.token_hex(4)
        self._old_files: frozenset[str] = frozenset()
        self._rank: int | None = None
        self._use_collectives = True
        self._is_coordinator = False
        self._requests_before = store.num_requests
        self._retries_before = store.num_retries
        self._begin = time.monotonic()

    @property
    def url(self) -> str:
        """The checkpoint's url, without secrets."""
        return checkpoint_id_text(self.store.url)

    @property
    def storage_meta(self) -> StorageMeta:
        """What ``.metadata`` says about where and in which save it was written."""
        return StorageMeta(checkpoint_id=self.url, save_id=self._save_id)

    # On every rank ---------------------------------------------------------------------------------------

    def set_up(self, *, is_coordinator: bool, rank: int | None, use_collectives: bool) -> None:
        """Learn this rank's part."""
        self._is_coordinator, self._rank, self._use_collectives = is_coordinator, rank, use_collectives
        self.trace.until_next("plan")  # The planner's part.
        self._begin = time.monotonic()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Cut what is large; on the coordinator also look what stands at the url.

        Raises:
            CheckpointExistsError: a checkpoint does, and overwriting is not allowed.
            StorageReadError: that could not be found out.
        """
        with self.trace.span("plan", items=len(plan.items)):
            plan = self._prepared(plan)
        self.trace.until_next("collective")
        return plan

    def _prepared(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinator or not self._use_collectives:
            stands = self._look()
            # Stock names only where no other save can meet this one. Where overwriting is not allowed, another writer
            # may still come first, and without collectives each rank is a save of its own.
            alone = not stands and self._options.overwrite and self._use_collectives
            self._save_id = checksums.new_save_id(fresh=not alone)
        replicated = self._use_collectives and dist.is_available() and dist.is_initialized()
        plan = split_plan(plan, self._shard_bytes, replicated=replicated and dist.get_world_size() > 1)
        return dataclasses.replace(plan, storage_data=_Naming(self._token))

    def _metadata_name(self) -> str:
        return metadata.file_name(None if self._use_collectives else self._rank)

    def _look(self) -> bool:
        """Tell whether a checkpoint stands at the url, and note the files that it consists of."""
        name = self._metadata_name()
        try:
            with self.trace.span("GET", file=name):
                data = self.store.read(name)
        except CheckpointNotFoundError:
            return False
        except StorageReadError as error:
            if self._options.overwrite and error.errno == errno.EACCES:
                # Some stores say so of a missing object too. Fresh names are right in either case.
                logger.warning("%s; the save goes on under fresh names", error)
                return True
            raise
        if not self._options.overwrite:
            raise CheckpointExistsError(
                f"a checkpoint stands at {self.store.url} already; save to another url, or pass overwrite=True"
            )
        try:
            old = metadata.decode(data, self.store.url_of(name))
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            logger.warning("overwriting a checkpoint that cannot be read, its files will stay: %s", error)
            return True
        old_checksums = checksums.file_name(metadata.save_id_of(old))
        # Only what a checkpoint consists of: .metadata of a stranger may name a neighbour's file.
        shards = {name for name in metadata.shard_files(old) if name.endswith(metadata.SHARD_SUFFIX)}
        self._old_files = frozenset(shards | ({old_checksums} if old_checksums else set()))
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's items into shard files, all or none.

        Raises:
            StorageWriteError: the first write that failed; this rank's files are gone again.
        """
        try:
            with self.trace.span("write"):
                return self._write_data(plan, planner)
        finally:
            self.trace.write()
            self.trace.until_next("collective")

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        begin = time.monotonic()
        naming = self._naming(plan)
        sizes = [item_bytes(item) + _FRAME_OVERHEAD_BYTES for item in plan.items]
        copies = self.store.capabilities.write_copies + (0 if self._in_place(plan, planner) else 1)
        names: list[str] = []
        parts: list[tuple[int, Upload]] = []
        for number, members in enumerate(pack(sizes, self._file_bytes(sum(sizes), copies))):
            name = self._placed(f"{naming.prefix}{number}{naming.suffix}{metadata.SHARD_SUFFIX}")
            items = [plan.items[member] for member in members]
            names.append(name)
            upload = Upload(self.store, name, items, planner, self._options.extensions, self.trace)
            parts.append((sum(sizes[member] for member in members), upload))
        results = self._run(parts, copies, names)
        if len(results) != len(plan.items):
            raise StorageWriteError(f"{self.store.url}: {len(plan.items)} items were planned, {len(results)} written")
        self.report = SaveReport(
            num_files=len(names),
            num_items=len(results),
            num_bytes=sum(result.size_in_bytes for result in results),
            seconds=time.monotonic() - begin,
            num_requests=self.store.num_requests - self._requests_before,
            num_retries=self.store.num_retries - self._retries_before,
            save_id=self.report.save_id,
        )
        return results

    def _placed(self, name: str) -> str:
        """Return where the shard file `name` lies in the checkpoint's folder."""
        return spread(name) if self._options.spread_keys else name

    def _in_place(self, plan: SavePlan, planner: SavePlanner) -> bool:
        """Tell whether all tensors are sent from where they lie, without a copy on the host."""
        if not (_is_stock(planner) or getattr(planner, "serves_in_place", False)):
            return False  # It may make a new tensor each time that it is asked.
        parents = {id(parent): parent for item in plan.items if (parent := whole_of(item)).tensor_data is not None}
        return not self._options.extensions and all(
            is_framed_in_place(planner.resolve_data(parent)) for parent in parents.values()
        )

    def _file_bytes(self, total_bytes: int, copies: int) -> int:
        budget = self._options.memory_budget_bytes // (self._threads * copies) if copies else self._shard_bytes
        if self._options.shard_bytes:
            return self._options.shard_bytes
        if self.store.capabilities.local:
            return max(MAX_PIECE_BYTES, min(self._shard_bytes, budget))
        size = file_bytes(total_bytes, self._shard_bytes, self._threads)
        return size + size // 64  # The frames around the pieces must not cost a place.

    def _run(self, parts: Sequence[tuple[int, Upload]], copies: int, names: list[str]) -> Results:
        """Run uploads, given with their bytes."""
        if not parts:
            return Results()
        self.store.prepare(folders_of(names))
        try:
            with self.store.stoppable() as stop, told(self._options.progress, here=self._is_coordinator) as callback:
                self._options.pace.wait(stop, self.trace)
                meter = Meter(f"save {self.url}", sum(num_bytes for num_bytes, _ in parts), callback)
                transfer = Transfer(self._threads, self._options.memory_budget_bytes, stop, self.trace)
                per_file = transfer.run(
                    Job(num_bytes * copies, _metered(functools.partial(upload, transfer.scratch), num_bytes, meter))
                    for num_bytes, upload in parts
                )
            with self.trace.span("flush"):
                self.store.flush(folders_of(names))
        except BaseException:
            self._discard(names)
            raise
        return Results(itertools.chain.from_iterable(per_file))

    def _naming(self, plan: SavePlan) -> _Naming:
        """Return how this rank's files are named.

        Stock names only if the coordinator said in this very save that nothing stands at the url: a plan that the
        planner kept from an earlier save says nothing about this one.
        """
        naming = plan.storage_data
        if isinstance(naming, _Naming) and naming.token == self._token and naming.prefix:
            return naming
        prefix = "__" if self._rank is None else f"__{self._rank}_"
        return _Naming(self._token, prefix, f"_{self._token}")

    # On the coordinator only -----------------------------------------------------------------------------

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the shard files: stock names for a first save, names never used before for any other."""
        with self.trace.span("plan", ranks=len(plans)):
            named = self._named(plans)
        self.trace.until_next("collective")
        return named

    def _named(self, plans: list[SavePlan]) -> list[SavePlan]:
        suffix = checksums.name_suffix(self._save_id)
        self.report.save_id = self._save_id
        named = []
        for number, plan in enumerate(plans):
            rank = number if self._use_collectives or self._rank is None else self._rank
            token = plan.storage_data.token if isinstance(plan.storage_data, _Naming) else ""
            naming = _Naming(token, f"__{rank}_", suffix)
            named.append(dataclasses.replace(plan, storage_data=naming))
        return named

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: all shard files of all ranks are durable, now one write makes them a checkpoint.

        Raises:
            StorageWriteError: nothing was committed.
            CheckpointExistsError: another writer was faster and overwriting is not allowed.
        """
        try:
            with self.trace.span("commit"):
                self._finish(metadata, results)
        finally:
            self.trace.write()

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = [file for of_rank in results for file in by_file(of_rank)]
        names = {file.name for file in files}
        checksums_name = checksums.file_name(self._save_id) or checksums.FILE_NAME
        try:
            with self.trace.span("encode"), collection_held_off():
                content = self._content(metadata, files)
                section = {file.name: file.checksums() for file in files}
                sums = checksums.encode(section, self._save_id, checksums.crc_of([content]))
            self.store.prepare()
            with self.trace.span("PUT", file=checksums_name, bytes=len(sums)):
                self.store.swap(checksums_name, sums)
        except BaseException:
            self._discard(names)
            raise
        try:
            self._commit(content)
        except (CheckpointExistsError, StorageWriteError) as error:
            # Where it is certain that the commit did not take place, nothing will ever refer to these fresh names:
            # another save holds the place, or the store is one on which no write arrives late. Else the files stay.
            if isinstance(error, CheckpointExistsError) or self.store.capabilities.local:
                self._discard({*names, checksums_name})
            raise
        self.store.flush()
        self._remove_old({*names, checksums_name})
        self.report.num_requests = self.store.num_requests - self._requests_before
        self.report.num_retries = self.store.num_retries - self._retries_before
        if self._options.returns_metadata:
            returned.finish(metadata, content)
        else:
            # DCP sends it to every rank now, which nobody would look at: of a million items that takes longer than
            # all else.
            metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, None, None
        num_bytes = sum(file.item_bytes for file in files)
        logger.log(
            self._options.log_level,
            "%s saved by %d rank(s): %s, %d files; on this rank %d requests, %d retries",
            self.url,
            len(results),
            speed_text(num_bytes, time.monotonic() - self._begin),
            len(names),
            self.report.num_requests,
            self.report.num_retries,
        )

    def _discard(self, names: Iterable[str]) -> None:
        self.store.remove_all(names, "left behind by a failed save")

    def _content(self, dcp_metadata: Metadata, files: Sequence[FileResult]) -> bytes:
        _check_complete(dcp_metadata, files, self.store.url)
        return metadata.encode(dcp_metadata, files, self.storage_meta)

    def _commit(self, content: bytes) -> None:
        # The commit: before this write there is the old checkpoint or none, after it the new one. Should it fail,
        # the shard files stay: a write that timed out may still arrive, and must not find them gone.
        name = self._metadata_name()
        with self.trace.span("PUT", file=name, bytes=len(content)):
            self.store.swap(name, content, create_only=not self._options.overwrite)

    def _remove_old(self, current: set[str]) -> None:
        self.store.remove_all(self._old_files - current, "the new checkpoint is committed; files of the old one")


def _metered(upload: Callable[[], list[WriteResult]], num_bytes: int, meter: Meter) -> Callable[[], list[WriteResult]]:
    def run() -> list[WriteResult]:
        results = upload()
        meter.add(num_bytes)
        return results

    return run


def _is_stock(planner: SavePlanner) -> bool:
    names = ("resolve_data", "lookup_object", "transform_object")
    return all(getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name) for name in names)


def _check_complete(dcp_metadata: Metadata, files: Iterable[FileResult], url: str) -> None:
    planned = sum(len(getattr(one, "chunks", ("bytes",))) for one in dcp_metadata.state_dict_metadata.values())
    # More than one rank may have written an item.
    written = len(set(itertools.chain.from_iterable(zip(file.fqns, file.offsets, strict=True) for file in files)))
    if planned != written:
        raise StorageWriteError(
            f"{url}: {planned} items belong to the checkpoint and {written} were written; nothing was committed"
        )
