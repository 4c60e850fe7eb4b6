"""One item as bytes: the zip archive that ``torch.save`` makes of a tensor, without copying the tensor.

A frame is everything before the payload, the payload, and everything after it. For a plain contiguous tensor the
two outer parts depend on dtype and shape alone, so they are made once by ``torch.save`` itself (with its public
``skip_data``) and kept; the payload is the tensor's own memory. Reading compares the outer parts with what they
must be for the expected dtype and shape, and then takes the payload as it lies; whatever looks different is left
to ``torch.load(weights_only=True)``.

The CRC32 fields of the archive stay as ``skip_data`` leaves them. Torch does not read them.
"""

import ctypes
import functools
import io
import math
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, cast

import torch
from torch.serialization import skip_data

from dcp_fsspec.errors import IncompatibleStateError
from dcp_fsspec.storage.archive import check_archive
from dcp_fsspec.storage.scratch import HostCopies

Buffer = bytes | bytearray | memoryview

_LOCAL_HEADER = b"PK\x03\x04"
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

with warnings.catch_warnings():
    # Torch warns once a process when it is given read-only memory; nobody writes through what is made of it here.
    # Said now, since the filters of warnings are global and threads must not touch them.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(frozen=True)
class Template:
    """The outer parts of the frame of one dtype and shape.

    Attributes:
        head: Everything before the payload.
        tail: Everything after it.
        payload_bytes: Length of the payload.
        crc_at: Where in `head` the four bytes of the payload's CRC32 stand.
    """

    head: bytes
    tail: bytes
    payload_bytes: int
    crc_at: int

    @property
    def num_bytes(self) -> int:
        """Length of the whole frame."""
        return len(self.head) + self.payload_bytes + len(self.tail)

    def fits(self, head: Buffer) -> bool:
        """Tell whether a stored frame of this dtype and shape begins with `head`, its CRC32 aside."""
        view = memoryview(head)
        if len(view) != len(self.head):
            return False
        crc = slice(self.crc_at, self.crc_at + 4)
        return view[: crc.start] == self.head[: crc.start] and view[crc.stop :] == self.head[crc.stop :]


class _Recorder(io.RawIOBase):
    """A stream that keeps small writes and notes where the data was skipped."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._position = 0
        self.head = b""

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        self._parts.append(bytes(data))
        self._position += len(self._parts[-1])
        return len(self._parts[-1])

    def seek(self, offset: int, whence: int = 0) -> int:
        target = offset if whence == 0 else self._position + offset
        if target != self._position:
            self.head, self._parts = b"".join(self._parts), []
        self._position = target
        return target

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    @property
    def tail(self) -> bytes:
        return b"".join(self._parts)


@functools.cache
def _has_name(dtype: torch.dtype) -> bool:
    """Tell whether torch's files have a word for `dtype`: for torch.int4 and others below a byte they have none."""
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except KeyError:
        return False
    return True


@functools.lru_cache(maxsize=8192)
def template(dtype: torch.dtype, shape: tuple[int, ...]) -> Template | None:
    """Return the template of a contiguous CPU tensor, or None where a frame has no single payload."""
    if dtype in QUANTIZED or not math.prod(shape) or not _has_name(dtype):
        return None
    try:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")  # Its memory is never touched.
    except RuntimeError:
        return None  # No machine has so much: a checkpoint claims it.
    recorder = _Recorder()
    with skip_data():
        torch.save(tensor, cast(IO[bytes], recorder))
    header_at = recorder.head.rfind(_LOCAL_HEADER)
    if header_at < 0:
        return None
    made = Template(recorder.head, recorder.tail, tensor.nbytes, header_at + 14)
    return made if recorder.tell() == made.num_bytes else None


def payload_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy. The view keeps the tensor alive."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def frame_tensor(tensor: torch.Tensor, copies: HostCopies | None = None) -> list[Buffer]:
    """Return the buffers of the frame of `tensor`.

    Accelerator tensors are copied to the host; views are compacted to the elements they show, never the storage
    behind them.

    Args:
        tensor: What to frame. Its own memory is pointed into if it is contiguous and on the host.
        copies: Where to put a copy that is needed otherwise.

    Raises:
        IncompatibleStateError: a tensor that could not be loaded again.
    """
    if tensor.layout != torch.strided:
        raise IncompatibleStateError(
            f"a tensor of layout {tensor.layout} cannot be loaded from a checkpoint; save its indices and values"
        )
    tensor = tensor.detach()
    if not _is_plain(tensor):
        return [_frame_by_torch(tensor.cpu())]
    if not _has_name(tensor.dtype):
        raise IncompatibleStateError(f"torch.save has no word for {tensor.dtype}; save a view of it as torch.uint8")
    if not is_framed_in_place(tensor):
        tensor = (copies or HostCopies(memoryview(b""))).copy(tensor)
    made = template(tensor.dtype, tuple(tensor.shape))
    if made is not None:
        return [made.head, payload_of(tensor), made.tail]
    return [_frame_by_torch(tensor.clone())]


def is_framed_in_place(tensor: object) -> bool:
    """Tell whether a frame points into the memory of `tensor` itself, so that no copy is made."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and _is_plain(tensor.detach())
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _frame_by_torch(tensor: torch.Tensor) -> bytes:
    """Frame a tensor that is not plain, and make sure that it can be read again."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    content = stream.getvalue()
    try:
        load_tensor(content)
    except pickle.UnpicklingError as error:
        raise IncompatibleStateError(
            f"a tensor of class {type(tensor).__qualname__} could be saved and not be loaded again: make its class "
            f"known by torch.serialization.add_safe_globals ({error})"
        ) from error
    return content


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and tensor.dtype not in QUANTIZED


def unframe_tensor(data: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor in a whole frame; it may share memory with `data`.

    Args:
        data: The frame.
        dtype: Dtype that the metadata names; the frame itself decides.
        shape: Shape of the stored chunk.

    Raises:
        Exception: whatever ``torch.load(weights_only=True)`` raises on damaged data.
    """
    view = memoryview(data)
    made = template(dtype, tuple(shape)) if payload_bytes(dtype, shape) <= len(view) else None
    if made is not None and len(view) == made.num_bytes and made.fits(view[: len(made.head)]):
        return tensor_from_payload(view[len(made.head) :][: made.payload_bytes], dtype, shape)
    return load_tensor(data)


def payload_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return how many bytes the elements of a tensor take."""
    return math.prod(shape) * dtype.itemsize


def max_frame_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return how long the frame of a tensor may be, also of a class with attributes of its own.

    What is longer was made to fill the memory of its reader.
    """
    return 4 * payload_bytes(dtype, shape) + (1 << 20)


def load_tensor(data: Buffer) -> torch.Tensor:
    """Load a tensor of any frame the slow way, running none of its code and taking no more memory than it is long."""
    check_archive(data)
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.Tensor):
        raise TypeError(f"the item holds a {type(loaded).__name__}, not a tensor")
    return loaded


def tensor_from_payload(payload: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View a payload as a contiguous tensor, without a copy.

    Items lie in a file at any byte, so the elements may be unaligned. Copying out of such a tensor is fine.
    """
    flat = torch.frombuffer(payload, dtype=torch.uint8)
    return flat.view(dtype).view(tuple(shape))


def rows_from_payload(
    payload: Buffer, dtype: torch.dtype, strides: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """View the envelope of a box inside a larger contiguous tensor as that box.

    Args:
        payload: The bytes from the box's first element to its last one.
        dtype: Element type.
        strides: Strides of the larger tensor, in elements.
        lengths: Shape of the box.
    """
    flat = torch.frombuffer(payload, dtype=torch.uint8)
    return flat.view(dtype).as_strided(tuple(lengths), tuple(strides))
