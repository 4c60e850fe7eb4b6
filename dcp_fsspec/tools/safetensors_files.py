"""The safetensors format and its shard index, as Hugging Face's loaders expect them. Pure.

A file is the length of its header (8 bytes, little-endian), the header (JSON, by name: dtype, shape, and where the
elements lie), and the elements: https://huggingface.co/docs/safetensors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_fsspec.errors import ConfigurationError, CorruptCheckpointError
from dcp_fsspec.storage.location import is_safe_relative

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20
"""What the library takes."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES = {name: getattr(torch, torch_name) for torch_name, name in _NAMES.items() if hasattr(torch, torch_name)}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    Attributes:
        name: Its key.
        dtype: Its element type.
        shape: Its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Placed:
    """A tensor in a file that exists: what it is, and the bytes [start, stop) of the file that hold its elements."""

    entry: Entry
    start: int
    stop: int


def check_dtypes(entries: Sequence[Entry]) -> None:
    """Refuse what the format cannot hold.

    Raises:
        ConfigurationError: a tensor of another dtype.
    """
    for entry in entries:
        if str(entry.dtype).removeprefix("torch.") not in _NAMES:
            raise ConfigurationError(
                f"{entry.name} is {entry.dtype}, which safetensors does not know: leave it out, or name another dtype"
            )


def in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return `entries` as they lie in a file: the widest elements first, so that all are aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header(entries: Sequence[Entry]) -> bytes:
    """Return what comes before the elements in a file of `entries`, in this order."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        name = _NAMES[str(entry.dtype).removeprefix("torch.")]
        content[entry.name] = {"dtype": name, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_bytes(start: bytes, where: str) -> int:
    """Return the length of the header, from the first 8 bytes of a file.

    Raises:
        CorruptCheckpointError: it cannot be one.
    """
    length = int.from_bytes(start, "little")
    if len(start) != 8 or not 2 <= length <= _MAX_HEADER_BYTES:
        raise CorruptCheckpointError(f"{where} is no safetensors file")
    return length


def parse_header(text: bytes, where: str) -> list[Placed]:
    """Return the tensors of a file, from its header.

    Raises:
        CorruptCheckpointError: it contradicts itself.
    """
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        return [_placed(name, record, 8 + len(text)) for name, record in content.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} has a header that is no safetensors header: {error!r}") from error


def _placed(name: str, record: Mapping[str, Any], data_at: int) -> Placed:
    start, stop = record["data_offsets"]
    shape = tuple(record["shape"])
    if record["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has the dtype {record['dtype']!r}")
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError(f"{name} has odd numbers")
    entry = Entry(name, _DTYPES[record["dtype"]], shape)
    if stop - start != entry.num_bytes:
        raise ValueError(f"{name} has {stop - start} bytes, {entry.num_bytes} belong to its shape")
    return Placed(entry, data_at + start, data_at + stop)


def packed(entries: Sequence[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """Distribute `entries` over files of about `max_bytes`; return them by file name."""
    files: list[list[Entry]] = []
    held = 0
    for entry in entries:
        if not files or (files[-1] and held + entry.num_bytes > max_bytes):
            files.append([])
            held = 0
        files[-1].append(entry)
        held += entry.num_bytes
    if len(files) == 1:
        return {SINGLE_NAME: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}{SUFFIX}": one for number, one in enumerate(files, 1)}


def index(files: Mapping[str, Sequence[Entry]]) -> bytes:
    """Return the content of the index of several files."""
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def files_in_index(data: bytes, where: str) -> list[str]:
    """Return the names of the files that an index refers to.

    Raises:
        CorruptCheckpointError: it is no index, or it refers to files elsewhere.
    """
    try:
        names = sorted(set(json.loads(data)["weight_map"].values()))
        if not all(isinstance(name, str) and is_safe_relative(name) for name in names):
            raise ValueError("it refers to files outside of its folder")
        return names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is no index of safetensors files: {error!r}") from error
