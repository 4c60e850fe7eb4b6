"""Which byte ranges of which shard files a load needs, and how they are merged into requests.

Pure: numbers in, numbers out.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_GAP_BYTES = 64 << 10
"""Bytes worth reading in vain to save one request: about what a store delivers in half a millisecond."""

MAX_WASTE = 0.02
"""Bytes read in vain, as a share of the bytes wanted in the same request, beyond the first gap."""

FETCH_BYTES = 8 << 20
"""Aimed size of one request: large enough to forget the latency, small enough for many at once."""

_MIN_FETCH_BYTES = 2 << 20


@dataclass(frozen=True)
class Wanted(Generic[T]):
    """Bytes [start, stop) of a shard file, `stop` exclusive, and whom they are for."""

    file: str
    start: int
    stop: int
    consumer: T

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start


@dataclass(frozen=True)
class Fetch(Generic[T]):
    """One request: bytes [start, stop) of a shard file, and what of it is wanted, in file order."""

    file: str
    start: int
    stop: int
    wanted: tuple[Wanted[T], ...]

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return self.stop - self.start


def fetch_bytes_for(total_bytes: int, max_concurrency: int) -> int:
    """Return the size of requests for a load of `total_bytes`, so that every connection gets its share."""
    return min(FETCH_BYTES, max(_MIN_FETCH_BYTES, total_bytes // max_concurrency))


def merge(wanted: Iterable[Wanted[T]], fetch_bytes: int = FETCH_BYTES) -> list[Fetch[T]]:
    """Merge neighbouring ranges of the same file into fetches of about `fetch_bytes`.

    A range is never cut, so a fetch is much larger than `fetch_bytes` only if a single range is; a little more is
    allowed for the frames around the payloads. Ranges that overlap
    share their bytes. Bytes read in vain stay below `MAX_GAP_BYTES` a gap, and below `MAX_WASTE` of what is
    wanted once a fetch has more than one gap.
    """
    by_file = sorted(wanted, key=lambda one: (one.file, one.start, one.stop))
    fetches: list[Fetch[T]] = []
    for _, group in itertools.groupby(by_file, key=lambda one: one.file):
        fetches.extend(_merge_file(group, fetch_bytes))
    return fetches


def _merge_file(group: Iterator[Wanted[T]], fetch_bytes: int) -> Iterator[Fetch[T]]:
    first = next(group)
    members, stop, waste = [first], first.stop, 0
    for one in group:
        start, gap = members[0].start, max(0, one.start - stop)
        grown = max(stop, one.stop) - start
        if one.start >= stop and (grown > fetch_bytes + fetch_bytes // 64 or not _worth(gap, waste, grown)):
            yield Fetch(first.file, start, stop, tuple(members))
            members, stop, waste = [one], one.stop, 0
        else:
            members.append(one)
            stop, waste = max(stop, one.stop), waste + gap
    yield Fetch(first.file, members[0].start, stop, tuple(members))


def _worth(gap: int, waste: int, grown: int) -> bool:
    if gap > MAX_GAP_BYTES:
        return False
    return waste + gap <= max(4096, MAX_WASTE * grown)


@dataclass(frozen=True)
class Envelope:
    """The part of a contiguous tensor from a box's first element to its last one.

    Attributes:
        start: Byte of the first element of the box, from the beginning of the tensor's payload.
        stop: Byte after its last element.
        strides: Strides of the tensor, in elements.
    """

    start: int
    stop: int
    strides: tuple[int, ...]


def envelope(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int) -> Envelope:
    """Return the envelope of the box at `offsets` of shape `lengths` in a tensor of shape `sizes`."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    return Envelope(first * itemsize, (last + 1) * itemsize, tuple(strides))


def contiguous_run(sizes: Sequence[int], lengths: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return how many bytes of a box lie together in a tensor of shape `sizes`, and how many others then follow."""
    run = itemsize
    for size, length in zip(reversed(sizes), reversed(lengths), strict=True):
        run *= length
        if length != size:
            return run, run // length * (size - length)
    return run, 0
