"""B27: forked children of a trainer that saves, such as the workers of a data loader."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from dcp_fsspec import ConfigurationError
from support.faultproxy import FaultProxy, Stall
from support.jobs import BACKGROUND, MODES, Job, finalized, raised
from support.stores import S3Store
from support.tensors import random_tensor


def _in_child(method: str, function: Callable[..., None], *arguments: Any) -> int | None:
    """Run a function in a child; return its exit code, None if it hangs."""
    process: Any = multiprocessing.get_context(method).Process(target=function, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        process.start()
    process.join(150)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    code: int = process.exitcode
    return code


def _save_alone(url: str, options: dict[str, Any]) -> None:
    for mode in MODES:
        with finalized(Job(f"{url}/{mode}", storage_options=options, async_mode=mode)) as job:
            job.save(5)
        assert job.ears.told("success") == [5]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_b27_a_child_saves_by_checkpointers_of_its_own(method: str, seaweed_store: S3Store) -> None:
    with finalized(Job(seaweed_store.url, storage_options=seaweed_store.storage_options)) as job:
        job.save(1)
        assert _in_child(method, _save_alone, f"{seaweed_store.url}/child", seaweed_store.storage_options) == 0
        job.save(2)
    assert job.ears.told("success") == [1, 2]


def _misuse(job: Job) -> None:
    for call in (lambda: job.save(2), job.checkpointer.wait, job.checkpointer.poll):
        error = raised(call)
        assert isinstance(error, ConfigurationError), error
        assert "another process" in str(error)
    job.checkpointer.finalize()


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b27_a_forked_copy_is_refused_at_once_and_does_not_disturb_the_upload(
    mode: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*/box/*.distcp")
    arguments = {"storage_options": proxied_store.storage_options, "async_mode": mode}
    with finalized(Job(proxied_store.url, state={"x": random_tensor(9)}, **arguments)) as job:
        job.save(1)
        assert stall.arrived.wait(60)
        # It ends as Python ends, by which the exit hooks are run.
        assert _in_child("fork", _misuse, job) == 0
        assert not job.checkpointer.poll()
        stall.released.set()
        job.checkpointer.wait()
        assert job.ears.told("success") == [1]


def _do_nothing() -> None:
    pass


@pytest.mark.parametrize("mode", BACKGROUND)
def test_b27_a_child_that_outlives_nothing_takes_no_outcome_away(
    mode: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    with finalized(Job(proxied_store.url, storage_options=proxied_store.storage_options, async_mode=mode)) as job:
        for iteration in (1, 2):
            job.save(iteration)
            assert _in_child("fork", _do_nothing) == 0
        job.checkpointer.wait()
    assert job.ears.told("success") == [1, 2]
