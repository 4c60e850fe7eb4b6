"""The stock ``.metadata`` file: written as stock writers do, read by an allow-list, checked before it is believed."""

import math
from collections.abc import Mapping
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
from dcp_fsspec.storage.torch_internals import DCP_VERSION, StorageInfo

_MAX_SIZE = 1 << 50
"""Bytes, offsets and element counts beyond this are damage or malice: no store holds such a file."""


def encode(metadata: Metadata, storage_data: Mapping[MetadataIndex, StorageInfo], storage_meta: StorageMeta) -> bytes:
    """Complete `metadata` in place, as stock writers do, and return the content of its file."""
    metadata.version = DCP_VERSION
    metadata.storage_data = storage_data
    metadata.storage_meta = storage_meta
    with collection_held_off():
        return metadata_pickle.dumps(metadata)


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
    files: dict[str, list[tuple[int, int]]] = {}
    good: set[int] = set()  # Offsets and numbers that many items share are looked at once. All of them stay alive.
    for index, info in storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
            raise TypeError("storage_data holds something else than items")
        if not (isinstance(index.fqn, str) and id(index.offset) in good and id(index.index) in good):
            if not _is_index(index):
                raise TypeError("storage_data holds something else than items")
            good |= {id(index.offset), id(index.index)}
        path, offset, length = info.relative_path, info.offset, info.length
        places = files.get(path) if isinstance(path, str) else None
        if places is None:
            _check_path(path, where)
            places = files[path] = []
        if type(offset) is not int or type(length) is not int:
            raise TypeError(f"{index.fqn} lies at no place")
        places.append((offset, length))
        transforms = getattr(info, "transform_descriptors", None)
        if transforms and not _are_texts(transforms):
            raise TypeError(f"{index.fqn} has strange transforms")
    for path, places in files.items():
        _check_places(path, np.array(places, dtype=np.int64))


def _check_places(path: str, places: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
    """Refuse places of items in one file, rows of offset and length, that are absurd or overlap."""
    if places.min() < 0 or places.max() > _MAX_SIZE:
        raise ValueError(f"an item of {path} lies at an absurd place")
    places = places[np.lexsort((places[:, 1], places[:, 0]))]
    if (places[1:, 0] < places[:-1].sum(axis=1)).any():
        raise ValueError(f"items overlap in {path}")


def _is_index(index: MetadataIndex) -> bool:
    offset, number = index.offset, index.index
    return (
        isinstance(index.fqn, str)
        and (offset is None or (type(offset) is torch.Size and min(offset, default=0) >= 0) or _are_counts(offset))
        and (number is None or _is_count(number))
    )


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
    offsets = _rows(fqn, [chunk.offsets for chunk in record.chunks], len(record.size))
    sizes = _rows(fqn, [chunk.sizes for chunk in record.chunks], len(record.size))
    whole = np.array(record.size, dtype=np.int64)
    if (offsets < 0).any() or (sizes < 0).any() or (offsets > whole).any() or (sizes > whole - offsets).any():
        raise ValueError(f"{fqn} has a chunk outside of its shape {tuple(record.size)}")


def _rows(fqn: str, tuples: list[object], length: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return tuples of `length` counts as the rows of an array."""
    for one in tuples:
        # A torch.Size can hold nothing but integers.
        if type(one) is not torch.Size and not (isinstance(one, tuple) and all(map(_is_count, one))):
            raise TypeError(f"{fqn} has a chunk without a shape")
        if len(one) != length:
            raise ValueError(f"{fqn} has a chunk of another number of dimensions")
    return np.array(tuples, dtype=np.int64).reshape(len(tuples), length)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _check_path(path: object, where: str) -> None:
    if not isinstance(path, str) or not is_safe_relative(path):
        raise UnsafeCheckpointError(
            f"{where} was refused: it refers to the file {path!r}, which is not inside the checkpoint's folder"
        )
