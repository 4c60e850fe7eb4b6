"""Memory filled piece by piece, so that a checksum reads what has just been written and is still in the cache.

Going over gigabytes a second time, when they have long left the processor's cache, takes twice as long.
"""

from collections.abc import Callable, Iterator, Sequence

from dcp_fsspec.storage.checksums import crc_of

_PIECE_BYTES = 512 << 10
"""About half of the cache that a core has for itself: the kernel writes into the other half."""

Crcs = dict[int, int]
"""Number of a view -> CRC32C of what is filled into it. Whoever asks puts the numbers in, of any value."""


def fill(views: Sequence[memoryview], crcs: Crcs, read: Callable[[list[memoryview]], int]) -> int:
    """Let `read` fill `views`, some at a time, in order; return how many bytes there were.

    Args:
        views: The memory.
        crcs: Gets the checksums of the views whose numbers it has.
        read: Fills memory from where it stopped before, and says how far it came. Less than all: there is no more.
    """
    if not crcs:
        return read(list(views))
    crcs.update(dict.fromkeys(crcs, 0))
    filled = 0
    for group in _groups(views):
        count = read([piece for _, piece in group])
        filled += count
        if count < sum(len(piece) for _, piece in group):
            break
        for number, piece in group:
            if number in crcs:
                crcs[number] = crc_of([piece], crcs[number])
    return filled


def sum_up(views: Sequence[memoryview], crcs: Crcs) -> None:
    """Compute what `fill` does, of memory that was filled in another way."""
    crcs.update((number, crc_of([views[number]])) for number in list(crcs))


def _groups(views: Sequence[memoryview]) -> Iterator[list[tuple[int, memoryview]]]:
    """Cut `views` into pieces, with the number of the view, and yield as many at a time as the cache takes."""
    group: list[tuple[int, memoryview]] = []
    left = _PIECE_BYTES
    for number, view in enumerate(views):
        rest = view
        while len(rest):
            piece, rest = rest[:left], rest[left:]
            group.append((number, piece))
            left -= len(piece)
            if not left:
                yield group
                group, left = [], _PIECE_BYTES
    if group:
        yield group
