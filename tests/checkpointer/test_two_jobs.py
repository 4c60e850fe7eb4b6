"""Two jobs that save into one folder: each is told or whole, and the pointer does not go back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from dcp_fsspec import Catalog, DcpFsspecError, DistributedCheckpointer, StorageWriteError
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from support.stores import MemoryStore
from support.training import Job, assert_same, make_job

COMMANDS = ("pipe_file", "rm_file", "rm")


class Between(FaultyFileSystem):
    """Calls a function before the `nth` write or removal.

    Args:
        nth: counted from 1; 0 to count only.
        action: called once.
    """

    def __init__(self, nth: int, action: Callable[[], Any]) -> None:
        super().__init__(fsspec.filesystem("memory"))
        self.nth, self.action, self.seen = nth, action, 0
        self._alone = threading.Lock()

    def _through(self, verb: str, path: Any, call: Callable[..., Any], *data: Any) -> Any:
        if verb in COMMANDS:
            with self._alone:
                self.seen += 1
                if self.seen == self.nth:
                    self.action()
        return super()._through(verb, path, call, *data)


@contextlib.contextmanager
def told() -> Iterator[list[BaseException]]:
    errors: list[BaseException] = []
    try:
        yield errors
    except DcpFsspecError as error:
        errors.append(error)


def _checkpointer(store: MemoryStore, filesystem: Any = None) -> DistributedCheckpointer:
    settings = {"max_concurrency": 1}
    if filesystem is not None:
        return DistributedCheckpointer(store.below("job"), filesystem=filesystem, writer_settings=settings)
    return DistributedCheckpointer(store.below("job"), writer_settings=settings)


def _num_commands(iteration: int, prepare: Callable[[MemoryStore], None]) -> int:
    store = MemoryStore()
    prepare(store)
    counting = Between(0, lambda: None)
    _checkpointer(store, counting).save(*make_job().parts, iteration)
    store.close()
    return counting.seen


def _leftovers(store: MemoryStore) -> None:
    """An iteration 10, and pieces of an iteration 20."""
    _checkpointer(store).save(*make_job(num_steps=1).parts, 10)
    _checkpointer(store).save(*make_job(num_steps=1).parts, 20)
    for name in list(store.raw_list()):
        if name.startswith("job/iter_000000020") and "trainer" not in name:
            store.raw_delete(name)
    store.raw_write("job/latest_checkpoint.txt", b"iter_000000010\n")


def _nothing(store: MemoryStore) -> None:
    """An empty folder."""


def _assert_whole_or_uncommitted(store: MemoryStore, iterations: dict[int, list[Job]]) -> None:
    """Whatever is committed loads, and is what one of the jobs has saved."""
    catalog = Catalog(store.below("job"))
    pointee = catalog.pointee()
    for iteration, jobs in iterations.items():
        try:
            catalog.find(iteration, pointed=iteration == pointee)
        except DcpFsspecError:
            continue
        fresh = make_job(seed=9)
        assert _checkpointer(store).load(*fresh.parts, iteration=iteration) == iteration
        assert any(_is(fresh, job) for job in jobs), f"iteration {iteration} is a mixture"


def _is(job: Job, other: Job) -> bool:
    try:
        assert_same(job, other.state())
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("prepare", [_nothing, _leftovers])
def test_two_jobs_that_save_the_same_iteration_at_the_same_time_are_told_or_whole(
    prepare: Callable[[MemoryStore], None], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make_job(1, 2), make_job(2, 2)
    outcomes = []
    num_commands = _num_commands(20, prepare)
    for nth in range(1, num_commands + 1):
        store = MemoryStore()
        prepare(store)
        inner: list[BaseException] = []

        def interrupt(store: MemoryStore = store, inner: list[BaseException] = inner) -> None:
            with told() as errors:
                _checkpointer(store).save(*other.parts, 20)
            inner.extend(errors)

        with told() as outer:
            _checkpointer(store, Between(nth, interrupt)).save(*one.parts, 20)
        if prepare is _leftovers and nth == num_commands:
            # Committed, but beyond the pointer: any job replaces that, for it looks like one that was killed there.
            assert "is committed and will be replaced" in caplog.text
            _assert_whole_or_uncommitted(store, {10: [make_job(num_steps=1)], 20: [other]})
            break
        assert outer or inner, f"interrupted before command {nth}, nobody was told"
        _assert_whole_or_uncommitted(store, {10: [make_job(num_steps=1)], 20: [one, other]})
        # Whoever was not told finds what he saved; or else the other was told that he has removed something of it.
        latest = Catalog(store.below("job")).latest()
        for errors, others, job in ((outer, inner, one), (inner, outer, other)):
            if not errors and not any("has lost files to two jobs" in str(error) for error in others):
                fresh = make_job(seed=9)
                assert latest is not None
                assert latest.iteration == 20, f"interrupted before command {nth}"
                assert _checkpointer(store).load(*fresh.parts) == 20
                assert _is(fresh, job), f"interrupted before command {nth}"
        outcomes.append((len(outer), len(inner)))
        store.close()
    assert len(outcomes) >= 13
    assert outcomes.count((1, 0)) + outcomes.count((0, 1)) > len(outcomes) // 3, outcomes


@pytest.mark.parametrize("prepare", [_nothing, _leftovers])
@pytest.mark.parametrize(("mine", "others"), [(40, 30), (30, 40)])
def test_two_jobs_that_save_different_iterations_stay_whole_and_the_pointer_names_the_later(
    mine: int, others: int, prepare: Callable[[MemoryStore], None]
) -> None:
    one, other = make_job(1, 2), make_job(2, 2)
    num_commands = _num_commands(mine, prepare)
    for nth in range(1, num_commands + 1):
        store = MemoryStore()
        prepare(store)
        interrupt = Between(nth, lambda store=store: _checkpointer(store).save(*other.parts, others))
        _checkpointer(store, interrupt).save(*one.parts, mine)
        _assert_whole_or_uncommitted(store, {mine: [one], others: [other]})
        catalog = Catalog(store.below("job"))
        assert catalog.iterations()[-2:] == [30, 40]
        assert catalog.pointee() == 40, f"interrupted before command {nth} of {num_commands}"
        latest = catalog.latest()
        assert latest is not None
        assert latest.iteration == 40
        store.close()


def test_the_pointer_does_not_go_back_unasked_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    _checkpointer(store).save(*make_job().parts, 30)
    _checkpointer(store).save(*make_job().parts, 20)
    assert Catalog(store.below("job")).pointee() == 30
    assert "is not moved back to 20" in caplog.text
    assert "Does another job save here?" in caplog.text


def test_the_pointer_goes_back_with_the_first_save_after_the_user_went_back() -> None:
    store = MemoryStore()
    for iteration in (10, 20, 30):
        _checkpointer(store).save(*make_job(num_steps=1).parts, iteration)
    job = make_job()
    checkpointer = _checkpointer(store)
    assert checkpointer.load(*job.parts, iteration=10) == 10
    assert checkpointer.catalog.pointee() == 30
    checkpointer.save(*job.train(1).parts, 15)
    assert checkpointer.catalog.pointee() == 15
    checkpointer.save(*job.train(1).parts, 20)
    assert checkpointer.catalog.pointee() == 20
    fresh = make_job()
    assert _checkpointer(store).load(*fresh.parts) == 20
    assert_same(fresh, job.state())


def test_a_job_that_went_back_does_so_too_when_its_first_save_could_not_move_the_pointer() -> None:
    store = MemoryStore()
    for iteration in (10, 20, 30):
        _checkpointer(store).save(*make_job().parts, iteration)
    faulty, job = FaultyFileSystem(fsspec.filesystem("memory")), make_job()
    faulty.inject("pipe_file", Fail(PermissionError("no")), path="*/latest_checkpoint.txt")
    checkpointer = _checkpointer(store, faulty)
    checkpointer.load(*job.parts, iteration=10)
    with pytest.raises(StorageWriteError):
        checkpointer.save(*job.parts, 15)
    assert checkpointer.catalog.pointee() == 30
    checkpointer.save(*job.parts, 18)
    assert checkpointer.catalog.pointee() == 18


def test_a_committed_iteration_is_not_replaced_unless_that_is_allowed() -> None:
    store = MemoryStore()
    first, second = make_job(1, 1), make_job(2, 1)
    _checkpointer(store).save(*first.parts, 20)
    with told() as errors:
        _checkpointer(store).save(*second.parts, 20)
    assert "committed already" in str(errors[0])
    assert "overwrite=True" in str(errors[0])
    _assert_whole_or_uncommitted(store, {20: [first]})
    DistributedCheckpointer(store.below("job"), overwrite=True).save(*second.parts, 20)
    _assert_whole_or_uncommitted(store, {20: [second]})


def test_an_iteration_of_others_that_the_pointer_names_is_not_taken_for_leftovers(tmp_path: Any) -> None:
    from support.training import save_by_cosmos_rules

    save_by_cosmos_rules(tmp_path, 20, make_job(1), without="trainer")
    with told() as errors:
        DistributedCheckpointer(str(tmp_path)).save(*make_job(2).parts, 20)
    assert "committed already" in str(errors[0])
    assert (tmp_path / "iter_000000020" / "model" / ".metadata").exists()
