"""Each byte of a fetched range reaches its consumer, through scratch memory or straight in its place."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from dcp_fsspec.storage.clients import scatter
from dcp_fsspec.storage.filesystem import Buffer
from dcp_fsspec.storage.landing import Consumer, Landing, Layout
from dcp_fsspec.storage.ranges import Wanted, merge

FILE = bytes(range(200))


class _Place:
    """A consumer of bytes [start, stop) of FILE; those between `head` and `tail` bytes land in its memory."""

    def __init__(self, start: int, stop: int, head: int = -1, tail: int = 0) -> None:
        self.got = b""
        self._head = head
        self._memory = bytearray(max(0, stop - start - head - tail))
        self.wanted = Wanted("f", start, stop, Consumer(self._take, self._land))
        self.has_landed = False

    def _take(self, data: Buffer) -> None:
        self.got = bytes(data)

    def _land(self) -> Landing | None:
        return None if self._head < 0 else Landing(self._head, memoryview(self._memory), self._landed)

    def _landed(self, head: Buffer, tail: Buffer) -> None:
        self.has_landed = True
        self.got = b"".join([head, self._memory, tail])

    @property
    def expected(self) -> bytes:
        return FILE[self.wanted.start : self.wanted.stop]


def _fetch(places: Sequence[_Place]) -> int:
    (fetch,) = merge([place.wanted for place in places])
    layout = Layout(fetch)
    layout.fill(memoryview(bytearray(layout.scratch_bytes)), functools.partial(scatter, FILE[fetch.start : fetch.stop]))
    layout.hand_over()
    return layout.scratch_bytes


@pytest.mark.parametrize(
    "places",
    [
        [_Place(0, 200)],
        [_Place(0, 200, 0, 0)],
        [_Place(10, 50, 3, 4), _Place(50, 60), _Place(70, 100, 0, 0), _Place(100, 130, 5, 0), _Place(130, 140, 0, 6)],
        [_Place(10, 20), _Place(20, 30), _Place(35, 60, 10, 10), _Place(61, 62)],
    ],
)
def test_every_consumer_gets_its_bytes(places: list[_Place]) -> None:
    _fetch(places)
    for place in places:
        assert place.got == place.expected
        assert place.has_landed == (place._head >= 0)


def test_scratch_is_taken_for_what_has_no_place_only() -> None:
    assert _fetch([_Place(10, 50, 3, 4), _Place(50, 60), _Place(60, 100, 0, 0)]) == 3 + 4 + 10


def test_bytes_that_are_shared_do_not_land() -> None:
    places = [_Place(0, 100, 0, 0), _Place(50, 150, 0, 0), _Place(150, 200, 0, 0)]
    _fetch(places)
    assert [place.has_landed for place in places] == [False, False, True]
    assert [place.got for place in places] == [place.expected for place in places]
