"""Memory that is lent: nobody shares it, what comes back is lent again, and all of it stays within a limit."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from dcp_fsspec.storage.scratch import Scratch

MIB = 1 << 20


def test_nobody_shares_what_is_lent() -> None:
    scratch = Scratch(8 * MIB)
    rounds = 300

    def use(number: int) -> None:
        own = random.Random(number)
        for _ in range(rounds):
            with scratch.lent(own.randrange(MIB // 2)) as memory:
                mark = bytes([number]) * len(memory)
                memory[:] = mark
                os.sched_yield()
                assert memory == mark

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert scratch.num_bytes <= 8 * MIB


def test_what_comes_back_is_lent_again_also_to_another_thread() -> None:
    scratch = Scratch(8 * MIB)

    def mark() -> None:
        with scratch.lent(MIB) as memory:
            memory[:4] = b"mark"

    thread = threading.Thread(target=mark)
    thread.start()
    thread.join()
    with scratch.lent(MIB - 5) as memory:
        assert bytes(memory[:4]) == b"mark"
        assert len(memory) == MIB - 5
    assert scratch.num_bytes == MIB


def test_large_and_small_in_turn_stay_within_the_limit() -> None:
    """One buffer for each thread, as large as any that it ever took, would be 16 times as much."""
    scratch = Scratch(16 * MIB)
    for num_bytes in [8 * MIB, 64 << 10] * 3:
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                for _ in range(16 * MIB // num_bytes):
                    stack.enter_context(scratch.lent(num_bytes))
                assert scratch.num_bytes <= 16 * MIB
    assert scratch.num_bytes <= 16 * MIB


def test_more_than_the_limit_is_lent_and_not_kept() -> None:
    scratch = Scratch(MIB)
    with scratch.lent(3 * MIB) as memory, scratch.lent(MIB // 2):
        memory[:] = bytes(3 * MIB)
    assert scratch.num_bytes <= MIB


def test_nothing_is_lent_for_nothing() -> None:
    scratch = Scratch(MIB)
    with scratch.lent(0) as memory:
        assert len(memory) == 0
    assert scratch.num_bytes == 0


def test_what_fails_gives_back() -> None:
    scratch = Scratch(MIB)
    with contextlib.suppress(ZeroDivisionError), scratch.lent(MIB):
        raise ZeroDivisionError
    with scratch.lent(MIB):
        assert scratch.num_bytes == MIB
