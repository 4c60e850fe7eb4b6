"""Make a DCP checkpoint of safetensors and torch files, wherever they lie."""

import contextlib
import io
import mmap
import pickle
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    UnsafeCheckpointError,
)
from dcp_fsspec.storage import framing, metadata
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.progress import Meter, ProgressCallback
from dcp_fsspec.storage.transfer import DEFAULT_BUDGET_BYTES, Job, Transfer
from dcp_fsspec.storage.writer import FsspecStorageWriter
from dcp_fsspec.tools import safetensors_files
from dcp_fsspec.tools.keys import KeyChoice
from dcp_fsspec.tools.safetensors_files import Placed

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_RANGE_BYTES = 8 << 20


@dataclass(frozen=True)
class ImportOptions:
    """Settings of an import.

    Attributes:
        keys: Which tensors to take, and how to call them in the checkpoint.
        dtype: What floating-point tensors become; None: they stay what they are.
        overwrite: Replace a checkpoint that stands in the target.
        progress: Told how far the reading has come.
    """

    keys: KeyChoice = field(default_factory=KeyChoice)
    dtype: torch.dtype | None = None
    overwrite: bool = False
    progress: ProgressCallback | None = None


@dataclass
class ImportReport:
    """What an import did.

    Attributes:
        files: Urls of the files read.
        num_keys: Tensors and values taken.
        num_bytes: Bytes of the shard files written.
        seconds: Wall time.
    """

    files: list[str] = field(default_factory=list)
    num_keys: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


def import_files(source: Store, target: Store, options: ImportOptions | None = None) -> ImportReport:
    """Save what one file, or a folder of safetensors files, holds as a DCP checkpoint. Nothing of it is run.

    The tensors of files on this machine stay where they are until they are written; those of other stores, and what a
    torch file holds, are held in memory.

    Args:
        source: The file or folder.
        target: The checkpoint's folder.
        options: Settings.

    Raises:
        CheckpointNotFoundError: there is no such file, or none in the folder that is known here.
        CheckpointExistsError: a checkpoint stands in the target; nothing was changed.
        CorruptCheckpointError, UnsafeCheckpointError: a file was refused.
        StorageReadError, StorageWriteError: a store failed; there is no checkpoint.
    """
    options = options or ImportOptions()
    begin = time.monotonic()
    if not options.overwrite and target.exists(metadata.FILE_NAME):
        raise CheckpointExistsError(f"a checkpoint stands at {target.url}; choose another place, or allow overwriting")
    folder, names = _files(source)
    report = ImportReport(files=[folder.url_of(name) for name in names])
    with contextlib.ExitStack() as stack:
        state: dict[str, Any] = {}
        for name in names:
            read = _read_torch if name.endswith(TORCH_SUFFIXES) else _read_safetensors
            state |= read(folder, name, options.progress, stack)
        taken = options.keys.names(state)
        state = {new: _cast(state[key], options.dtype) for key, new in taken.items()}
        report.num_keys = len(state)
        report.num_bytes = _save(state, target, overwrite=options.overwrite)
        state.clear()
    report.seconds = time.monotonic() - begin
    return report


def _files(source: Store) -> tuple[Store, list[str]]:
    """Return the folder and the names of the files to read in it."""
    name = source.url.rpartition("/")[2]
    if name.endswith((safetensors_files.SUFFIX, *TORCH_SUFFIXES)):
        folder = source.at(source.location.rstrip("/").removesuffix(name))
        return folder, [name]
    entries = source.list_folder()
    index = safetensors_files.INDEX_NAME
    if entries.get(index) is False:
        return source, safetensors_files.files_in_index(source.read(index), source.url_of(index))
    found = sorted(
        name for name, is_folder in entries.items() if not is_folder and name.endswith(safetensors_files.SUFFIX)
    )
    if not found:
        known = ", ".join((safetensors_files.SUFFIX, *TORCH_SUFFIXES))
        raise CheckpointNotFoundError(f"{source.url} is no file that is known here ({known}), nor a folder with one")
    return source, found


def _read_safetensors(
    folder: Store, name: str, progress: ProgressCallback | None, stack: contextlib.ExitStack
) -> dict[str, torch.Tensor]:
    where = folder.url_of(name)
    try:
        length = safetensors_files.header_bytes(bytes(folder.read_range(name, 0, 8)), where)
        placed = safetensors_files.parse_header(bytes(folder.read_range(name, 8, 8 + length)), where)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{where} is no safetensors file: {error}") from error
    size = folder.size(name) or 0
    if any(one.stop > size for one in placed):
        raise CorruptCheckpointError(f"{where} is cut short: it has {size} bytes, its header speaks of more")
    if folder.capabilities.local:
        return _mapped(folder.path(name), placed, stack)
    return _fetched(folder, name, placed, Meter(f"import {where}", size, progress))


def _mapped(path: str, placed: list[Placed], stack: contextlib.ExitStack) -> dict[str, torch.Tensor]:
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return {
        one.entry.name: framing.tensor_from_payload(content[one.start : one.stop], one.entry.dtype, one.entry.shape)
        if one.stop > one.start
        else torch.empty(one.entry.shape, dtype=one.entry.dtype)
        for one in placed
    }


def _fetched(folder: Store, name: str, placed: list[Placed], meter: Meter) -> dict[str, torch.Tensor]:
    tensors = {one.entry.name: torch.empty(one.entry.shape, dtype=one.entry.dtype) for one in placed}

    def fetch(one: Placed, start: int, stop: int) -> None:
        payload = framing.payload_of(tensors[one.entry.name])
        payload[start - one.start : stop - one.start] = folder.read_range(name, start, stop)
        meter.add(stop - start)

    def jobs() -> Iterator[Job[None]]:
        for one in placed:
            for start in range(one.start, one.stop, _RANGE_BYTES):
                stop = min(one.stop, start + _RANGE_BYTES)
                yield Job(2 * (stop - start), lambda one=one, start=start, stop=stop: fetch(one, start, stop))  # type: ignore[misc]

    with folder.stoppable() as stop:
        Transfer(folder.capabilities.threads_for(None), DEFAULT_BUDGET_BYTES, stop).run(jobs())
    return tensors


def _read_torch(
    folder: Store, name: str, progress: ProgressCallback | None, stack: contextlib.ExitStack
) -> dict[str, Any]:
    where = folder.url_of(name)
    if folder.capabilities.local:
        if folder.size(name) is None:
            raise CheckpointNotFoundError(f"there is no file {where}")
        file: Any = folder.path(name)
    else:
        data = folder.read(name)
        Meter(f"import {where}", len(data), progress).add(len(data))
        file = io.BytesIO(data)
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=folder.capabilities.local)
        except (RuntimeError, ValueError):
            if not folder.capabilities.local:
                raise
            state = torch.load(file, map_location="cpu", weights_only=True)  # The old format cannot be mapped.
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(f"{where} needs more than plain values, which is not loaded: {error}") from error
    except Exception as error:
        raise CorruptCheckpointError(f"{where} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"{where} holds a {type(state).__name__}; a dict of tensors is wanted")
    return dict(state)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype.is_floating_point else value
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    return [_cast(one, dtype) for one in value] if isinstance(value, list) else value


def _save(state: dict[str, Any], target: Store, *, overwrite: bool) -> int:
    writer = FsspecStorageWriter.at(target, overwrite=overwrite)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(state, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, DcpFsspecError):
                    raise failure from error
            raise
    return writer.last_report.num_bytes
