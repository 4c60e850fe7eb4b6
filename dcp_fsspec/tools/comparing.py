"""Compare two checkpoints: keys, shapes, dtypes, then values; by their checksums, and by value where these differ."""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_fsspec.errors import UnsafeCheckpointError
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.inspecting import CheckpointView, StoredTensor, slabs
from dcp_fsspec.storage.progress import Meter, ProgressCallback

_SLAB_BYTES = 32 << 20
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Difference:
    """One key that differs.

    Attributes:
        key: The key.
        kind: ``"only in first"``, ``"only in second"``, ``"type"``, ``"shape"``, ``"dtype"`` or ``"value"``.
        first: What the first checkpoint has, as text.
        second: What the second one has.
        num_elements: Of tensors that differ in value: how many elements do.
        max_difference: By how much at most; None where that cannot be said.
    """

    key: str
    kind: str
    first: str = ""
    second: str = ""
    num_elements: int | None = None
    max_difference: float | None = None


@dataclass
class DiffReport:
    """How two checkpoints differ.

    Attributes:
        first: Url of the one.
        second: Url of the other.
        differences: All of them; none for equal checkpoints.
        num_equal: Keys that are equal.
        num_by_checksum: Of these, keys of which the checksums said so, without reading them.
        seconds: Wall time.
    """

    first: str
    second: str
    differences: list[Difference] = field(default_factory=list)
    num_equal: int = 0
    num_by_checksum: int = 0
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(
    first: Mapping[str, Store],
    second: Mapping[str, Store],
    *,
    values: bool = True,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare two checkpoints, component by component.

    Args:
        first: Folders of the components of the one, by name.
        second: Those of the other. Two that are a single component each are compared whatever their names.
        values: Compare values, too.
        progress: Told how far the reading has come.

    Raises:
        CorruptCheckpointError, UnsafeCheckpointError, StorageReadError: one of them cannot be read.
    """
    begin = time.monotonic()
    if len(first) == len(second) == 1:
        first, second = {"": next(iter(first.values()))}, {"": next(iter(second.values()))}
    report = DiffReport(_urls(first), _urls(second))
    for name in sorted({*first, *second}):
        if name not in second:
            report.differences.append(Difference(name, "only in first", "component"))
        elif name not in first:
            report.differences.append(Difference(name, "only in second", "", "component"))
        else:
            prefix = f"{name}/" if name else ""
            _Comparison(first[name], second[name], prefix, report, progress).run(values=values)
    report.seconds = time.monotonic() - begin
    return report


def _urls(components: Mapping[str, Store]) -> str:
    return (
        next(iter(components.values())).url if len(components) == 1 else ", ".join(s.url for s in components.values())
    )


class _Comparison:
    def __init__(
        self, first: Store, second: Store, prefix: str, report: DiffReport, progress: ProgressCallback | None
    ) -> None:
        self._first, self._second = CheckpointView(first), CheckpointView(second)
        self._prefix, self._report, self._progress = prefix, report, progress

    def run(self, *, values: bool) -> None:
        one, other = self._first, self._second
        undecided = []
        for key in sorted({*one.tensors, *one.values, *other.tensors, *other.values}):
            found = self._outside(key)
            if found is not None:
                self._report.differences.append(found)
            elif not values:
                self._report.num_equal += 1
            elif self._same_checksums(key):
                self._report.num_equal += 1
                self._report.num_by_checksum += 1
            else:
                undecided.append(key)
        total = sum(one.tensors[key].num_bytes for key in undecided if key in one.tensors)
        self._meter = Meter(f"compare {one.url}", total, self._progress)
        for key in undecided:
            found = self._tensors_differ(key) if key in one.tensors else self._values_differ(key)
            if found is None:
                self._report.num_equal += 1
            else:
                self._report.differences.append(found)

    def _outside(self, key: str) -> Difference | None:
        """Compare all but the value."""
        name = self._prefix + key
        a, b = (_described(view, key) for view in (self._first, self._second))
        if not b:
            return Difference(name, "only in first", a)
        if not a:
            return Difference(name, "only in second", "", b)
        first, second = self._first.tensors.get(key), self._second.tensors.get(key)
        if first is None and second is None:
            return None
        if first is None or second is None:
            return Difference(name, "type", a, b)
        if first.shape != second.shape:
            return Difference(name, "shape", a, b)
        return Difference(name, "dtype", a, b) if first.dtype != second.dtype else None

    def _same_checksums(self, key: str) -> bool:
        a, b = _checksums(self._first, key), _checksums(self._second, key)
        return a is not None and a == b

    def _tensors_differ(self, key: str) -> Difference | None:
        different, largest = 0, 0.0
        tensor = self._first.tensors[key]
        for group in slabs(self._first, [key], _SLAB_BYTES):
            pairs = zip(self._first.read_boxes(group), self._second.read_boxes(group), strict=True)
            for a, b in pairs:
                count, most = _distance(a, b)
                different += count
                largest = max(largest, most)
                self._meter.add(a.nbytes)
        if not different:
            return None
        described = _shown(tensor)
        return Difference(self._prefix + key, "value", described, described, different, largest)

    def _values_differ(self, key: str) -> Difference | None:
        if _item_bytes(self._first, key) == _item_bytes(self._second, key):
            return None
        try:
            a, b = (view.read_values([key])[key] for view in (self._first, self._second))
        except UnsafeCheckpointError:
            return Difference(self._prefix + key, "value", "a Python value", "another one")
        # The frame around a value depends on the version of torch that wrote it.
        return None if _saved(a) == _saved(b) else Difference(self._prefix + key, "value", _short(a), _short(b))


def _described(view: CheckpointView, key: str) -> str:
    if key in view.tensors:
        return _shown(view.tensors[key])
    return "a Python value" if key in view.values else ""


def _shown(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _checksums(view: CheckpointView, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...], int]] | None:
    """Return the checksum of each item of a key, with where it belongs; None if not all are known."""
    section = view.checksums or {}
    items = view.tensors[key].chunks if key in view.tensors else (view.values[key].item,)
    found = []
    for item in items:
        record = section.get(item.file)
        known = record.items.get((item.start, item.num_bytes)) if record else None
        if known is None:
            return None
        found.append((item.offsets, item.sizes, known.crc))
    return sorted(found)


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ in their bits, and by how much at most."""
    bits_a, bits_b = (tensor.reshape(-1).view(torch.uint8).view(-1, tensor.dtype.itemsize) for tensor in (a, b))
    differ = (bits_a != bits_b).any(dim=1)
    count = int(differ.sum())
    if not count or a.dtype.is_complex:
        return count, 0.0
    apart = (a.reshape(-1)[differ].double() - b.reshape(-1)[differ].double()).abs()
    return count, float(apart.nan_to_num(nan=float("inf")).max())


def _item_bytes(view: CheckpointView, key: str) -> bytes:
    item = view.values[key].item
    return bytes(view.store.read_range(item.file, item.start, item.start + item.num_bytes))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
