"""Where each byte of a fetched range goes: straight into a tensor, or through memory that is used again.

A consumer that knows where its bytes belong names that memory, and the store fills it. What lies around it, and what
others want, goes through scratch memory.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from dcp_fsspec.storage.filesystem import Buffer
from dcp_fsspec.storage.framing import is_framed_in_place
from dcp_fsspec.storage.ranges import Fetch, Wanted

MIN_LANDING_BYTES = 64 << 10
"""Less is copied faster than it is placed."""


@dataclass(frozen=True)
class Landing:
    """Memory for the middle part of what a consumer wants.

    Attributes:
        head_bytes: How much of it comes before the memory.
        memory: Filled by the store.
        landed: Called then, with what came before and after it.
    """

    head_bytes: int
    memory: memoryview
    landed: Callable[[Buffer, Buffer], None]


@dataclass(frozen=True)
class Consumer:
    """Whom fetched bytes are for.

    Attributes:
        take: Takes them; they are valid during the call.
        land: Says whether a part of them can be put where it belongs at once.
    """

    take: Callable[[Buffer], None]
    land: Callable[[], Landing | None] = lambda: None


class Layout:
    """The memory for one fetch.

    Args:
        fetch: What is fetched.

    Attributes:
        scratch_bytes: How much of it has no place of its own.
    """

    def __init__(self, fetch: Fetch[Consumer]) -> None:
        self._fetch = fetch
        self._landings = {id(one): landing for one in _alone(fetch) if (landing := one.consumer.land())}
        bounds = [fetch.start]
        for one in fetch.wanted:
            if landing := self._landings.get(id(one)):
                start = one.start + landing.head_bytes
                bounds += [start, start + len(landing.memory)]
        bounds.append(fetch.stop)
        self._starts, self._stops = bounds[::2], bounds[1::2]
        self.scratch_bytes = sum(self._stops) - sum(self._starts)

    def fill(self, memory: memoryview, read: Callable[[Sequence[memoryview]], None]) -> None:
        """Let `read` fill all; what has no place goes into `memory`, of `scratch_bytes`, until it is handed over."""
        ends = [0]
        for start, stop in zip(self._starts, self._stops, strict=True):
            ends.append(ends[-1] + stop - start)
        self._stretches = [memory[a:b] for a, b in pairwise(ends)]
        views = [self._stretches[0]]
        for landing, stretch in zip(self._landings.values(), self._stretches[1:], strict=True):
            views += [landing.memory, stretch]
        read(views)

    def hand_over(self) -> None:
        """Tell the consumers that all is there."""
        number = 0
        for one in self._fetch.wanted:
            landing = self._landings.get(id(one))
            if landing is None:
                one.consumer.take(self._scratch_of(one))
                continue
            before, after = self._stretches[number : number + 2]
            tail_bytes = one.num_bytes - landing.head_bytes - len(landing.memory)
            landing.landed(before[len(before) - landing.head_bytes :], after[:tail_bytes])
            number += 1

    def _scratch_of(self, one: Wanted[Consumer]) -> memoryview:
        number = bisect.bisect_right(self._starts, one.start) - 1
        start = one.start - self._starts[number]
        return self._stretches[number][start : start + one.num_bytes]


def give(fetch: Fetch[Consumer], data: Buffer) -> None:
    """Give the consumers what they want of `data`, all that was fetched."""
    view = memoryview(data)
    for one in fetch.wanted:
        one.consumer.take(view[one.start - fetch.start : one.stop - fetch.start])


def _alone(fetch: Fetch[Consumer]) -> list[Wanted[Consumer]]:
    """Return what shares no byte with anything else."""
    alone, stop = [], fetch.start
    following = [one.start for one in fetch.wanted[1:]] + [fetch.stop]
    for one, next_start in zip(fetch.wanted, following, strict=True):
        if stop <= one.start and one.stop <= next_start:
            alone.append(one)
        stop = max(stop, one.stop)
    return alone


def can_land(destination: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Tell whether elements of this kind can be put into the memory of `destination` as they lie in a file."""
    return destination.dtype == dtype and tuple(destination.shape) == sizes and is_framed_in_place(destination)


def tell_autograd(destination: torch.Tensor) -> None:
    """Say that memory was written behind the back of torch, as an operation in place would."""
    if not destination.is_inference():
        torch.autograd.graph.increment_version(destination)
