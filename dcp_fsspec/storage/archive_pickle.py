"""Try the pickle in an archive of ``torch.save`` out on dummies, so that its real run holds no surprise.

The interpreter is the one that planners will use, Python's own; what it names are stand-ins. They compare sizes, and
make nothing. Names that are not known here are let through: whether they may be used at all is for
``torch.load(weights_only=True)`` to say, and for the user who trusts a type.
"""

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_fsspec.storage.pickle_scan import scan
from dcp_fsspec.storage.torch_internals import STORAGE_ITEMSIZES, TENSOR_CLASSES

_TEXT_ENCODINGS = {"latin1", "latin-1", "utf-8", "utf8", "ascii"}


class PreviewError(ValueError):
    """The pickle would allocate what is not in its archive. Nothing was run."""


@dataclass(frozen=True)
class _Storage:
    """A storage that the archive holds."""

    num_bytes: int
    itemsize: int


@dataclass(frozen=True)
class _StorageType:
    """Stands for a class of storages. It cannot be called."""

    itemsize: int


class _Anything:
    """Stands for every object that is of no concern here, and for its class."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Anything":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Take an item, as a list would."""

    extend = append


class _Tensor:
    """Stands for a tensor, and for the classes of tensors, which have no business to be called."""

    def __new__(cls, *args: object) -> "_Tensor":
        raise PreviewError("it makes a tensor or a storage out of nothing but a size")

    def __setstate__(self, state: object) -> None:
        raise PreviewError("it changes a tensor that it has made")


def _tensor() -> _Tensor:
    return object.__new__(_Tensor)


def _rebuild(dtype_at: int | None = None, *, dense: bool = False) -> Callable[..., _Tensor]:
    """Return the stand-in of a function that puts a tensor on a storage.

    Args:
        dtype_at: Which argument is the element type, if one is.
        dense: The function allocates as many elements as the shape has, whatever the strides.
    """

    def rebuild(*args: Any) -> _Tensor:
        storage, offset, size, stride = args[:4]
        if not isinstance(storage, _Storage):
            raise PreviewError("it makes a tensor without a storage")
        itemsize = storage.itemsize if dtype_at is None else args[dtype_at].itemsize
        _check_fits(storage.num_bytes, itemsize, offset, size, stride, dense)
        return _tensor()

    return rebuild


def _check_fits(
    num_bytes: int, itemsize: int, offset: int, size: Sequence[int], stride: Sequence[int], dense: bool
) -> None:
    numbers = (offset, *size, *stride)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(size) != len(stride):
        raise PreviewError("it makes a tensor of a strange shape")
    if 0 in size:
        return
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    num_elements = 1
    for length in size:
        num_elements *= length
    if (last + 1) * itemsize > num_bytes or num_elements >= 1 << 62 or (dense and num_elements * itemsize > num_bytes):
        raise PreviewError(f"it makes a tensor of shape {tuple(size)[:8]} of a storage of {num_bytes} bytes")


def _bytearray(*args: Any) -> bytes:
    if args and not isinstance(args[0], bytes | str | list):
        raise PreviewError("it makes a bytearray out of nothing but a size")
    return b""


def _encode(text: str, encoding: str = "utf-8", *_: str) -> bytes:
    # Other encodings are looked up by importing a module of that name.
    if encoding.lower() not in _TEXT_ENCODINGS:
        raise PreviewError(f"it encodes by {encoding[:20]!r}")
    return text.encode(encoding)


def _from_type(function: Callable[..., Any], kind: object, args: Sequence[Any], state: object = None) -> Any:
    return function(*args)


_STAND_INS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _bytearray,
    ("_codecs", "encode"): _encode,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_tensor"): _rebuild(),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild(),
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild(dtype_at=6),
    ("torch._utils", "_rebuild_qtensor"): _rebuild(dense=True),
    ("torch.nn.parameter", "Parameter"): _Tensor,
}
# Protocol 2, which torch.save uses, has the names of Python 2 for these.
_STAND_INS |= {("__builtin__", name): _STAND_INS["builtins", name] for name in ("set", "complex", "bytearray")}
_STAND_INS |= dict.fromkeys(TENSOR_CLASSES, _Tensor)
_STAND_INS |= {name: _StorageType(itemsize) for name, itemsize in STORAGE_ITEMSIZES.items()}


class _Preview(pickle.Unpickler):
    def __init__(self, program: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(program), encoding="utf-8")
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        known = _STAND_INS.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Anything if known is None else known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, location, num_elements = pid
        num_bytes = self._sizes.get(key)
        if kind != "storage" or not isinstance(storage_type, _StorageType) or num_bytes is None:
            raise PreviewError("it refers to a storage that is not in the archive")
        if type(num_elements) is not int or not 0 <= num_elements * storage_type.itemsize <= num_bytes:
            raise PreviewError(f"it says {num_elements} elements of a storage of {num_bytes} bytes")
        if type(location) is not str:
            raise PreviewError("it says nothing of the device of a storage")
        torch.device(location)  # It knows the names of all that there are.
        return _Storage(num_elements * storage_type.itemsize, storage_type.itemsize)


def preview(program: bytes, sizes: Mapping[str, int]) -> None:
    """Run a pickle on stand-ins.

    Args:
        program: The pickle.
        sizes: Bytes of each storage in the archive, by its key.

    Raises:
        ValueError: it would take more memory than its archive has, or end the process.
        Exception: whatever pickle raises on damaged data.
    """
    scan(program, persistent_ids=True)
    _Preview(program, sizes).load()
