"""Copy checkpoints from store to store: whole or not at all, checked on the way, and where it was interrupted, on.

What makes a checkpoint valid is written last: shard files, then each ``.metadata``, then the commit record, then the
pointer. Before any of these, a listing shows whether every file is there. A file that is in the target already is read
and compared; equal ones are not copied again.
"""

import collections
import functools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageWriteError,
    UncommittedCheckpointError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.checksums import crc_of
from dcp_fsspec.storage.filesystem import Buffer, Store
from dcp_fsspec.storage.names import folders_of
from dcp_fsspec.storage.opened import read_checksums
from dcp_fsspec.storage.progress import Meter, ProgressCallback
from dcp_fsspec.storage.streaming import part_bytes_for
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, Job, Transfer, check_limits
from dcp_fsspec.tools.listing import Listing, list_checkpoints
from dcp_fsspec.tools.locating import check_apart

_RANGE_BYTES = 8 << 20
_RANGES_AHEAD = 4


@dataclass
class CopyReport:
    """What a copy did.

    Attributes:
        copied: Urls of the checkpoints that are complete in the target now.
        skipped: Folders that were left out, since they are not committed in the source.
        pointer: What the target's pointer names now, if a folder of iterations was copied.
        num_files: Files copied, those that make a checkpoint valid included.
        num_bytes: Bytes of them.
        num_files_found: Files that were in the target already, with the same content.
        num_bytes_found: Bytes of them.
        num_files_within_store: Of the files copied, those that the store copied by itself.
        num_files_checked: Of the files copied, those whose content was compared with a checksum of the save.
        seconds: Wall time.
    """

    copied: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    pointer: str | None = None
    num_files: int = 0
    num_bytes: int = 0
    num_files_found: int = 0
    num_bytes_found: int = 0
    num_files_within_store: int = 0
    num_files_checked: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class CopyOptions:
    """Settings of a copy.

    Attributes:
        overwrite: Replace another checkpoint that stands in the target.
        verify: Read back what the store copied by itself or took without a checksum, before the copy becomes valid.
        max_concurrency: Files at a time. Default: what suits both stores.
        memory_budget_bytes: Memory for everything on its way.
        progress: Told how far it has come.
    """

    overwrite: bool = False
    verify: bool = False
    max_concurrency: int | None = None
    memory_budget_bytes: int = DEFAULT_BUDGET_BYTES
    progress: ProgressCallback | None = None


def copy_checkpoint(source: Store, target: Store, options: CopyOptions | None = None) -> CopyReport:
    """Copy a DCP checkpoint, an iteration, or every committed iteration of a folder. `target` becomes the copy.

    Raises:
        CheckpointNotFoundError: there is nothing to copy, or no bucket to copy to.
        UncommittedCheckpointError: the source was never completed.
        CheckpointExistsError: another checkpoint stands in the target; nothing was changed.
        UnsafeCheckpointError: a file's name in the source leads out of its folder. Nothing was changed.
        CorruptCheckpointError: a file of the source is missing or not the one that was written. The copy is not valid.
        StorageReadError, StorageWriteError: a store failed. The copy is not valid; run again, it goes on.
    """
    options = options or CopyOptions()
    check_limits(options.max_concurrency, options.memory_budget_bytes)
    check_apart(source, target)
    begin = time.monotonic()
    listing = list_checkpoints(source)
    report = CopyReport()
    if listing.url != source.url:
        source = source.child(layout.CHECKPOINTS_FOLDER)
    if listing.kind == "folder":
        _copy_folder(source, target, options, report, listing)
    else:
        incomplete = [one.name for one in listing.iterations[0].components if not one.complete]
        if incomplete:
            raise UncommittedCheckpointError(f"{source.url} was never completed: {incomplete[0]} has no .metadata")
        _Copy(source, target, options, report).run()
    report.seconds = time.monotonic() - begin
    return report


def _copy_folder(source: Store, target: Store, options: CopyOptions, report: CopyReport, listing: Listing) -> None:
    committed = [entry for entry in listing.iterations if entry.committed]
    report.skipped = [entry.folder for entry in listing.iterations if not entry.committed]
    if not committed:
        raise CheckpointNotFoundError(f"there is no committed checkpoint below {source.url}")
    for entry in committed:
        _Copy(source.child(entry.folder), target.child(entry.folder), options, report).run()
    named = next((entry.iteration for entry in committed if entry.latest), None)
    if named is not None:
        Catalog.of(target).advance(named)
        report.pointer = Catalog.of(target).pointer()


@dataclass(frozen=True)
class _File:
    """A file to copy: name, size, and its checksum if the save left one."""

    name: str
    num_bytes: int
    crc: int | None


class _Copy:
    """The copy of one folder."""

    def __init__(self, source: Store, target: Store, options: CopyOptions, report: CopyReport) -> None:
        self._source, self._target, self._options, self._report = source, target, options, report
        self._within_store = target.copies_from(source)
        self._lock = threading.Lock()

    def run(self) -> None:
        self._sizes = self._source.list_files()
        self._check_names()
        marks = self._read_marks()
        files = self._files_to_copy(marks)
        there = self._target.list_files()
        if self._is_another(marks, there):
            self._make_way(there, files)
            there = {name: size for name, size in there.items() if name in {file.name for file in files}}
        folders = folders_of([*marks, *(file.name for file in files)])
        for folder in filter(None, folders):
            self._target.child(folder)  # A name that the target cannot take is refused before anything is there.
        self._target.prepare(folders)
        total = sum(file.num_bytes for file in files)
        self._meter = Meter(f"copy {self._source.url}", total, self._options.progress)
        threads = min(
            one.capabilities.threads_for(self._options.max_concurrency) for one in (self._source, self._target)
        )
        with self._source.stoppable() as stop:
            transfer = Transfer(threads, self._options.memory_budget_bytes, stop)
            transfer.run(Job(self._cost(file), functools.partial(self._bring, file, there)) for file in files)
        self._compare_sizes(files)
        self._target.flush(folders_of(file.name for file in files))
        # Only now does anything in the target say that it is a checkpoint.
        for name, data in marks.items():
            if there.get(name) != len(data) or self._target.read(name) != data:
                self._target.swap(name, data)
                self._count(len(data))
            else:
                self._report.num_files_found += 1
                self._report.num_bytes_found += len(data)
        self._target.flush(folders_of(marks))
        self._report.copied.append(self._target.url)

    # What to copy ----------------------------------------------------------------------------------------

    def _check_names(self) -> None:
        for name in self._sizes:
            if name.startswith("/") or ".." in name.split("/"):
                raise UnsafeCheckpointError(
                    f"{self._source.url} holds {name!r}, which a copy would put outside of its folder; remove it there"
                )

    def _read_marks(self) -> dict[str, bytes]:
        """Return the files that make the checkpoint valid, in the order in which they are to be written."""
        is_mark = {
            name for name in self._sizes if name.rpartition("/")[2] == metadata.FILE_NAME and name.count("/") < 2
        }
        marks = {name: self._source.read(name) for name in sorted(is_mark)}
        if not marks:
            raise UncommittedCheckpointError(f"{self._source.url} was never completed: it has no {metadata.FILE_NAME}")
        if layout.COMMIT_NAME in self._sizes:
            data = self._source.read(layout.COMMIT_NAME)
            record = CommitRecord.decode(data, self._source.url_of(layout.COMMIT_NAME))
            missing = [name for name in record.components if f"{name}/{metadata.FILE_NAME}" not in marks]
            if missing:
                raise CorruptCheckpointError(f"{self._source.url} has lost its component {missing[0]}")
            marks[layout.COMMIT_NAME] = data
        return marks

    def _files_to_copy(self, marks: Mapping[str, bytes]) -> list[_File]:
        known: dict[str, int] = {}
        wanted: set[str] = set()
        for mark, data in marks.items():
            folder = mark.rpartition("/")[0]
            prefix = f"{folder}/" if folder else ""
            if mark == layout.COMMIT_NAME:
                continue
            decoded = metadata.decode(data, self._source.url_of(mark))
            store = self._source.child(folder) if folder else self._source
            section = read_checksums(store, decoded, crc_of([data])) or {}
            known |= {prefix + name: record.crc for name, record in section.items()}
            wanted |= {prefix + name for name in metadata.shard_files(decoded)}
        missing = sorted(wanted - set(self._sizes))
        if missing:
            raise CorruptCheckpointError(
                f"{self._source.url_of(missing[0])} is missing, and with it part of the checkpoint"
            )
        # Shard files that nothing refers to, and what a crash left, stay behind.
        wanted |= {name for name in self._sizes if not name.endswith(metadata.SHARD_SUFFIX) and ".tmp-" not in name}
        return [_File(name, self._sizes[name], known.get(name)) for name in sorted(wanted - set(marks))]

    # What stands in the target ---------------------------------------------------------------------------

    def _is_another(self, marks: Mapping[str, bytes], there: Mapping[str, int]) -> bool:
        """Tell whether another checkpoint stands in the target.

        Raises:
            CheckpointExistsError: it does, and must not be replaced.
        """
        names = [
            name for name in there if name in marks or name == layout.COMMIT_NAME or name.endswith(metadata.FILE_NAME)
        ]
        another = [name for name in names if name not in marks or self._target.read(name) != marks[name]]
        if another and not self._options.overwrite:
            raise CheckpointExistsError(
                f"another checkpoint stands at {self._target.url}; copy to another place, or allow overwriting"
            )
        return bool(another)

    def _make_way(self, there: Mapping[str, int], files: list[_File]) -> None:
        """Make what stands in the target invalid first, then remove what the copy does not have."""
        names = {file.name for file in files}
        if layout.COMMIT_NAME in there:
            self._target.remove([layout.COMMIT_NAME])
        self._target.remove([name for name in there if name.rpartition("/")[2] == metadata.FILE_NAME])
        last = (metadata.SHARD_SUFFIX, ".json")
        self._target.remove([name for name in there if name not in names and name.endswith(last)])

    # Copying ---------------------------------------------------------------------------------------------

    def _cost(self, file: _File) -> int:
        part_bytes = part_bytes_for(file.num_bytes)
        if file.num_bytes <= part_bytes:
            copies = self._source.capabilities.read_copies + self._target.capabilities.write_copies
            return file.num_bytes * (3 + copies)
        return _RANGES_AHEAD * _RANGE_BYTES + (0 if self._target.capabilities.local else 5 * part_bytes)

    def _bring(self, file: _File, there: Mapping[str, int]) -> None:
        if there.get(file.name) == file.num_bytes and self._holds(file):
            with self._lock:
                self._report.num_files_found += 1
                self._report.num_bytes_found += file.num_bytes
            self._meter.add(file.num_bytes)
            return
        if self._within_store:
            self._target.copy_file(self._source, file.name)
            with self._lock:
                self._report.num_files_within_store += 1
        else:
            self._target.publish_stream(file.name, self._checked(file), file.num_bytes)
        if self._options.verify and not self._holds(file):
            raise StorageWriteError(f"{self._target.url_of(file.name)}: what was read back is not what was copied")
        checked = file.crc is not None and (self._options.verify or not self._within_store)
        with self._lock:
            self._report.num_files_checked += checked
        self._count(file.num_bytes)
        if self._within_store:
            self._meter.add(file.num_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._report.num_files += 1
            self._report.num_bytes += num_bytes

    def _holds(self, file: _File) -> bool:
        """Tell whether the target's file, of the right size, has the right content."""
        wanted = file.crc if file.crc is not None else crc_of(_ranges(self._source, file))
        return crc_of(_ranges(self._target, file)) == wanted

    def _checked(self, file: _File) -> Iterator[Buffer]:
        """Yield a file's bytes; raise before the last ones are out of hand if they are not those that were written."""
        crc = 0
        for data in _ranges(self._source, file):
            crc = crc_of([data], crc)
            self._meter.add(len(data))
            yield data
        if file.crc is not None and crc != file.crc:
            raise CorruptCheckpointError(
                f"{self._source.url_of(file.name)}: the stored bytes are not those that were written (CRC32C "
                f"{crc:08x}, wanted {file.crc:08x}). Use another copy or an older checkpoint."
            )

    def _compare_sizes(self, files: list[_File]) -> None:
        there = self._target.list_files()
        for file in files:
            if there.get(file.name) != file.num_bytes:
                raise StorageWriteError(
                    f"{self._target.url_of(file.name)} has {there.get(file.name)} bytes, {file.num_bytes} were copied; "
                    "the copy is not valid"
                )


def _ranges(store: Store, file: _File) -> Iterator[Buffer]:
    """Yield the content of a file, in ranges of which some are read ahead."""

    def read(start: int) -> Buffer:
        return store.read_range(file.name, start, min(file.num_bytes, start + _RANGE_BYTES))

    starts = range(0, file.num_bytes, _RANGE_BYTES)
    if len(starts) <= 1 or not store.capabilities.threads:
        yield from map(read, starts)
        return
    ahead: collections.deque[Future[Buffer]] = collections.deque()
    with ThreadPoolExecutor(_RANGES_AHEAD, thread_name_prefix="dcp_fsspec_copy") as pool:
        try:
            for start in starts:
                ahead.append(pool.submit(read, start))
                if len(ahead) == _RANGES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
