"""The pool and its budget."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_fsspec.storage.transfer import Job, Transfer


class Meter:
    """Counts what runs at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._jobs = 0
        self.max_bytes = self.max_jobs = 0

    def job(self, cost: int, result: int) -> Job[int]:
        def run() -> int:
            with self._lock:
                self._bytes, self._jobs = self._bytes + cost, self._jobs + 1
                self.max_bytes = max(self.max_bytes, self._bytes)
                self.max_jobs = max(self.max_jobs, self._jobs)
            with self._lock:
                self._bytes, self._jobs = self._bytes - cost, self._jobs - 1
            return result

        return Job(cost, run)


@given(costs=st.lists(st.integers(0, 40), max_size=30), budget=st.integers(1, 60), threads=st.integers(1, 5))
def test_order_and_bounds_hold(costs: list[int], budget: int, threads: int) -> None:
    meter = Meter()
    jobs = [meter.job(cost, number) for number, cost in enumerate(costs)]
    assert Transfer(threads, budget).run(jobs) == list(range(len(costs)))
    assert meter.max_jobs <= threads
    assert meter.max_bytes <= max([budget, *costs])


def test_jobs_do_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=20)
    Transfer(4, 100).run(Job(25, barrier.wait) for _ in range(4))


def test_a_failure_stops_what_has_not_begun_and_leaves_no_thread() -> None:
    before = threading.active_count()
    started: list[int] = []

    def job(number: int) -> Job[None]:
        def run() -> None:
            started.append(number)
            if number == 3:
                raise OSError("no space left")

        return Job(1, run)

    with pytest.raises(OSError, match="no space left"):
        Transfer(2, 100).run(job(number) for number in range(1000))
    assert len(started) < 20
    assert threading.active_count() == before


def test_failures_of_several_threads_are_all_told() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def fail() -> None:
        number = barrier.wait()
        raise OSError(f"disk {number} is full")

    with pytest.raises(OSError) as caught:
        Transfer(2, 100).run([Job(1, fail), Job(1, fail)])
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "disk 0" in text
    assert "disk 1" in text


def test_an_interrupt_in_a_job_is_not_swallowed() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Transfer(2, 100).run([Job(1, interrupt), Job(1, lambda: None)])
    assert threading.active_count() == before
