"""Hazards of the heritage that no other test here is named after."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import _version

from dcp_fsspec import DistributedCheckpointer, ResumeConfig, StorageWriteError
from dcp_fsspec.testing.faults import Fail, FaultyFileSystem
from support.stores import MemoryStore, S3Store
from support.training import assert_same, checkpointer_at, make_job


def test_h24_h26_an_upload_that_fails_in_a_thread_fails_the_save_and_leaves_nothing() -> None:
    store = MemoryStore()
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    faulty.inject("pipe_file", Fail(PermissionError("no")), path="*/optim/*.distcp", times=None)
    settings = {"max_concurrency": 4}
    with pytest.raises(StorageWriteError, match=r"iter_000000005/optim/__0_0"):
        DistributedCheckpointer(store.below("job"), filesystem=faulty, writer_settings=settings).save(
            *make_job().parts, 5
        )
    assert store.raw_list() == {}


def test_h31_a_filter_for_the_warm_start_does_not_touch_the_jobs_own_checkpoint() -> None:
    store, job = MemoryStore(), make_job(num_steps=2)
    config = ResumeConfig(store.below("source"), keys_not_to_resume=["trainer", "optim"])
    checkpointer_at(store, resume=config).save(*job.parts, 70)
    fresh = make_job(1)
    assert checkpointer_at(store, resume=config).load(*fresh.parts) == 70
    assert_same(fresh, job.state())


def test_h32_a_job_resumes_from_where_it_saves(tmp_path: Path) -> None:
    store, job = MemoryStore(), make_job(num_steps=2)
    DistributedCheckpointer(str(tmp_path / "source")).save(*make_job(5).parts, 1)
    config = ResumeConfig(str(tmp_path / "source"))
    checkpointer_at(store, resume=config).save(*job.parts, 70)
    fresh = make_job(1)
    assert checkpointer_at(store, resume=config).load(*fresh.parts) == 70
    assert_same(fresh, job.state())


@pytest.mark.parametrize("below", ["", "/", "/checkpoints", "/checkpoints/", "/checkpoints/iter_000000005/"])
def test_h38_h39_every_way_to_write_load_path_works_on_s3_and_on_a_disk(
    below: str, moto_server: object, moto_client: object, tmp_path: Path
) -> None:
    s3 = S3Store(moto_client, moto_server.bucket, moto_server.storage_options())  # type: ignore[attr-defined]
    source = make_job(num_steps=1)
    for url, options in ((s3.url, s3.storage_options), (str(tmp_path), None)):
        DistributedCheckpointer(f"{url}/run/checkpoints", storage_options=options).save(*source.parts, 5)
        fresh = make_job(1)
        config = ResumeConfig(f"{url}/run{below}", load_training_state=True, load_storage_options=options)
        assert (
            DistributedCheckpointer(str(tmp_path / "job" / str(bool(options))), resume=config).load(*fresh.parts) == 5
        )
        assert_same(fresh, source.state())
    s3.close()


def test_h42_one_process_needs_no_process_group_and_h51_no_global_of_torch_is_changed(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    DistributedCheckpointer(str(tmp_path)).save(*make_job().parts, 1)
    assert DistributedCheckpointer(str(tmp_path)).load(*make_job(1).parts) == 1
    assert not dist.is_initialized()
    assert _version._derived_version is None
