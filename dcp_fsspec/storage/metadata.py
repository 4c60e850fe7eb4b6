"""The stock ``.metadata`` file: written as stock writers do, read by an allow-list, checked before it is believed."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dcp_fsspec.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsspec.storage import metadata_pickle, safe_pickle
from dcp_fsspec.storage.bulk import collection_held_off
from dcp_fsspec.storage.location import is_safe_relative
from dcp_fsspec.storage.names import FILE_NAME as FILE_NAME
from dcp_fsspec.storage.names import SHARD_SUFFIX as SHARD_SUFFIX
from dcp_fsspec.storage.names import file_name as file_name
from dcp_fsspec.storage.results import FileResult
from dcp_fsspec.storage.torch_internals import DCP_VERSION, StorageInfo

_MAX_SIZE = 1 << 50
"""Bytes, offsets and element counts beyond this are damage or malice: no store holds such a file."""


def encode(metadata: Metadata, files: Iterable[FileResult], storage_meta: StorageMeta) -> bytes:
    """Complete `metadata` in place, all but `storage_data`, and return the content of its file.

    Args:
        metadata: As the planner made it.
        files: What was written; `storage_data` of the file that is returned.
        storage_meta: What else stands there.
    """
    metadata.version = DCP_VERSION
    metadata.storage_meta = storage_meta
    with collection_held_off():
        return metadata_pickle.dumps(metadata, files)


def decode(data: bytes, where: str) -> Metadata:
    """Return the metadata in `data`, checked.

    Args:
        data: Content of the file.
        where: Its url, for messages.

    Raises:
        UnsafeCheckpointError: it would run code, or reach files outside of its folder.
        CorruptCheckpointError: it is damaged, or contradicts itself.
    """
    try:
        with collection_held_off():
            metadata = safe_pickle.loads(data, where)
            _check(metadata, where)
    except (AttributeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise CorruptCheckpointError(f"{where} is not in the form of checkpoint metadata: {error!r}") from error
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def save_id_of(metadata: Metadata) -> str | None:
    """Return the id of the save that wrote `metadata`, if it has one."""
    save_id = getattr(getattr(metadata, "storage_meta", None), "save_id", None)
    return save_id if isinstance(save_id, str) else None


def shard_files(metadata: Metadata) -> set[str]:
    """Return the names of the shard files that `metadata` refers to."""
    return {info.relative_path for info in metadata.storage_data.values()}


def chunk_of(metadata: Metadata, index: MetadataIndex) -> tuple[TensorStorageMetadata, ChunkStorageMetadata]:
    """Return the record of the tensor and of the stored chunk that `index` names.

    Raises:
        KeyError: there is none.
    """
    tensor = metadata.state_dict_metadata[index.fqn]
    if isinstance(tensor, TensorStorageMetadata):
        hint = index.index
        if hint is not None and hint < len(tensor.chunks) and tensor.chunks[hint].offsets == index.offset:
            return tensor, tensor.chunks[hint]
        for chunk in tensor.chunks:
            if index.offset is None or chunk.offsets == index.offset:
                return tensor, chunk
    raise KeyError(index)


def _check(metadata: Metadata, where: str) -> None:
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise TypeError("state_dict_metadata and storage_data must be dicts")
    for fqn, record in metadata.state_dict_metadata.items():
        if not isinstance(fqn, str):
            raise TypeError("a key is not a str")
        if isinstance(record, TensorStorageMetadata):
            _check_tensor(fqn, record)
        elif not isinstance(record, BytesStorageMetadata):
            raise TypeError(f"{fqn} is neither a tensor nor bytes")
    _check_items(metadata.storage_data, where)
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta | None):
        raise TypeError("storage_meta is none")


def _check_items(storage_data: Mapping[MetadataIndex, StorageInfo], where: str) -> None:
    indices, infos = list(storage_data), list(storage_data.values())
    if not (_all_are(MetadataIndex, indices) and _all_are(StorageInfo, infos)):
        raise TypeError("storage_data holds something else than items")
    if not (
        _all_are(str, map(attrgetter("fqn"), indices))
        and all(offset is None or _is_offset(offset) for offset in _distinct(map(attrgetter("offset"), indices)))
        and all(number is None or _is_count(number) for number in _distinct(map(attrgetter("index"), indices)))
    ):
        raise TypeError("an index in storage_data is none")
    transforms = filter(None, map(getattr, infos, repeat("transform_descriptors"), repeat(None)))
    if not all(map(_are_texts, transforms)):
        raise TypeError("an item has strange transforms")
    _check_places(infos, where)


def _check_places(infos: Sequence[StorageInfo], where: str) -> None:
    """Refuse places of items that are absurd, outside of the folder, or overlap."""
    paths = list(map(attrgetter("relative_path"), infos))
    offsets, lengths = list(map(attrgetter("offset"), infos)), list(map(attrgetter("length"), infos))
    if not (_all_are(str, paths) and _all_are(int, offsets) and _all_are(int, lengths)):
        raise TypeError("an item lies at no place")
    files = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    for path in files:
        _check_path(path, where)
    file = np.fromiter(map(files.__getitem__, paths), dtype=np.int64, count=len(paths))
    offset, length = np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64)
    for column in (offset, length):
        if column.min(initial=0) < 0 or column.max(initial=0) > _MAX_SIZE:
            raise ValueError("an item lies at an absurd place")
    order = np.lexsort((length, offset, file))
    file, offset, length = file[order], offset[order], length[order]
    overlaps = (file[1:] == file[:-1]) & (offset[1:] < (offset + length)[:-1])
    if overlaps.any():
        raise ValueError(f"items overlap in {paths[order[overlaps.argmax()]]}")


def _all_are(cls: type, values: Iterable[object]) -> bool:
    return set(map(type, values)) <= {cls}


def _distinct(values: Iterable[object]) -> Collection[object]:
    """Return shapes and numbers that many items share once; of anything else, all of it."""
    values = list(values)
    return set(values) if set(map(type, values)) <= {torch.Size, int, type(None)} else values


def _is_offset(value: object) -> bool:
    # A torch.Size can hold nothing but integers.
    return (type(value) is torch.Size and min(value, default=0) >= 0) or _are_counts(value)


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and all(map(_is_count, values))


def _are_texts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _check_tensor(fqn: str, record: TensorStorageMetadata) -> None:
    if not isinstance(record.properties.dtype, torch.dtype):
        raise TypeError(f"{fqn} has no dtype")
    if not isinstance(record.size, tuple) or not isinstance(record.chunks, list):
        raise TypeError(f"{fqn} has no shape")
    if not all(map(_is_count, record.size)) or math.prod(record.size) > _MAX_SIZE:
        raise ValueError(f"{fqn} has the absurd shape {tuple(record.size)}")
    offsets = _rows(fqn, list(map(attrgetter("offsets"), record.chunks)), len(record.size))
    sizes = _rows(fqn, list(map(attrgetter("sizes"), record.chunks)), len(record.size))
    whole = np.array(record.size, dtype=np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (offsets > whole).any() or (sizes > whole - offsets).any():
        raise ValueError(f"{fqn} has a chunk outside of its shape {tuple(record.size)}")


def _rows(fqn: str, tuples: Collection[Sequence[int]], length: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return tuples of `length` counts as the rows of an array."""
    if not _all_are(torch.Size, tuples) and not all(map(_are_counts, tuples)):
        raise TypeError(f"{fqn} has a chunk without a shape")
    if set(map(len, tuples)) - {length}:
        raise ValueError(f"{fqn} has a chunk of another number of dimensions")
    numbers = np.fromiter(chain.from_iterable(tuples), dtype=np.int64, count=length * len(tuples))
    return numbers.reshape(len(tuples), length)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _check_path(path: str, where: str) -> None:
    if not is_safe_relative(path):
        raise UnsafeCheckpointError(
            f"{where} was refused: it refers to the file {path!r}, which is not inside the checkpoint's folder"
        )
