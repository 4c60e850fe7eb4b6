"""The stock ``.metadata`` file: written as stock writers do, read by an allow-list, checked before it is believed."""

import itertools
import math
import pickle
from collections.abc import Iterable, Mapping

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
from dcp_fsspec.storage import safe_pickle
from dcp_fsspec.storage.location import is_safe_relative
from dcp_fsspec.storage.torch_internals import DCP_VERSION, StorageInfo

FILE_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"

_MAX_SIZE = 1 << 50
"""Bytes, offsets and element counts beyond this are damage or malice: no store holds such a file."""


def file_name(rank: int | None = None) -> str:
    """Return the name of the metadata file, or of the one that `rank` wrote without collectives."""
    return FILE_NAME if rank is None else f"__{rank}{FILE_NAME}"


def encode(metadata: Metadata, storage_data: Mapping[MetadataIndex, StorageInfo], storage_meta: StorageMeta) -> bytes:
    """Complete `metadata` in place, as stock writers do, and return the content of its file."""
    metadata.version = DCP_VERSION
    metadata.storage_data = storage_data
    metadata.storage_meta = storage_meta
    return pickle.dumps(metadata, protocol=4)


def decode(data: bytes, where: str) -> Metadata:
    """Return the metadata in `data`, checked.

    Args:
        data: Content of the file.
        where: Its url, for messages.

    Raises:
        UnsafeCheckpointError: it would run code, or reach files outside of its folder.
        CorruptCheckpointError: it is damaged, or contradicts itself.
    """
    metadata = safe_pickle.loads(data, where)
    try:
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
    checked: set[str] = set()
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo) or not _is_index(index):
            raise TypeError("storage_data holds something else than items")
        if not isinstance(info.relative_path, str) or info.relative_path not in checked:
            _check_path(info.relative_path, where)
            checked.add(info.relative_path)
        if not (_is_count(info.offset) and _is_count(info.length)):
            raise ValueError(f"{index.fqn} lies at offset {info.offset}, length {info.length}")
        if not _are_texts(getattr(info, "transform_descriptors", None) or ()):
            raise TypeError(f"{index.fqn} has strange transforms")
    _check_overlaps(metadata.storage_data.items())
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta | None):
        raise TypeError("storage_meta is none")


def _is_index(index: MetadataIndex) -> bool:
    offset, number = index.offset, index.index
    return (
        isinstance(index.fqn, str)
        and (offset is None or (isinstance(offset, tuple) and all(map(_is_count, offset))))
        and (number is None or _is_count(number))
    )


def _are_texts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _check_tensor(fqn: str, record: TensorStorageMetadata) -> None:
    if not isinstance(record.properties.dtype, torch.dtype):
        raise TypeError(f"{fqn} has no dtype")
    if not isinstance(record.size, tuple) or not isinstance(record.chunks, list):
        raise TypeError(f"{fqn} has no shape")
    if not all(map(_is_count, record.size)) or math.prod(record.size) > _MAX_SIZE:
        raise ValueError(f"{fqn} has the absurd shape {tuple(record.size)}")
    for chunk in record.chunks:
        if not isinstance(chunk.offsets, tuple) or not isinstance(chunk.sizes, tuple):
            raise TypeError(f"{fqn} has a chunk without a shape")
        fits = len(chunk.offsets) == len(chunk.sizes) == len(record.size) and all(
            _is_count(offset) and _is_count(size) and offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, record.size, strict=True)
        )
        if not fits:
            raise ValueError(f"{fqn} has a chunk outside of its shape {tuple(record.size)}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _check_path(path: object, where: str) -> None:
    if not isinstance(path, str) or not is_safe_relative(path):
        raise UnsafeCheckpointError(
            f"{where} was refused: it refers to the file {path!r}, which is not inside the checkpoint's folder"
        )


def _check_overlaps(items: Iterable[tuple[MetadataIndex, StorageInfo]]) -> None:
    placed = sorted((info.relative_path, info.offset, info.length, index.fqn) for index, info in items)
    for (file, offset, length, fqn), (next_file, next_offset, _, next_fqn) in itertools.pairwise(placed):
        if file == next_file and next_offset < offset + length:
            raise ValueError(f"{fqn} and {next_fqn} overlap in {file}")
