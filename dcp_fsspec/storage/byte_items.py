"""Python values in a checkpoint: pickles, checked before a planner unpickles them.

DCP's planners load byte items with ``torch.load(weights_only=False)``, which runs whatever a stranger wrote. So
each item is first loaded here by torch's restricted rules; what passes names nothing but plain values and tensors,
and is then the same for both.
"""

import io
import threading
from collections.abc import Sequence

import torch

from dcp_fsspec.errors import UnsafeCheckpointError
from dcp_fsspec.storage.archive import check_archive

_REMEMBER_UP_TO_BYTES = 4096
"""Small items repeat (each parameter's learning rate, betas ...); those that passed need not be loaded again."""


class ByteItems:
    """Checks the byte items of one checkpoint.

    Args:
        url: The checkpoint's, for messages.
        trust_pickle: True: check nothing. A sequence of types: allow these as well.
    """

    def __init__(self, url: str, trust_pickle: bool | Sequence[type]) -> None:
        self._url = url
        self._trust_all = trust_pickle is True
        self._allowed = [] if isinstance(trust_pickle, bool) else list(trust_pickle)
        self._passed: set[bytes] = set()
        self._lock = threading.Lock()

    def checked(self, fqn: str, content: bytes) -> io.BytesIO:
        """Return `content` as a stream for a planner.

        Raises:
            UnsafeCheckpointError: loading it would run code, or it needs types that were not allowed.
        """
        if not self._trust_all and content not in self._passed:
            self._check(fqn, content)
            if len(content) <= _REMEMBER_UP_TO_BYTES:
                self._passed.add(content)
        return io.BytesIO(content)

    def _check(self, fqn: str, content: bytes) -> None:
        try:
            check_archive(content)
            # The list of allowed types is global to torch: one thread at a time changes it, and puts it back.
            with self._lock, torch.serialization.safe_globals(list(self._allowed)):
                torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise UnsafeCheckpointError(
                f"{self._url}: the value {fqn!r} {_complaint(content, error)}. If you trust who wrote the "
                "checkpoint, pass trust_pickle=[the types it needs], or trust_pickle=True, to FsspecStorageReader."
            ) from error


def _complaint(content: bytes, error: Exception) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    except Exception:
        names = []
    if names:
        return f"needs {', '.join(sorted(names))}, which is not loaded from a checkpoint without your word"
    return f"is not a plain value that torch.load(weights_only=True) accepts: {error}; it may be damaged"
