"""The fault-injecting filesystem does what its rules say, and nothing else."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest

from dcp_fsspec.testing.faults import WATCHED, Call, Delay, Drop, Fail, FaultyFileSystem, Flip, Rule, Truncate
from support.stores import MemoryStore


@pytest.fixture
def root() -> Any:
    store = MemoryStore()
    yield store.url.removeprefix("memory:/")
    store.close()


@pytest.fixture
def faulty() -> FaultyFileSystem:
    return FaultyFileSystem(fsspec.filesystem("memory"))


def full() -> OSError:
    return OSError(errno.ENOSPC, "full")


def test_without_rules_everything_passes_through_and_is_written_down(faulty: FaultyFileSystem, root: str) -> None:
    faulty.makedirs(f"{root}/sub", exist_ok=True)
    faulty.pipe_file(f"{root}/a", b"0123456789")
    faulty.mv(f"{root}/a", f"{root}/b")
    assert faulty.cat_file(f"{root}/b", start=2, end=5) == b"234"
    assert faulty.cat_file(f"{root}/b") == b"0123456789"
    assert faulty.exists(f"{root}/b")
    assert faulty.info(f"{root}/b")["size"] == 10
    assert faulty.find(root) == [f"{root}/b"]
    with faulty.open(f"{root}/b", "rb") as file:
        assert file.read(1) == b"0"
    faulty.invalidate_cache()
    faulty.invalidate_cache(root)
    faulty.rm_file(f"{root}/b")
    assert not faulty.fs.exists(f"{root}/b")

    assert faulty.calls[:2] == [Call("makedirs", f"{root}/sub"), Call("pipe_file", f"{root}/a", 10)]
    assert faulty.count("cat_file") == 2
    assert faulty.num_bytes("cat_file", "*/b") == 13
    assert faulty.count("cat_file", "*/a") == 0
    assert {call.verb for call in faulty.calls} <= WATCHED


def test_the_nth_call_fails_and_no_other(faulty: FaultyFileSystem, root: str) -> None:
    faulty.pipe_file(f"{root}/before", b"")
    faulty.inject("pipe_file", Fail(full()), path="*/x*", nth=2, times=2)
    outcomes = []
    for name in ("x1", "other", "x2", "x3", "x4"):
        try:
            faulty.pipe_file(f"{root}/{name}", b"data")
            outcomes.append(faulty.fs.exists(f"{root}/{name}"))
        except OSError as error:
            assert not faulty.fs.exists(f"{root}/{name}")
            outcomes.append(error.errno)
    assert outcomes == [True, True, errno.ENOSPC, errno.ENOSPC, True]
    assert faulty.count("pipe_file") == 6


def test_an_answer_can_be_lost_after_the_call_was_carried_out(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("pipe_file", Fail(ConnectionResetError(), carried_out=True))
    with pytest.raises(ConnectionResetError):
        faulty.pipe_file(f"{root}/a", b"data")
    assert faulty.fs.cat_file(f"{root}/a") == b"data"


def test_writes_and_answers_are_truncated(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("pipe_file", Truncate())
    faulty.pipe_file(f"{root}/a", b"0123456789")
    assert faulty.fs.cat_file(f"{root}/a") == b"01234"
    faulty.inject("pipe_file", Truncate(3, error=full()))
    with pytest.raises(OSError):
        faulty.pipe_file(f"{root}/b", b"0123456789")
    assert faulty.fs.cat_file(f"{root}/b") == b"012"
    faulty.inject("cat_file", Truncate(1))
    assert [faulty.cat_file(f"{root}/b") for _ in range(2)] == [b"0", b"012"]


def test_a_dropped_write_is_reported_as_done(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("pipe_file", Drop())
    faulty.pipe_file(f"{root}/a", b"data")
    assert not faulty.fs.exists(f"{root}/a")
    faulty.pipe_file(f"{root}/a", b"data")
    faulty.inject("rm_file", Drop())
    faulty.rm_file(f"{root}/a")
    assert faulty.fs.exists(f"{root}/a")


def test_exactly_one_bit_is_flipped(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("pipe_file", Flip(bit=9))
    faulty.pipe_file(f"{root}/a", bytes(4))
    assert faulty.fs.cat_file(f"{root}/a") == b"\x00\x02\x00\x00"
    faulty.inject("cat_file", Flip())
    assert faulty.cat_file(f"{root}/a") == b"\x00\x02\x01\x00"
    assert faulty.cat_file(f"{root}/a") == b"\x00\x02\x00\x00"


def test_a_delayed_call_is_carried_out_in_the_end(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("pipe_file", Delay(0.02))
    begin = time.monotonic()
    faulty.pipe_file(f"{root}/a", b"data")
    assert time.monotonic() - begin >= 0.02
    assert faulty.fs.cat_file(f"{root}/a") == b"data"


def test_healed_it_works_again(faulty: FaultyFileSystem, root: str) -> None:
    faulty.inject("exists", Fail(full()), times=None)
    with pytest.raises(OSError):
        faulty.exists(root)
    faulty.heal()
    assert not faulty.exists(f"{root}/a")
    assert faulty.count("exists") == 2


@pytest.mark.parametrize(
    "rule",
    [("glob", Fail(full())), ("rm_file", Flip()), ("exists", Drop()), ("cat_file", Drop()), ("open", Truncate())],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_rule_that_could_never_take_effect_is_refused(faulty: FaultyFileSystem, rule: Any) -> None:
    with pytest.raises(ValueError):
        faulty.inject(*rule)
    with pytest.raises(ValueError):
        faulty.inject("cat_file", Flip(), nth=0)


def test_many_threads_share_one_count(faulty: FaultyFileSystem, root: str) -> None:
    num_threads, each = 8, 50
    faulty.inject("pipe_file", Fail(full()), nth=100, times=3)
    start = threading.Barrier(num_threads)

    def write(thread: int) -> int:
        start.wait()
        failures = 0
        for number in range(each):
            try:
                faulty.pipe_file(f"{root}/{thread}-{number}", b"x")
            except OSError:
                failures += 1
        return failures

    with ThreadPoolExecutor(num_threads) as pool:
        assert sum(pool.map(write, range(num_threads))) == 3
    assert faulty.count("pipe_file") == num_threads * each


def test_a_pickled_copy_has_the_same_rules_and_counts_anew(root: str) -> None:
    faulty = FaultyFileSystem(fsspec.filesystem("memory"), [Rule("exists", Fail(full()))])
    faulty.inject("cat_file", Flip(0))
    with pytest.raises(OSError):
        faulty.exists(root)
    copy = pickle.loads(pickle.dumps(faulty))
    with pytest.raises(OSError):
        copy.exists(root)
    faulty.pipe_file(f"{root}/a", b"\x00")
    assert copy.cat_file(f"{root}/a") == b"\x01"
    assert [call.verb for call in copy.calls] == ["exists", "cat_file"]


def test_it_speaks_the_protocol_of_the_filesystem_behind(faulty: FaultyFileSystem, root: str) -> None:
    assert faulty.protocol == "memory"
    assert faulty._strip_protocol(f"memory:/{root}/") == root
