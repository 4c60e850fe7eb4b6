"""A file as ``torch.save`` makes it, of a state that need not fit into memory.

``torch.save`` writes the file once with its public ``skip_data``: everything but the elements, and where they belong.
The elements are put there as they come.
"""

import io
import re
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import torch
from torch.serialization import skip_data

from dcp_fsspec.errors import ConfigurationError

_LOCAL_HEADER = b"PK\x03\x04"
_STORAGE = re.compile(rb"/data/(\d+)")


class _Recorder(io.RawIOBase):
    """A stream that keeps what is written, and how much was skipped in between."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []
        self._position = 0

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        self._position += len(cast(bytes, self.parts[-1]))
        return len(cast(bytes, self.parts[-1]))

    def seek(self, offset: int, whence: int = 0) -> int:
        target = offset if whence == 0 else self._position + offset
        if target > self._position:
            self.parts.append(target - self._position)
        self._position = target
        return target

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class TorchFile:
    """The outline of a file.

    Args:
        state: What to save, with tensors that have shape and dtype and no content worth saving.

    Attributes:
        num_bytes: Size of the file.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        recorder = _Recorder()
        with skip_data():
            torch.save(state, cast(IO[bytes], recorder))
        self._parts = recorder.parts
        self.num_bytes = recorder.tell()
        self._tensors = list(_tensors(state))

    def parts(self) -> Iterator[bytes | torch.Tensor]:
        """Yield the file in order: bytes, and for the elements of a tensor the tensor of `state` itself."""
        before = b""
        for part in self._parts:
            if isinstance(part, bytes):
                before = (before + part)[-4096:]
                yield part
                continue
            header = before[before.rfind(_LOCAL_HEADER) :]
            match = _STORAGE.search(header)
            tensor = self._tensors[int(match[1])] if match else None
            if tensor is None or tensor.untyped_storage().nbytes() != part:
                raise ConfigurationError("this version of torch writes files in a form that is not known here")
            before = b""
            yield tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dicts and lists in the order in which they are pickled."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
