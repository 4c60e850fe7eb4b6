"""Open a stranger's ``.metadata`` without running the stranger's code.

``.metadata`` is a pickle. A pickle is a program; what it can do is bounded by the globals it can name. Only the
plain records that DCP's metadata is made of can be named here, for every version of torch since 2.2.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from dcp_fsspec.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsspec.storage.pickle_scan import MAX_SCANNED_BYTES, LastingChangeError, scan
from dcp_fsspec.storage.torch_internals import (
    MemoryFormat,
    OldMemoryFormat,
    OldTensorProperties,
    ShardMetadata,
    StorageInfo,
)

_RECORDS: dict[tuple[str, str], type] = {
    **{
        ("torch.distributed.checkpoint.metadata", cls.__name__): cls
        for cls in (
            dcp.Metadata,
            dcp.MetadataIndex,
            dcp.StorageMeta,
            dcp.TensorProperties,
            dcp.TensorStorageMetadata,
            dcp.BytesStorageMetadata,
            dcp.ChunkStorageMetadata,
            MemoryFormat,
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    # Before torch 2.3 the properties were those of sharded tensors.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): OldTensorProperties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): OldMemoryFormat,
    ("torch.distributed._shard.metadata", "ShardMetadata"): ShardMetadata,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}

_PATH_CLASSES = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        record = _RECORDS.get((module, name))
        if record is not None:
            return record
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            # A new function each time, so that nothing lasting can be changed through it.
            return _fresh(_layout)
        if (module, name) in _PATH_CLASSES:
            return _fresh(_joined)
        raise UnsafeCheckpointError(
            f"it names {module}.{name}, which no checkpoint metadata needs; opening it could run code of whoever "
            "wrote it"
        )


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise CorruptCheckpointError(f"it names a tensor layout {name!r}, which torch does not have")
    return layout


def _joined(*parts: str) -> str:
    """Stand in for a path object: local writers of torch put one where the format says str."""
    text = "/".join(str(part).rstrip("/") if part != "/" else "" for part in parts)
    return text or "/"


@contextmanager
def _nothing_lasting_changed() -> Iterator[None]:
    """Undo and report changes to the classes themselves and to members of enumerations: a pickle can set attributes.

    What a member says of itself goes into all that is pickled later.
    """
    before = [(one, dict(vars(one))) for one in (*_RECORDS.values(), *MemoryFormat, *OldMemoryFormat)]
    try:
        yield
    finally:
        changed = [(one, was) for one, was in before if not _same(was, dict(vars(one)))]
        for one, was in changed:
            _restore(one, was)
    if changed:
        raise UnsafeCheckpointError(f"it tries to change {changed[0][0]!r}")


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def _restore(one: Any, before: dict[str, Any]) -> None:
    for name in set(vars(one)) - before.keys():
        delattr(one, name)
    for name, value in before.items():
        if vars(one).get(name) is not value:
            setattr(one, name, value)


def loads(data: bytes, where: str) -> dcp.Metadata:
    """Return the metadata in `data`.

    Args:
        data: Content of a ``.metadata`` file.
        where: Its url, for messages.

    Raises:
        UnsafeCheckpointError: it names something that metadata does not consist of. Nothing was run.
        CorruptCheckpointError: it is no metadata.
    """
    try:
        if len(data) <= MAX_SCANNED_BYTES:
            scan(data)
        with _nothing_lasting_changed():
            loaded = _MetadataUnpickler(io.BytesIO(data)).load()
    except (UnsafeCheckpointError, LastingChangeError) as error:
        raise UnsafeCheckpointError(f"{where} was refused: {error}") from None
    except Exception as error:
        raise CorruptCheckpointError(
            f"{where} cannot be read as checkpoint metadata ({type(error).__name__}: {error}): it is damaged or was "
            "not written by torch.distributed.checkpoint"
        ) from error
    if not isinstance(loaded, dcp.Metadata):
        raise CorruptCheckpointError(f"{where} holds a {type(loaded).__name__}, not checkpoint metadata")
    return loaded
