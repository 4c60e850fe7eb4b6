"""Memory that threads use again and again.

Memory touched for the first time costs more than copying into it, and what threads allocate and free in turn stays with
their allocators. So copies on their way go through mappings that are lent and come back, and that go back to the system
with their owner.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_GRAIN_BYTES = 64 << 10

MAX_SCRATCH_BYTES = 16 << 20
"""Larger reads, of unusual checkpoints, get memory that goes again."""


class Scratch:
    """Memory lent to threads. What comes back is kept for the next one, as far as all of it stays within a limit.

    Args:
        limit_bytes: What is lent and what is kept, together. Nobody is refused: what goes beyond is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._kept: list[mmap.mmap] = []  # The smallest first.
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes lent and kept."""
        return self._num_bytes

    @contextlib.contextmanager
    def lent(self, num_bytes: int) -> Iterator[memoryview]:
        """Give a buffer of `num_bytes`, of any content, for as long as the context lasts."""
        if not num_bytes:
            yield memoryview(bytearray())
            return
        mapping = self._taken(num_bytes)
        try:
            yield memoryview(mapping)[:num_bytes]
        finally:
            self._take_back(mapping)

    def _taken(self, num_bytes: int) -> mmap.mmap:
        num_bytes = -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            place = bisect.bisect_left(self._kept, num_bytes, key=len)
            # With much larger ones, what is lent would no longer fit in the limit.
            if place < len(self._kept) and len(self._kept[place]) <= num_bytes + num_bytes // 8:
                return self._kept.pop(place)
            # What is kept is of no use here, and in the way if there is no room for both.
            while self._kept and self._num_bytes + num_bytes > self._limit_bytes:
                self._num_bytes -= len(self._kept.pop(0))
            self._num_bytes += num_bytes
        return mmap.mmap(-1, num_bytes)

    def _take_back(self, mapping: mmap.mmap) -> None:
        with self._lock:
            if self._num_bytes <= self._limit_bytes:
                bisect.insort(self._kept, mapping, key=len)
            else:
                self._num_bytes -= len(mapping)


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
