"""Files of this machine, through the operating system: no copy, no half-written file, durable when it returns."""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

Buffer = bytes | bytearray | memoryview

_MAX_BUFFERS_A_CALL = 512
"""Below IOV_MAX (1024 on Linux), the number of buffers that one writev takes."""


def make_folder(path: str) -> None:
    """Make the folder `path`, with those above it, and make their names durable. One that exists is fine."""
    missing = []
    folder = os.path.abspath(path)
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    os.makedirs(path, exist_ok=True)
    for made in missing:
        sync_folder(os.path.dirname(made))


def publish(path: str, buffers: Sequence[Buffer], *, create_only: bool = False) -> None:
    """Write `buffers` to a temporary file beside `path`, sync it, and give it its name.

    Raises:
        FileExistsError: `create_only`, and `path` exists.
        OSError: the temporary file is gone again, `path` is as it was.
    """
    publish_stream(path, [buffers], create_only=create_only)


def publish_stream(path: str, groups: Iterable[Sequence[Buffer]], *, create_only: bool = False) -> None:
    """Do what `publish` does with buffers that come in groups, each written before the next one is asked for."""
    temporary = f"{path}.tmp-{secrets.token_hex(4)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            for buffers in groups:
                _write_all(descriptor, buffers)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if create_only:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        _unlink_if_there(temporary)
        raise


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    for batch in _batches([memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]):
        while batch:
            _drop(batch, os.writev(descriptor, batch))


def _batches(views: list[memoryview]) -> Iterator[list[memoryview]]:
    for first in range(0, len(views), _MAX_BUFFERS_A_CALL):
        yield views[first : first + _MAX_BUFFERS_A_CALL]


def _unlink_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def read(path: str) -> bytes:
    """Return the whole file."""
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def read_range(path: str, start: int, stop: int) -> memoryview:
    """Return the bytes [start, stop) of the file, fewer if it ends before `stop`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Nothing is allocated for bytes that are not there, whatever a checkpoint claims.
        view = memoryview(bytearray(max(0, min(stop, os.fstat(descriptor).st_size) - start)))
        return view[: _fill(descriptor, start, [view])]
    finally:
        os.close(descriptor)


def read_into(path: str, start: int, views: Sequence[memoryview]) -> int:
    """Fill `views` with what lies from byte `start` on; return how many bytes there were."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _fill(descriptor, start, views)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, start: int, views: Sequence[memoryview]) -> int:
    filled = 0
    for batch in _batches([view for view in views if len(view)]):
        while batch:
            count = os.preadv(descriptor, batch, start + filled)
            if count == 0:
                return filled
            filled += count
            _drop(batch, count)
    return filled


def _drop(batch: list[memoryview], num_bytes: int) -> None:
    """Take the first `num_bytes` off the buffers."""
    done = 0
    while done < len(batch) and num_bytes >= len(batch[done]):
        num_bytes -= len(batch[done])
        done += 1
    del batch[:done]
    if num_bytes:
        batch[0] = batch[0][num_bytes:]


def sync_folder(path: str) -> None:
    """Make the names in the folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
