"""Memory that a thread uses again and again.

Memory touched for the first time costs more than copying into it, and what threads allocate and free in turn stays with
their allocators. So copies on their way go through one mapping per thread, which goes back to the system with it.
"""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64

MAX_SCRATCH_BYTES = 16 << 20
"""Larger reads, of unusual checkpoints, get memory that goes again."""


class Scratch(threading.local):
    """One growing buffer per thread. What is taken is valid until the same thread takes again."""

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer of `num_bytes`, of any content."""
        if not num_bytes:
            return memoryview(bytearray())
        if self._mapping is None or len(self._mapping) < num_bytes:
            self._mapping = mmap.mmap(-1, num_bytes)
        return memoryview(self._mapping)[:num_bytes]


class HostCopies:
    """Contiguous copies of tensors, one after the other in a buffer.

    Args:
        buffer: Where to put them.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._used = 0

    @staticmethod
    def num_bytes(tensor_bytes: int) -> int:
        """Return what a tensor takes up at most."""
        return tensor_bytes + _ALIGNMENT

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `tensor`, in the buffer if it has room."""
        import torch  # By now it is there; importing it takes seconds, and listing a folder does not need it.

        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        size = tensor.numel() * tensor.element_size()
        if not size or start + size > len(self._buffer):
            return tensor.resolve_conj().resolve_neg().cpu().contiguous()
        self._used = start + size
        flat = torch.frombuffer(self._buffer, dtype=torch.uint8, count=size, offset=start)
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
