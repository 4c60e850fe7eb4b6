"""What helps when millions of small objects are made at once."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_held_off() -> Iterator[None]:
    """Hold off cyclic garbage collection, which would look at all objects made so far, again and again.

    It goes on as before when the block ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
