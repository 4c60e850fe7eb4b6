"""Write a checkpoint's tensors in another form, to any store, without a local copy and in little memory.

Tensors are read in slabs of some MiB, each fetched by many connections and compared with its checksums; while one is
on its way up the next one is read.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcp_fsspec.checkpointer import nesting
from dcp_fsspec.errors import CheckpointExistsError, StorageWriteError
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.framing import payload_of
from dcp_fsspec.storage.inspecting import CheckpointView, slabs
from dcp_fsspec.storage.progress import Meter, ProgressCallback
from dcp_fsspec.tools import safetensors_files
from dcp_fsspec.tools.keys import KeyChoice
from dcp_fsspec.tools.safetensors_files import Entry
from dcp_fsspec.tools.torch_files import TorchFile

Format = Literal["safetensors", "torch"]
Buffer = bytes | memoryview

DEFAULT_SHARD_BYTES = 5_000_000_000
TORCH_NAME = "model.pt"
_SLAB_BYTES = 16 << 20
_READ_BUDGET_BYTES = 32 << 20

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True)
class ExportOptions:
    """Settings of an export.

    Attributes:
        format: ``"safetensors"`` or ``"torch"``.
        keys: Which tensors to take, and how to call them.
        dtype: What floating-point tensors become; None: they stay what they are.
        shard_bytes: Aimed size of a safetensors file.
        overwrite: Replace an earlier export.
        progress: Told how far it has come.
    """

    format: Format = "safetensors"
    keys: KeyChoice = field(default_factory=KeyChoice)
    dtype: torch.dtype | None = None
    shard_bytes: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    progress: ProgressCallback | None = None


@dataclass
class ExportReport:
    """What an export did.

    Attributes:
        files: Urls of the files written.
        num_tensors: Tensors in them.
        num_bytes: Bytes of the files.
        left_out: Keys that were not taken: Python values, and what the choice of keys leaves out.
        num_unverified: Parts of tensors that could not be compared with a checksum; `verify` does that.
        seconds: Wall time.
    """

    files: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    num_unverified: int = 0
    seconds: float = 0.0


def export_checkpoint(source: Store, target: Store, options: ExportOptions | None = None) -> ExportReport:
    """Export one DCP checkpoint.

    Args:
        source: Its folder.
        target: Folder for the result; or, ending in ``.safetensors``, ``.pt`` or ``.pth``, the one file to write.
        options: Settings.

    Raises:
        ConfigurationError: a dtype that the format does not know, or names that collide.
        IncompatibleStateError: no tensor is taken.
        CheckpointExistsError: there is an earlier export; nothing was changed.
        CorruptCheckpointError, StorageReadError, StorageWriteError: what was being written is not there; files that
            were complete before are, without the index.
    """
    options = options or ExportOptions()
    begin = time.monotonic()
    view = CheckpointView(source, memory_budget_bytes=_READ_BUDGET_BYTES)
    return _Export(view, target, options).run(begin)


class _Export:
    def __init__(self, view: CheckpointView, target: Store, options: ExportOptions) -> None:
        self._view, self._options = view, options
        name = target.url.rpartition("/")[2]
        self._file = name if name.endswith((safetensors_files.SUFFIX, ".pt", ".pth")) else ""
        self._target = target.at(target.location.rstrip("/").removesuffix(name)) if self._file else target
        self._report = ExportReport()
        self._sizes: dict[str, int] = {}

    def run(self, begin: float) -> ExportReport:
        view, report = self._view, self._report
        # In the order of the saved state: a list is put together again from its first element on.
        paths = getattr(view.metadata, "planner_data", None) or {}
        known = dict.fromkeys([*paths, *view.tensors, *view.values])
        taken = {*view.tensors, *view.values} if self._options.format == "torch" else set(view.tensors)
        self._names = self._options.keys.names(fqn for fqn in known if fqn in taken)
        report.left_out = sorted({*view.tensors, *view.values} - set(self._names))
        num_bytes = sum(self._entry(fqn).num_bytes for fqn in self._names if fqn in view.tensors)
        self._meter = Meter(f"export {view.url}", num_bytes, self._options.progress)
        self._target.prepare()
        if self._options.format == "safetensors":
            self._write_safetensors()
        else:
            self._write_torch()
        self._target.flush()
        report.num_tensors = sum(fqn in view.tensors for fqn in self._names)
        report.seconds = time.monotonic() - begin
        return report

    def _entry(self, fqn: str) -> Entry:
        tensor = self._view.tensors[fqn]
        cast = self._options.dtype if tensor.dtype.is_floating_point else None
        return Entry(self._names[fqn], cast or tensor.dtype, tensor.shape)

    # Safetensors -----------------------------------------------------------------------------------------

    def _write_safetensors(self) -> None:
        entries = [self._entry(fqn) for fqn in self._names]
        safetensors_files.check_dtypes(entries)
        files = {self._file: entries} if self._file else safetensors_files.packed(entries, self._options.shard_bytes)
        index = {safetensors_files.INDEX_NAME: safetensors_files.index(files)} if len(files) > 1 else {}
        self._make_way([*files, *index], also=() if self._file else (safetensors_files.INDEX_NAME,))
        keys = {name: fqn for fqn, name in self._names.items()}
        for file, own in files.items():
            ordered = safetensors_files.in_file_order(own)
            head = safetensors_files.header(ordered)
            elements = self._elements([keys[entry.name] for entry in ordered])
            self._publish(
                file, itertools.chain([head], elements), len(head) + sum(entry.num_bytes for entry in ordered)
            )
        self._compare_sizes()
        # The index comes last: what has one is complete.
        for file, data in index.items():
            self._target.swap(file, data)
            self._wrote(file, len(data))

    def _elements(self, fqns: Sequence[str]) -> Iterator[Buffer]:
        """Yield the elements of tensors, as bytes in row-major order, one tensor after the other."""
        for group in slabs(self._view, fqns, _SLAB_BYTES):
            tensors = self._view.read_boxes(group)
            self._report.num_unverified += self._view.last_report.num_unverified
            for box, tensor in zip(group, tensors, strict=True):
                data = tensor.to(self._entry(box.fqn).dtype)
                if data.numel():
                    yield payload_of(data.contiguous())
                self._meter.add(data.nbytes)
            del tensors, tensor, data  # Before the next ones are read.

    # torch.save ------------------------------------------------------------------------------------------

    def _write_torch(self) -> None:
        view = self._view
        file = self._file or TORCH_NAME
        self._make_way([file])
        values = view.read_values([fqn for fqn in self._names if fqn in view.values])
        entries = {fqn: self._entry(fqn) for fqn in self._names if fqn in view.tensors}
        # Memory that is never touched is never given, so these cost nothing.
        empty = {fqn: torch.empty(entry.shape, dtype=entry.dtype) for fqn, entry in entries.items()}
        outline = TorchFile(self._nested({**empty, **values}))
        fqn_of = {id(tensor): fqn for fqn, tensor in empty.items()}
        self._publish(file, self._torch_parts(outline, fqn_of), outline.num_bytes)
        self._compare_sizes()

    def _nested(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as it was saved; or flat, if keys were chosen or renamed."""
        paths = getattr(self._view.metadata, "planner_data", None) or {}
        if self._options.keys == KeyChoice() and all(fqn in paths for fqn in flat):
            return nesting.restore({fqn: flat[fqn] for fqn in self._names}, paths)
        return {self._names[fqn]: flat[fqn] for fqn in self._names}

    def _torch_parts(self, outline: TorchFile, fqn_of: Mapping[int, str]) -> Iterator[Buffer]:
        parts = outline.parts
        elements = self._elements([fqn_of[id(part)] for part in parts() if id(part) in fqn_of])
        for part in parts():
            if isinstance(part, bytes):
                yield part
            elif id(part) in fqn_of:
                left = part.nbytes
                while left:
                    data = next(elements)
                    left -= len(data)
                    yield data
            else:
                yield payload_of(part.contiguous())  # Within a Python value.

    # Files -----------------------------------------------------------------------------------------------

    def _make_way(self, names: Sequence[str], also: Sequence[str] = ()) -> None:
        there = [name for name in dict.fromkeys([*names, *also]) if self._target.exists(name)]
        if there and not self._options.overwrite:
            raise CheckpointExistsError(
                f"{self._target.url_of(there[0])} exists already; export to another place, or allow overwriting"
            )
        self._target.remove(name for name in there if name == safetensors_files.INDEX_NAME)

    def _publish(self, name: str, chunks: Iterator[Buffer], num_bytes: int) -> None:
        self._target.publish_stream(name, chunks, num_bytes)
        self._wrote(name, num_bytes)

    def _wrote(self, name: str, num_bytes: int) -> None:
        self._report.files.append(self._target.url_of(name))
        self._report.num_bytes += num_bytes
        self._sizes[name] = num_bytes

    def _compare_sizes(self) -> None:
        for name, wanted in self._sizes.items():
            size = self._target.size(name)
            if size != wanted:
                raise StorageWriteError(f"{self._target.url_of(name)} has {size} bytes, {wanted} were written")
