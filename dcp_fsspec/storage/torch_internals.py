"""Every name of torch that is not public, in one place, each with what it is needed for."""

import sys
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING as OldMemoryFormat
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.planner_helpers import _create_write_items as create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object as find_shard

__all__ = [
    "DCP_VERSION",
    "STORAGE_ITEMSIZES",
    "TENSOR_CLASSES",
    "ExtensionRegistry",
    "MemoryFormat",
    "OldMemoryFormat",
    "OldTensorProperties",
    "ShardMetadata",
    "ShardedTensor",
    "StorageInfo",
    "StreamTransformExtension",
    "called_by_dcp_load",
    "create_write_items",
    "find_shard",
]

# StorageInfo: the record in Metadata.storage_data that says where an item lies. Part of the stock format.
# MemoryFormat, and ShardMetadata, OldTensorProperties, OldMemoryFormat of torch before 2.3: what .metadata names.
# create_write_items, find_shard: what DCP plans to write of a tensor of any kind, and the data of each such item.
# ExtensionRegistry, StreamTransformExtension: stream transforms (zstd), marked experimental by torch.

DCP_VERSION = "1.0.0"
"""What stock writers put in Metadata.version (torch.distributed.checkpoint.filesystem, torch 2.13)."""

_TENSORS: list[type] = [torch.Tensor, *torch._tensor_classes]
TENSOR_CLASSES = {(cls.__module__, cls.__name__) for cls in _TENSORS}
"""Module and name of the classes that torch.load(weights_only=True) would call to make tensors."""

_STORAGES: list[Any] = list(torch._storage_classes)
STORAGE_ITEMSIZES: dict[tuple[str, str], int] = {
    (cls.__module__, cls.__name__): cls._dtype.itemsize if isinstance(getattr(cls, "_dtype", None), torch.dtype) else 1
    for cls in _STORAGES
}
"""Bytes of an element of each class of storages, by module and name. Pickles name these classes."""


def called_by_dcp_load() -> bool:
    """Tell whether ``dcp.load`` called the function that calls this one.

    It replaces whatever ``read_metadata`` raises by an assertion about missing metadata (torch 2.13), so the reader
    has to raise at another place then. If torch changes, only the type of that error does.
    """
    return sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_loader"
