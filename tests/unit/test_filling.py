"""Memory filled piece by piece, and the checksums taken meanwhile."""

from __future__ import annotations

import io
import random

import pytest

from dcp_fsspec.storage.checksums import crc_of
from dcp_fsspec.storage.filling import Crcs, fill, sum_up

SIZES = [3, 0, 700 << 10, 1, 512 << 10, (1 << 20) + 5, 40]
WHOLE = random.Random(1).randbytes(sum(SIZES))


def _views() -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in SIZES]


def _fill_from(data: bytes, views: list[memoryview], crcs: Crcs) -> int:
    stream = io.BytesIO(data)
    return fill(views, crcs, lambda pieces: sum(stream.readinto(piece) for piece in pieces))


@pytest.mark.parametrize("numbers", [[], [2], [0, 1, 4, 6], range(len(SIZES))])
def test_memory_is_filled_and_summed_as_if_at_once(numbers: list[int]) -> None:
    views = _views()
    crcs = dict.fromkeys(numbers, 99)  # As a first try that failed would leave them.
    assert _fill_from(WHOLE, views, crcs) == len(WHOLE)
    assert b"".join(views) == WHOLE
    assert crcs == {number: crc_of([views[number]]) for number in numbers}
    again = dict.fromkeys(numbers, 0)
    sum_up(views, again)
    assert again == crcs


@pytest.mark.parametrize("crcs", [{}, {2: 0, 5: 0}])
def test_too_few_bytes_are_counted(crcs: Crcs) -> None:
    assert _fill_from(WHOLE[:-50], _views(), crcs) == len(WHOLE) - 50
