"""Copies from host memory to host memory, on the cores that the training leaves idle while it waits for them.

One core does not fill the memory's bandwidth, and torch uses several for a copy only where it may use them anyhow.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from dcp_fsspec.storage.pace import ranks_here

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and where each is to be copied."""

_PIECE_BYTES = 8 << 20
_MAX_THREADS = 4


def copy_on_host(pairs: Pairs) -> None:
    """Copy each tensor to its place."""
    pieces = itertools.chain.from_iterable(_pieces(source, place) for source, place in pairs)
    groups = deque(_groups(pieces))
    num_others = min(_num_threads(), len(groups)) - 1
    if num_others < 1:
        _copy_all(groups)
        return
    with ThreadPoolExecutor(num_others, "dcp_fsspec_copy") as pool:
        others = [pool.submit(_copy_all, groups) for _ in range(num_others)]
        _copy_all(groups)
    for other in others:
        other.result()


def _num_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_THREADS, cores // (ranks_here() * torch.get_num_threads())))


def _pieces(source: torch.Tensor, place: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a copy that is large and goes from plain memory; where it goes is plain memory."""
    if source.nbytes <= _PIECE_BYTES or not source.is_contiguous():
        yield source, place
        return
    source, place, length = source.view(-1), place.view(-1), _PIECE_BYTES // source.itemsize
    for start in range(0, len(source), length):
        yield source[start : start + length], place[start : start + length]


def _groups(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Pairs]:
    """Join small copies, so that threads seldom meet."""
    group: Pairs = []
    num_bytes = 0
    for source, place in pieces:
        group.append((source, place))
        num_bytes += place.nbytes
        if num_bytes >= _PIECE_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


@torch.no_grad()
def _copy_all(groups: deque[Pairs]) -> None:
    """Copy what nobody has begun to copy, until there is nothing left."""
    while True:
        try:
            group = groups.popleft()
        except IndexError:
            return
        for source, place in group:
            place.copy_(source)
