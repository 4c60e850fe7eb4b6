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
import errno
import io
import logging
import os
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    StorageReadError,
    StorageWriteError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage import checksums, metadata
from dcp_fsspec.storage.filesystem import Buffer, Store
from dcp_fsspec.storage.framing import frame_tensor
from dcp_fsspec.storage.location import checkpoint_id_text
from dcp_fsspec.storage.report import SaveReport
from dcp_fsspec.storage.splitting import Piece, item_bytes, pack, split_plan
from dcp_fsspec.storage.torch_internals import StorageInfo, StreamTransformExtension
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, Job, Transfer

logger = logging.getLogger(__name__)

_MIN_SHARD_BYTES = 64 << 10
_MAX_SHARD_BYTES = 4 << 30
_FRAME_OVERHEAD_BYTES = 2048


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


@dataclasses.dataclass(frozen=True)
class _Written:
    """One item's place and checksum, sent to the coordinator in ``WriteResult.storage_data``."""

    info: StorageInfo
    crc: int


@dataclasses.dataclass(frozen=True)
class _Standing:
    """The checkpoint that stands at the url before a save."""

    files: frozenset[str] = frozenset()
    sections: Mapping[str, checksums.Section] = dataclasses.field(default_factory=dict)


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
        memory_budget_bytes: Memory for everything on its way, beyond the state itself, on one rank.
        overwrite: Replace a checkpoint that stands at `url`. Otherwise `CheckpointExistsError` is raised on all
            ranks (inside torch's ``CheckpointException``) before anything is written.
        extensions: Torch's stream transforms, applied to each item, for instance its ``ZStandard``.

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
        memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
        overwrite: bool = True,
        extensions: Sequence[StreamTransformExtension] = (),
    ) -> None:
        super().__init__()
        if shard_bytes is not None and not _MIN_SHARD_BYTES <= shard_bytes <= _MAX_SHARD_BYTES:
            raise ConfigurationError(
                f"shard_bytes must be between {_MIN_SHARD_BYTES} and {_MAX_SHARD_BYTES}, got {shard_bytes}"
            )
        check_limits(max_concurrency, memory_budget_bytes)
        self._store = Store(url, storage_options, filesystem)
        self._shard_bytes = shard_bytes
        self._max_concurrency = max_concurrency
        self._memory_budget_bytes = memory_budget_bytes
        self._overwrite = overwrite
        self._extensions = tuple(extensions)
        self._rank: int | None = None
        self._use_collectives = True
        self._is_coordinator = False
        self._begin()

    def _begin(self) -> None:
        self._under_way = False
        self._save_id = f"{checksums.SAVE_ID_PREFIX}{uuid.uuid4()}"
        self._token = secrets.token_hex(4)
        self._standing: _Standing | None = None
        self._requests_before = self._store.num_requests
        self.last_report = SaveReport()

    # Called on every rank --------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint, at `checkpoint_id` if given, by the same options or filesystem."""
        if checkpoint_id:
            self._store = self._store.at(checkpoint_id)
        self._begin()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's part in the save that begins."""
        if self._under_way:
            self._begin()
        self._under_way = True
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta:
        """Return where and in which save ``.metadata`` will be written. DCP asks first thing in each save."""
        if self._under_way:
            self._begin()
        return self._storage_meta()

    def _storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's url, without secrets."""
        return checkpoint_id_text(self._store.url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this class could write to `checkpoint_id`."""
        try:
            Store(checkpoint_id)
        except ConfigurationError:
            return False
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Cut what is large; on the coordinator also look what stands at the url.

        Raises:
            CheckpointExistsError: a checkpoint does, and overwriting is not allowed.
            StorageReadError: that could not be found out.
        """
        if self._is_coordinator or not self._use_collectives:
            self._standing = self._look()
        replicated = self._use_collectives and dist.is_available() and dist.is_initialized()
        plan = split_plan(plan, self.shard_bytes, replicated=replicated and dist.get_world_size() > 1)
        return dataclasses.replace(plan, storage_data=_Naming(self._token))

    @property
    def shard_bytes(self) -> int:
        """Aimed size of a shard file in bytes."""
        return self._shard_bytes or self._store.capabilities.shard_bytes

    def _metadata_name(self) -> str:
        return metadata.file_name(None if self._use_collectives else self._rank)

    def _look(self) -> _Standing | None:
        name = self._metadata_name()
        try:
            data = self._store.read(name)
        except CheckpointNotFoundError:
            return None
        except StorageReadError as error:
            if self._overwrite and error.errno == errno.EACCES:
                # Some stores say so of a missing object too. Fresh names are right in either case.
                logger.warning("%s; the save goes on under fresh names", error)
                return _Standing()
            raise
        if not self._overwrite:
            raise CheckpointExistsError(
                f"a checkpoint stands at {self._store.url} already; save to another url, or pass overwrite=True"
            )
        return self._describe(data, name)

    def _describe(self, data: bytes, name: str) -> _Standing:
        try:
            old = metadata.decode(data, self._store.url_of(name))
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            logger.warning("overwriting a checkpoint that cannot be read, its files will stay: %s", error)
            return _Standing()
        save_id = metadata.save_id_of(old)
        sections: dict[str, checksums.Section] = {}
        if save_id and save_id.startswith(checksums.SAVE_ID_PREFIX):
            try:
                where = self._store.url_of(checksums.FILE_NAME)
                section = checksums.decode(self._store.read(checksums.FILE_NAME), save_id, where)
                sections = {save_id: section} if section else {}
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                logger.warning("the checkpoint to be overwritten has no usable checksums: %s", error)
        return _Standing(frozenset(metadata.shard_files(old)), sections)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items into shard files, all or none.

        Raises:
            StorageWriteError: the first write that failed; this rank's files are gone again.
        """
        begin = time.monotonic()
        naming = self._naming(plan)
        sizes = [item_bytes(item) + _FRAME_OVERHEAD_BYTES for item in plan.items]
        names: list[str] = []
        jobs = []
        for number, members in enumerate(pack(sizes, self.shard_bytes)):
            name = f"{naming.prefix}{number}{naming.suffix}{metadata.SHARD_SUFFIX}"
            items = [plan.items[member] for member in members]
            cost = sum(sizes[member] for member in members) * self._store.capabilities.write_copies
            names.append(name)
            jobs.append(Job(cost, _Upload(self._store, name, items, planner, self._extensions)))
        results = self._run(jobs, names)
        if len(results) != len(plan.items):
            raise StorageWriteError(f"{self._store.url}: {len(plan.items)} items were planned, {len(results)} written")
        self.last_report = SaveReport(
            num_files=len(names),
            num_items=len(results),
            num_bytes=sum(result.size_in_bytes for result in results),
            seconds=time.monotonic() - begin,
            num_requests=self._store.num_requests - self._requests_before,
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _run(self, jobs: list[Job[list[WriteResult]]], names: list[str]) -> list[WriteResult]:
        if not jobs:
            return []
        capabilities = self._store.capabilities
        threads = (self._max_concurrency or capabilities.max_concurrency) if capabilities.threads else 1
        self._store.prepare()
        try:
            per_file = Transfer(threads, self._memory_budget_bytes).run(jobs)
            self._store.flush()
        except BaseException:
            for name in names:
                self._store.discard(name)
            raise
        return [result for results in per_file for result in results]

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

    # Called on the coordinator only ----------------------------------------------------------------------

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the shard files: stock names for a first save, names never used before for any other.

        Where overwriting is not allowed, another writer could still come first. Fresh names keep it whole then.
        """
        stock = self._standing is None and self._overwrite
        suffix = "" if stock else f"_{self._save_id[-8:]}"
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
        written = {result.index: cast(_Written, result.storage_data) for of_rank in results for result in of_rank}
        names = {one.info.relative_path for one in written.values()}
        try:
            _check_complete(metadata, written, self._store.url)
            self._store.prepare()
            self._store.swap(checksums.FILE_NAME, checksums.encode(self._sections(written)))
        except BaseException:
            for name in names:
                self._store.discard(name)
            raise
        self._commit(metadata, written)
        self._remove_old(names)
        self.last_report.num_requests = self._store.num_requests - self._requests_before

    def _sections(self, written: Mapping[Any, _Written]) -> Mapping[str, checksums.Section]:
        standing = self._standing.sections if self._standing else {}
        return {**standing, self._save_id: _section(written.values())}

    def _commit(self, dcp_metadata: Metadata, written: Mapping[Any, _Written]) -> None:
        storage_data = {index: one.info for index, one in written.items()}
        content = metadata.encode(dcp_metadata, storage_data, self._storage_meta())
        # The commit: before this write there is the old checkpoint or none, after it the new one. Should it fail,
        # the shard files stay: a write that timed out may still arrive, and must not find them gone.
        self._store.swap(self._metadata_name(), content, create_only=not self._overwrite)
        self._store.flush()

    def _remove_old(self, current: set[str]) -> None:
        for name in sorted((self._standing.files if self._standing else frozenset()) - current):
            try:
                self._store.remove(name)
            except DcpFsspecError as error:
                logger.warning("the new checkpoint is committed, but a file of the old one stays: %s", error)


def check_limits(max_concurrency: int | None, memory_budget_bytes: int) -> None:
    """Refuse limits that would stop all transfer.

    Raises:
        ConfigurationError: a limit below one thread or one MiB.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigurationError(f"max_concurrency must be at least 1, got {max_concurrency}")
    if memory_budget_bytes < 1 << 20:
        raise ConfigurationError(f"memory_budget_bytes must be at least one MiB, got {memory_budget_bytes}")


class _Upload:
    """Frame the items of one shard file and publish it. Runs in a thread."""

    def __init__(
        self,
        store: Store,
        name: str,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        extensions: Sequence[StreamTransformExtension],
    ) -> None:
        self._store, self._name, self._items = store, name, items
        self._planner, self._extensions = planner, extensions

    def __call__(self) -> list[WriteResult]:
        buffers: list[Buffer] = []
        alive: list[torch.Tensor] = []
        results = []
        offset = crc = 0
        for item in self._items:
            item_buffers, tensor = self._frame(item)
            if tensor is not None:
                alive.append(tensor)
            length = sum(memoryview(buffer).nbytes for buffer in item_buffers)
            info = StorageInfo(self._name, offset, length, self._descriptors())
            written = _Written(info, checksums.crc_of(item_buffers))
            crc = checksums.combine(crc, written.crc, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=written))
            buffers.extend(item_buffers)
            offset += length
        self._store.publish(self._name, buffers, crc)
        return results

    def _frame(self, item: WriteItem) -> tuple[list[Buffer], torch.Tensor | None]:
        parent = item.parent if isinstance(item, Piece) and item.parent is not None else item
        data = self._planner.resolve_data(parent)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"{item.index.fqn}: the planner gave a {type(data).__name__} for bytes")
            return self._transformed([data.getbuffer()]), None
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{item.index.fqn}: the planner gave a {type(data).__name__} for a tensor")
        buffers, tensor = frame_tensor(item.narrow(data) if isinstance(item, Piece) else data)
        return self._transformed(buffers), tensor

    def _transformed(self, buffers: list[Buffer]) -> list[Buffer]:
        if not self._extensions:
            return buffers
        raw = _Uncloseable()
        stream: Any = raw
        for extension in self._extensions:
            stream = extension.transform_to(stream)
        for buffer in buffers:
            stream.write(buffer)
        stream.close()
        return [raw.getbuffer()]

    def _descriptors(self) -> list[str] | None:
        return [extension.get_descriptor() for extension in reversed(self._extensions)] or None


class _Uncloseable(io.BytesIO):
    """Transforms close the stream that they write to; its content is wanted afterwards."""

    def close(self) -> None:
        self.flush()


def _check_complete(dcp_metadata: Metadata, written: Mapping[Any, _Written], url: str) -> None:
    planned = sum(len(getattr(one, "chunks", ("bytes",))) for one in dcp_metadata.state_dict_metadata.values())
    if planned != len(written):
        raise StorageWriteError(
            f"{url}: {planned} items belong to the checkpoint and {len(written)} were written; nothing was committed"
        )


def _section(written: Any) -> checksums.Section:
    by_file: dict[str, list[tuple[int, int, int]]] = {}
    for one in written:
        by_file.setdefault(one.info.relative_path, []).append((one.info.offset, one.info.length, one.crc))
    return {name: checksums.FileChecksums.of_items(items) for name, items in by_file.items()}
