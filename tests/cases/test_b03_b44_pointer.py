"""B03, B44: the pointer is written last of all, and does not go back when an older save ends later."""

from __future__ import annotations

import fsspec
import pytest

from dcp_fsspec import Catalog, StorageWriteError
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from support.faultproxy import FaultProxy
from support.stores import MemoryStore, S3Store
from support.training import assert_same, checkpointer_at, make_job

pytestmark = pytest.mark.server


def test_b03_the_pointer_is_the_last_write_of_a_save(proxied_store: S3Store, proxy: FaultProxy) -> None:
    checkpointer = checkpointer_at(proxied_store)
    checkpointer.save(*make_job().parts, 10)
    proxy.clear()
    checkpointer.save(*make_job().parts, 20)
    writes = [one.key.partition("/job/")[2] for one in proxy.log if one.method in ("PUT", "POST", "DELETE")]
    assert writes[-2:] == ["iter_000000020/commit.json", "latest_checkpoint.txt"]
    assert len(writes) == len(set(writes))
    components = [name.split("/")[1] for name in writes[:-2]]
    assert components == sorted(components, key=["model", "optim", "scheduler", "trainer"].index)
    for name in ("model", "optim", "scheduler", "trainer"):
        assert [one for one in writes if one.startswith(f"iter_000000020/{name}/")][-1].endswith("/.metadata")
    assert proxied_store.raw_read("job/latest_checkpoint.txt") == b"iter_000000020\n"


def test_b03_whatever_write_fails_the_pointer_stays_and_the_job_resumes_from_before() -> None:
    store = MemoryStore()
    good = make_job(num_steps=1)
    checkpointer_at(store).save(*good.parts, 10)
    healthy = FaultyFileSystem(fsspec.filesystem("memory"))
    first = store.below("first")
    from dcp_fsspec import DistributedCheckpointer

    DistributedCheckpointer(first, filesystem=healthy).save(*make_job().parts, 20)
    num_writes = healthy.count("pipe_file")
    assert num_writes >= 14
    for nth in range(1, num_writes + 1):
        faulty = FaultyFileSystem(fsspec.filesystem("memory"))
        faulty.inject("pipe_file", Fail(PermissionError("no")), nth=nth, times=None)
        with pytest.raises(StorageWriteError):
            DistributedCheckpointer(store.below("job"), filesystem=faulty).save(*make_job(2).parts, 20)
        assert store.raw_read("job/latest_checkpoint.txt") == b"iter_000000010\n"
        fresh = make_job(1)
        assert checkpointer_at(store).load(*fresh.parts) == 10
        assert_same(fresh, good.state())
    checkpointer_at(store).save(*make_job(2).parts, 20)
    assert Catalog(store.below("job")).pointee() == 20


def test_b44_an_older_save_that_ends_later_does_not_move_the_pointer_back() -> None:
    store = MemoryStore()
    late = checkpointer_at(store)
    checkpointer_at(store).save(*make_job().parts, 20)
    late.save(*make_job().parts, 10)
    catalog = Catalog(store.below("job"))
    assert catalog.pointee() == 20
    assert [catalog.find(iteration).iteration for iteration in (10, 20)] == [10, 20]


def test_h25_h23_a_pointer_that_cannot_be_written_is_an_error_and_the_iteration_can_be_saved_again() -> None:
    from dcp_fsspec import DistributedCheckpointer

    store = MemoryStore()
    checkpointer_at(store).save(*make_job().parts, 10)
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    faulty.inject("pipe_file", Fail(PermissionError("no")), path="*/latest_checkpoint.txt", times=None)
    with pytest.raises(StorageWriteError, match=r"latest_checkpoint\.txt"):
        DistributedCheckpointer(store.below("job"), filesystem=faulty).save(*make_job().parts, 20)
    job = make_job(3, 1)
    checkpointer_at(store).save(*job.parts, 20)
    fresh = make_job()
    assert checkpointer_at(store).load(*fresh.parts) == 20
    assert_same(fresh, job.state())
    assert len({name for name in store.raw_list() if name.startswith("job/iter_000000020/model/__")}) == 1
