"""Which bytes are fetched for what is wanted."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_fsspec.storage.ranges import MAX_GAP_BYTES, MAX_WASTE, Wanted, envelope, merge

KIB, MIB = 1 << 10, 1 << 20


def wanted(*ranges: tuple[int, int], file: str = "a") -> list[Wanted[int]]:
    return [Wanted(file, start, stop, number) for number, (start, stop) in enumerate(ranges)]


def test_neighbours_become_one_request() -> None:
    (fetch,) = merge(wanted((0, 10), (10, 30), (30, 31)))
    assert (fetch.start, fetch.stop) == (0, 31)
    assert [one.consumer for one in fetch.wanted] == [0, 1, 2]


def test_order_of_the_plan_does_not_matter() -> None:
    ranges = [(100 * n, 100 * n + 100) for n in range(50)]
    forward, backward = merge(wanted(*ranges)), merge(wanted(*reversed(ranges)))
    assert [(f.start, f.stop) for f in forward] == [(f.start, f.stop) for f in backward] == [(0, 5000)]


def test_files_are_never_mixed() -> None:
    fetches = merge(wanted((0, 10), file="a") + wanted((10, 20), file="b"))
    assert [(f.file, f.start, f.stop) for f in fetches] == [("a", 0, 10), ("b", 10, 20)]


def test_a_large_gap_is_not_read() -> None:
    far = MIB + MAX_GAP_BYTES + 1
    fetches = merge(wanted((0, MIB), (far, far + MIB)))
    assert sum(fetch.num_bytes for fetch in fetches) == 2 * MIB


def test_requests_are_of_about_the_wanted_size() -> None:
    ranges = [(n * MIB, (n + 1) * MIB) for n in range(64)]
    fetches = merge(wanted(*ranges), fetch_bytes=8 * MIB)
    assert [fetch.num_bytes for fetch in fetches] == [8 * MIB] * 8


def test_a_single_large_range_is_not_cut() -> None:
    (fetch,) = merge(wanted((0, 100 * MIB)), fetch_bytes=8 * MIB)
    assert fetch.num_bytes == 100 * MIB


def test_overlapping_ranges_share_their_bytes() -> None:
    (fetch,) = merge(wanted((0, 8 * MIB), (0, 8 * MIB), (4 * MIB, 9 * MIB)), fetch_bytes=8 * MIB)
    assert (fetch.start, fetch.stop) == (0, 9 * MIB)


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), min_size=1, max_size=40),
    st.integers(1, 2000),
)
def test_everything_wanted_is_fetched_and_little_else(pairs: list[tuple[int, int]], fetch_kib: int) -> None:
    ranges = [(start * KIB, (start + length) * KIB) for start, length in pairs]
    fetches = merge(wanted(*ranges), fetch_bytes=fetch_kib * KIB)
    got = sorted((one.start, one.stop) for fetch in fetches for one in fetch.wanted)
    assert got == sorted(ranges)
    for fetch in fetches:
        assert all(fetch.start <= one.start and one.stop <= fetch.stop for one in fetch.wanted)
    needed = len(set().union(*(range(start // KIB, stop // KIB) for start, stop in ranges))) * KIB
    fetched = sum(fetch.num_bytes for fetch in fetches)
    assert fetched <= needed * (1 + MAX_WASTE) / (1 - MAX_WASTE) + 4096 * len(fetches)


@given(st.data())
def test_an_envelope_holds_exactly_its_box(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [data.draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    tensor = torch.arange(torch.Size(sizes).numel(), dtype=torch.int16).reshape(sizes)
    box = envelope(sizes, offsets, lengths, itemsize=2)
    flat = tensor.reshape(-1)[box.start // 2 : box.stop // 2]
    expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    assert torch.equal(flat.as_strided(lengths, box.strides), expected)
    assert flat[0] == expected.reshape(-1)[0]
    assert flat[-1] == expected.reshape(-1)[-1]
