"""Check a whole checkpoint where it lies, without a model: every shard file, every item."""

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from dcp_fsspec.errors import CorruptCheckpointError, DcpFsspecError, StorageReadError
from dcp_fsspec.storage import checksums, framing, metadata
from dcp_fsspec.storage.byte_items import ByteItems
from dcp_fsspec.storage.filesystem import Buffer, Store
from dcp_fsspec.storage.opened import read_checksums, read_metadata
from dcp_fsspec.storage.progress import Meter, ProgressCallback
from dcp_fsspec.storage.ranges import Fetch, Wanted, merge
from dcp_fsspec.storage.retry import DEFAULT_PATIENCE_SECONDS
from dcp_fsspec.storage.scratch import MAX_SCRATCH_BYTES, Scratch
from dcp_fsspec.storage.torch_internals import StorageInfo
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, Job, Transfer, check_limits


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    Attributes:
        file: Name of the file in the checkpoint's folder.
        item: Key of the item in it, if a single one is concerned.
        reason: What is wrong.
    """

    file: str
    item: str | None
    reason: str


@dataclass
class VerifyReport:
    """What was found.

    Attributes:
        problems: All of them; empty for a good checkpoint.
        num_files: Shard files that ``.metadata`` refers to.
        num_items: Items in them.
        num_bytes: Bytes read of them.
        seconds: Wall time.
        checksums: ``"checked"``, or ``"absent"``: then each item was only decoded, which finds damage to its form
            and not to its numbers.
    """

    problems: list[Problem] = field(default_factory=list)
    num_files: int = 0
    num_items: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    checksums: str = "absent"

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: AbstractFileSystem | None = None,
    max_concurrency: int | None = None,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    retry_seconds: float = DEFAULT_PATIENCE_SECONDS,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a whole checkpoint and compare it with its checksums. Nothing of it is run.

    Args:
        url: Url or path of the checkpoint's folder.
        storage_options: As in fsspec.
        filesystem: An fsspec filesystem to use instead.
        max_concurrency: Ranges read at a time.
        memory_budget_bytes: Memory for everything that is being read.
        retry_seconds: See `FsspecStorageReader`.
        progress: Told how far it has come.

    Returns:
        Every bad shard file and every bad item, by name.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UnsafeCheckpointError: ``.metadata`` or ``checksums.json`` itself is bad.
        StorageReadError: the store did not deliver, so nothing can be said.
    """
    check_limits(max_concurrency, memory_budget_bytes)
    store = Store(url, storage_options, filesystem, retry_seconds)
    return verify_store(store, max_concurrency, memory_budget_bytes, progress)


def verify_store(
    store: Store,
    max_concurrency: int | None = None,
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Do what `verify` does with the checkpoint in the folder that `store` is."""
    begin = time.monotonic()
    threads = store.capabilities.threads_for(max_concurrency, reading=True)
    dcp_metadata, crc = read_metadata(store)
    section = read_checksums(store, dcp_metadata, crc)
    report = VerifyReport(checksums="checked" if section is not None else "absent")
    with store.stoppable() as stop:
        _Verification(store, dcp_metadata, section, report, progress).run(Transfer(threads, memory_budget_bytes, stop))
    report.problems.sort(key=lambda problem: (problem.file, problem.item or ""))
    report.seconds = time.monotonic() - begin
    return report


class _Verification:
    def __init__(
        self,
        store: Store,
        dcp_metadata: Metadata,
        section: checksums.Section | None,
        report: VerifyReport,
        progress: ProgressCallback | None,
    ) -> None:
        self._progress = progress
        self._store, self._metadata, self._section, self._report = store, dcp_metadata, section, report
        self._byte_items = ByteItems(store.url, trust_pickle=False)
        self._sizes: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def run(self, transfer: Transfer) -> None:
        items = self._metadata.storage_data
        files = metadata.shard_files(self._metadata)
        self._sizes = self._store.list_files()
        for info in items.values():
            self._ends[info.relative_path] = max(self._ends.get(info.relative_path, 0), info.offset + info.length)
        self._report.num_files, self._report.num_items = len(files), len(items)
        bad = {name for name in files if not self._file_fits(name)}
        sound = {index: info for index, info in items.items() if info.relative_path not in bad}
        wanted = [self._wanted(index, info) for index, info in sound.items() if self._item_fits(index, info)]
        fetches = merge(wanted)
        self._report.num_bytes = sum(fetch.num_bytes for fetch in fetches)
        self._meter = Meter(f"verify {self._store.url}", self._report.num_bytes, self._progress)
        read = functools.partial(self._read, transfer.scratch)
        transfer.run(Job(fetch.num_bytes, functools.partial(read, fetch)) for fetch in fetches)

    def _file_fits(self, name: str) -> bool:
        """Note what is wrong with a file as a whole; its items are not read then."""
        size = self._sizes.get(name)
        record = (self._section or {}).get(name)
        end = self._ends[name]
        if size is None:
            self._note(name, None, "the file is missing")
        elif record is not None and size != record.num_bytes:
            self._note(name, None, f"the file has {size} bytes, {record.num_bytes} were written")
        elif size < end:
            self._note(name, None, f"the file has {size} bytes, .metadata refers to {end}")
        elif record is not None and not record.is_consistent:
            self._note(name, None, f"{checksums.FILE_NAME} contradicts itself about the file")
        elif self._section is not None and record is None:
            self._note(name, None, f"{checksums.FILE_NAME} does not know the file")
        else:
            return True
        return False

    def _item_fits(self, index: MetadataIndex, info: StorageInfo) -> bool:
        """Note an item that .metadata lists and does not describe, or not so that it could have this length."""
        try:
            if isinstance(self._metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                return True
            tensor, chunk = metadata.chunk_of(self._metadata, index)
        except KeyError:
            self._note(info.relative_path, index.fqn, ".metadata does not say what it is")
            return False
        if info.length <= framing.max_frame_bytes(tensor.properties.dtype, chunk.sizes):
            return True
        self._note(info.relative_path, index.fqn, f"{info.length} bytes for a tensor of shape {tuple(chunk.sizes)}")
        return False

    def _wanted(self, index: MetadataIndex, info: StorageInfo) -> Wanted[MetadataIndex]:
        return Wanted(info.relative_path, info.offset, info.offset + info.length, index)

    def _read(self, scratch: Scratch, fetch: Fetch[MetadataIndex]) -> None:
        with self._content(scratch, fetch) as data:
            if data is None:
                return
            for one in fetch.wanted:
                try:
                    self._check(one.consumer, one.start, data[one.start - fetch.start : one.stop - fetch.start])
                except DcpFsspecError as error:
                    self._note(fetch.file, one.consumer.fqn, str(error))
        self._meter.add(fetch.num_bytes)

    @contextlib.contextmanager
    def _content(self, scratch: Scratch, fetch: Fetch[MetadataIndex]) -> Iterator[memoryview | None]:
        """Give what was fetched for as long as the context lasts; None, and noted, if the file does not hold it."""
        is_large = fetch.num_bytes > MAX_SCRATCH_BYTES
        with scratch.lent(0 if is_large else fetch.num_bytes) as memory:
            data: memoryview | None = memory
            try:
                if is_large:
                    data = memoryview(self._store.read_range(fetch.file, fetch.start, fetch.stop))
                else:
                    self._store.read_into(fetch.file, fetch.start, [memory])
            except StorageReadError:
                raise
            except DcpFsspecError as error:
                self._note(fetch.file, None, str(error))
                data = None
            yield data

    def _check(self, index: MetadataIndex, offset: int, data: Buffer) -> None:
        info = self._metadata.storage_data[index]
        if self._section is not None:
            checksums.check_item(self._section, info.relative_path, offset, [data], lambda: index.fqn)
            return
        if getattr(info, "transform_descriptors", None):
            return
        if isinstance(self._metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            self._byte_items.checked(index.fqn, bytes(data))
            return
        tensor, chunk = metadata.chunk_of(self._metadata, index)
        try:
            decoded = framing.unframe_tensor(data, tensor.properties.dtype, chunk.sizes)
        except Exception as error:
            raise CorruptCheckpointError(f"it cannot be decoded ({type(error).__name__}: {error})") from error
        if decoded.shape != chunk.sizes:
            raise CorruptCheckpointError(f"it has the shape {tuple(decoded.shape)}, wanted {tuple(chunk.sizes)}")

    def _note(self, file: str, item: str | None, reason: str) -> None:
        self._report.problems.append(Problem(file, item, reason))
