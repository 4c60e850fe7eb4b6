"""Removing: a crash at any moment leaves what is kept whole, and nothing half-deleted that looks like a checkpoint."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_fsspec import (
    AnyOf,
    Catalog,
    CheckpointNotFoundError,
    ConfigurationError,
    DcpFsspecError,
    DistributedCheckpointer,
    KeepBest,
    KeepLatest,
    UncommittedCheckpointError,
)
from dcp_fsspec.testing.faults import Drop, Fail, FaultyFileSystem
from dcp_fsspec.tools.sweeping import sweep as run_sweep
from support.faultproxy import FaultProxy
from support.stores import FolderStore, MemoryStore, S3Store
from support.training import Job, assert_same, make_job, write_iteration

KEEP = KeepLatest(1)


class Crash(BaseException):
    """The process ends here."""


def _fill(store: MemoryStore, iterations: tuple[int, ...] = (10, 20, 30)) -> dict[int, Job]:
    jobs = {iteration: make_job(iteration, 1) for iteration in iterations}
    for iteration, job in jobs.items():
        DistributedCheckpointer(store.below("job")).save(*job.parts, iteration)
    return jobs


@pytest.mark.parametrize("pointee", [30, 20])
def test_b25_a_crash_at_every_delete_leaves_the_kept_ones_whole_and_no_half_one(pointee: int) -> None:
    kept = {30, pointee}
    for nth in itertools.count(1):
        store = MemoryStore()
        jobs = _fill(store)
        store.raw_write("job/latest_checkpoint.txt", f"iter_{pointee:09d}\n".encode())
        faulty = FaultyFileSystem(fsspec.filesystem("memory"))
        faulty.inject("rm_file", Fail(Crash()), nth=nth, times=None)
        try:
            Catalog(store.below("job"), filesystem=faulty, retry_seconds=0).prune(KEEP)
        except Crash:
            survived = False
        else:
            survived = True
        committed = _assert_sound(store, jobs, kept, pointee)
        # The next run does the rest, and a sweep removes what only a crash leaves.
        Catalog(store.below("job")).prune(KEEP)
        Catalog(store.below("job")).sweep()
        assert {name.split("/")[1] for name in store.raw_list()} == {
            "latest_checkpoint.txt",
            *(f"iter_{iteration:09d}" for iteration in kept),
        }
        store.close()
        if survived:
            assert set(committed) == kept
            break
    assert nth > 10


def _assert_sound(store: MemoryStore, jobs: dict[int, Job], kept: set[int], pointee: int) -> list[int]:
    catalog = Catalog(store.below("job"))
    latest = catalog.latest()
    assert latest is not None
    assert latest.iteration == pointee
    committed = []
    for iteration in catalog.iterations():
        try:
            catalog.find(iteration)
        except UncommittedCheckpointError:
            continue
        fresh = make_job(99)
        assert DistributedCheckpointer(store.below("job")).load(*fresh.parts, iteration=iteration) == iteration
        assert_same(fresh, jobs[iteration].state())
        committed.append(iteration)
    assert kept <= set(committed)
    return committed


def test_b25_an_iteration_that_cannot_be_removed_is_named_and_swept_later(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    _fill(store)
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    faulty.inject("rm_file", Fail(PermissionError("no deletes for you")), path="*/iter_000000010/model/*", times=None)
    catalog = Catalog(store.below("job"), filesystem=faulty, retry_seconds=0)
    assert catalog.prune(KEEP) == [20]
    assert "iteration 10 could not be pruned" in caplog.text
    with pytest.raises(UncommittedCheckpointError):
        catalog.find(10)
    faulty.heal()
    assert set(catalog.sweep()) == {10}
    assert catalog.iterations() == [30]


def test_a_store_that_only_pretends_to_delete_is_found_out() -> None:
    store = MemoryStore()
    _fill(store)
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    faulty.inject("rm_file", Drop(), path="*/iter_000000010/optim/*.distcp", times=None)
    with pytest.raises(DcpFsspecError, match=r"iter_000000010: 1 of \d+ files could not be removed, such as optim/"):
        Catalog(store.below("job"), filesystem=faulty).remove(10)


def test_b25_what_the_pointer_names_and_what_is_protected_stays() -> None:
    store = MemoryStore()
    _fill(store, (10, 20, 30, 40))
    catalog = Catalog(store.below("job"))
    assert catalog.prune(KEEP, protected=[20], dry_run=True) == [10, 30]
    assert catalog.iterations() == [10, 20, 30, 40]
    assert catalog.prune(KEEP, protected=[20]) == [10, 30]
    assert catalog.iterations() == [20, 40]
    with pytest.raises(ConfigurationError, match="names iteration 40"):
        catalog.remove(40)


def test_iterations_that_a_job_went_back_from_do_not_take_the_place_of_its_own() -> None:
    store = MemoryStore()
    for iteration in (10, 20, 30, 40):
        DistributedCheckpointer(store.below("job")).save(*make_job().parts, iteration)
    checkpointer = DistributedCheckpointer(store.below("job"), retention=KeepLatest(2))
    checkpointer.load(*make_job().parts, iteration=20)
    stays = {25: [20, 25, 30, 40], 28: [25, 28, 30, 40], 35: [30, 35, 40], 45: [40, 45]}
    for iteration, wanted in stays.items():
        checkpointer.save(*make_job().parts, iteration)
        checkpointer.wait()
        assert checkpointer.catalog.iterations() == wanted


def test_the_best_iteration_stays_whether_or_not_it_is_the_latest() -> None:
    store = MemoryStore()
    policy = AnyOf(KeepLatest(1), KeepBest(1, "loss"))
    checkpointer = DistributedCheckpointer(store.below("job"), retention=policy)
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 0.5, 50: 0.7}
    stays = {10: [10], 20: [20], 30: [20, 30], 40: [40], 50: [40, 50]}
    for iteration, loss in losses.items():
        checkpointer.save(*make_job().parts, iteration, metrics={"loss": loss})
        checkpointer.wait()
        assert checkpointer.catalog.iterations() == stays[iteration]


def test_b25_incomplete_ones_neither_count_nor_go_and_a_sweep_removes_them_alone() -> None:
    store = MemoryStore()
    _fill(store)
    for iteration in (35, 40):
        write_iteration(store, f"job/iter_{iteration:09d}", commit=False)
    store.raw_write("job/best/iter_000000001/model/.metadata", b"")
    store.raw_write("job/iter_5/model/.metadata", b"")
    catalog = Catalog(store.below("job"))
    assert catalog.prune(KeepLatest(2)) == [10]
    assert set(catalog.sweep(protected=[40], dry_run=True)) == {35}
    assert catalog.sweep(protected=[40]) == {35: 4 * len(b"shard" + b"metadata")}
    assert catalog.iterations() == [20, 30, 40]
    assert {"job/best/iter_000000001/model/.metadata", "job/iter_5/model/.metadata"} <= set(store.raw_list())


def test_an_iteration_that_was_replaced_counts_with_the_metrics_of_now() -> None:
    store = MemoryStore()
    policy = AnyOf(KeepLatest(2), KeepBest(1, "loss"))
    checkpointer = DistributedCheckpointer(store.below("job"), retention=policy)

    def save(iteration: int, loss: float) -> None:
        checkpointer.save(*make_job().parts, iteration, metrics={"loss": loss})
        checkpointer.wait()

    save(10, 3.0)
    save(20, 1.0)
    checkpointer.load(*make_job().parts, iteration=10)
    save(20, 9.0)
    save(30, 2.0)
    save(40, 5.0)
    assert checkpointer.catalog.iterations() == [30, 40]


@pytest.mark.parametrize("young", [True, False])
def test_a_pointer_that_was_being_written_goes_with_a_sweep_if_it_is_old_enough(tmp_path: Path, young: bool) -> None:
    store = FolderStore(tmp_path, str(tmp_path))
    for iteration in (10, 20):
        DistributedCheckpointer(str(tmp_path)).save(*make_job().parts, iteration)
    store.raw_write("latest_checkpoint.txt.tmp-0123abcd", b"iter_0000")
    kept = {"latest_checkpoint.txt.tmp-mine", "latest_checkpoint.txt.bak", "notes.txt.tmp-0123abcd"}
    for name in kept:
        store.raw_write(name, b"not ours")
    catalog = Catalog(str(tmp_path))
    assert catalog.latest() == catalog.find(20)
    when = (tmp_path / "latest_checkpoint.txt.tmp-0123abcd").stat().st_mtime
    assert run_sweep(catalog, dry_run=True).files == ["latest_checkpoint.txt.tmp-0123abcd"]
    run_sweep(catalog, before=when - 1 if young else when + 1)
    left = {name for name in store.raw_list() if "/" not in name} - kept
    assert left == {"latest_checkpoint.txt", *(["latest_checkpoint.txt.tmp-0123abcd"] if young else [])}
    Catalog(str(tmp_path)).sweep()
    assert {name for name in store.raw_list() if "/" not in name} == {"latest_checkpoint.txt", *kept}
    assert catalog.iterations() == [10, 20]


def test_sweep_removes_folders_that_are_empty_on_a_disk(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job().parts, 10)
    (tmp_path / "iter_000000005" / "model").mkdir(parents=True)
    assert Catalog(str(tmp_path)).sweep() == {5: 0}
    assert not (tmp_path / "iter_000000005").exists()


def test_a_policy_without_mercy_keeps_the_newest_where_there_is_no_pointer() -> None:
    class Nothing:
        def keep(self, committed: Any) -> set[int]:
            return set()

    store = MemoryStore()
    _fill(store)
    store.raw_delete("job/latest_checkpoint.txt")
    assert Catalog(store.below("job")).prune(Nothing()) == [10, 20]


@pytest.mark.parametrize("store", ["seaweed", "moto"], indirect=True)
@pytest.mark.parametrize("folder", ["job", "jöb with spaces & <xml> 'quotes\" + %41 #1", "a[1]*job"])
def test_names_with_special_characters_are_removed_on_s3(store: S3Store, folder: str) -> None:
    neighbour = folder.replace("[1]*", "1x") + "-neighbour"
    store.raw_write(f"{neighbour}/iter_000000010/model/.metadata", b"not ours")
    catalog = Catalog(store.below(folder), storage_options=store.storage_options)
    for iteration in (10, 20):
        write_iteration(store, f"{folder}/iter_{iteration:09d}")
    store.raw_write(f"{folder}/latest_checkpoint.txt", b"iter_000000020\n")
    assert catalog.prune(KEEP) == [10]
    assert catalog.find(20).iteration == 20
    with pytest.raises(CheckpointNotFoundError):
        catalog.find(10)
    left = {name for name in store.raw_list() if "iter_000000010" in name}
    assert left == {f"{neighbour}/iter_000000010/model/.metadata"}


def test_b25_files_go_in_few_requests_where_the_store_removes_many_at_once(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    write_iteration(proxied_store, "job/iter_000000010")
    write_iteration(proxied_store, "job/iter_000000020")
    for number in range(1_050):
        proxied_store.raw_write(f"job/iter_000000010/model/__{number}_0_0123abcd.distcp", b"")
    proxied_store.raw_write("job/latest_checkpoint.txt", b"iter_000000020\n")
    proxy.clear()
    catalog = Catalog(proxied_store.below("job"), storage_options=proxied_store.storage_options)
    assert catalog.prune(KEEP) == [10]
    assert not [name for name in proxied_store.raw_list() if "iter_000000010" in name]
    deletes = [one for one in proxy.log if one.operation in ("DELETE", "DELETE_MANY")]
    assert len(deletes) <= 4  # record, marks, a thousand files, the rest


def test_b25_retention_of_a_checkpointer_never_fails_a_save(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = MemoryStore()
    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    checkpointer = DistributedCheckpointer(store.below("job"), filesystem=faulty, retention=KeepLatest(1))
    faulty.inject("rm_file", Fail(PermissionError("no")), times=None)
    for iteration in (10, 20, 30):
        checkpointer.save(*make_job().parts, iteration)
        checkpointer.wait()
    assert "could not be pruned" in caplog.text
    faulty.heal()
    checkpointer.save(*make_job().parts, 40)
    checkpointer.finalize()
    assert set(checkpointer.catalog.iterations()) >= {40}
    assert checkpointer.catalog.pointee() == 40
