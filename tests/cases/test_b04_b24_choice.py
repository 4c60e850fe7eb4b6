"""B04, B23, B24, B26: which iteration is chosen when folders are partial, the pointer is odd, or names are foreign."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from dcp_fsspec import (
    Catalog,
    CheckpointNotFoundError,
    ConfigurationError,
    DistributedCheckpointer,
    ResumeConfig,
    StorageWriteError,
    UncommittedCheckpointError,
)
from support.stores import FolderStore, MemoryStore, S3Store, Store
from support.training import assert_same, checkpointer_at, make_job, save_by_cosmos_rules, write_iteration


def _two(store: Store) -> None:
    for iteration in (10, 20):
        checkpointer_at(store).save(*make_job(iteration, 1).parts, iteration)


@pytest.mark.parametrize("pointer", [True, False])
@pytest.mark.parametrize("lost", ["commit.json", "optim/.metadata"])
def test_b04_h40_a_partial_iteration_is_passed_over_with_a_warning(
    pointer: bool, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    _two(store)
    for name in ("commit.json", lost):
        if f"job/iter_000000020/{name}" in store.raw_list():
            store.raw_delete(f"job/iter_000000020/{name}")
    if not pointer:
        store.raw_delete("job/latest_checkpoint.txt")
    fresh = make_job()
    assert checkpointer_at(store).load(*fresh.parts) == 10
    assert_same(fresh, make_job(10, 1).state())
    assert "iter_000000020 was never completed" in caplog.text
    assert "iter_000000010 is the newest that is committed" in caplog.text
    with pytest.raises(UncommittedCheckpointError, match="iter_000000020 was never completed"):
        checkpointer_at(store).load(*fresh.parts, iteration=20)


def test_b04_a_partial_iteration_of_others_that_the_pointer_names(tmp_path: Path) -> None:
    for iteration in (10, 20):
        save_by_cosmos_rules(tmp_path, iteration, make_job(iteration, 1))
    (tmp_path / "iter_000000020" / "optim" / ".metadata").unlink()
    fresh = make_job()
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert checkpointer.load(*fresh.parts) == 10
    assert_same(fresh, make_job(10, 1).state())
    assert any("iter_000000020" in note and "optim/.metadata" in note for note in checkpointer.last_load_report.notes)
    config = ResumeConfig(f"{tmp_path}/iter_000000020", load_training_state=True)
    with pytest.raises(UncommittedCheckpointError, match=r"optim/\.metadata is missing"):
        DistributedCheckpointer(str(tmp_path / "other"), resume=config).load(*fresh.parts)


@pytest.mark.parametrize("stop_after", ["model", "trainer", "rng"])
def test_b04_a_first_save_that_was_killed_is_a_fresh_start_not_a_loop(stop_after: str) -> None:
    """Also where all that other software needs is there, but not all that this job needs."""

    class Empty:
        def state_dict(self) -> dict[str, int]:
            return {"value": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {"value": 1}

    store = MemoryStore()
    components = {"rng": Empty()}
    checkpointer_at(store, components=components).save(*make_job().parts, 10)
    order = ["model", "optim", "scheduler", "trainer", "rng"]
    for name in store.raw_list():
        component = name.split("/")[2] if name.count("/") > 2 else ""
        if component not in order[: order.index(stop_after) + 1]:
            store.raw_delete(name)
    assert checkpointer_at(store, components=components).load(*make_job().parts) == 0
    checkpointer_at(store, components=components).save(*make_job(3, 1).parts, 10)
    fresh = make_job()
    assert checkpointer_at(store, components=components).load(*fresh.parts) == 10
    assert_same(fresh, make_job(3, 1).state())


@pytest.mark.parametrize("damaged", [b"", b"{}", b"not json", b'{"format_version": 99, "components": {}}', b"\xff" * 9])
def test_a_commit_record_that_cannot_be_read_counts_as_none(damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    _two(store)
    store.raw_write("job/iter_000000020/commit.json", damaged)
    assert checkpointer_at(store).load(*make_job().parts) == 10
    assert "iter_000000020/commit.json is not a commit record" in caplog.text


def test_a_commit_record_of_another_iteration_counts_as_none() -> None:
    store = MemoryStore()
    _two(store)
    store.raw_write("job/iter_000000020/commit.json", store.raw_read("job/iter_000000010/commit.json"))
    assert checkpointer_at(store).load(*make_job().parts) == 10


def test_b23_h46_what_was_asked_for_and_is_not_there_is_an_error_with_the_full_url() -> None:
    store = MemoryStore()
    _two(store)
    with pytest.raises(CheckpointNotFoundError, match=f"{store.url}/typo"):
        checkpointer_at(store, "other", resume=ResumeConfig(store.below("typo"))).load(*make_job().parts)
    with pytest.raises(CheckpointNotFoundError, match=f"nothing at {store.url}/job/iter_000000015"):
        checkpointer_at(store).load(*make_job().parts, iteration=15)


def test_b23_nothing_anywhere_is_a_fresh_start_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.INFO):
        assert checkpointer_at(store).load(*make_job().parts) == 0
    assert f"{store.url}/job holds no checkpoint: fresh start" in caplog.text


def test_b23_the_jobs_own_checkpoint_wins_over_load_path_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    _two(store)
    checkpointer_at(store, "source").save(*make_job(9).parts, 99)
    config = ResumeConfig(store.below("source"), load_training_state=True, keys_not_to_resume=["trainer", "optim"])
    fresh = make_job()
    assert checkpointer_at(store, resume=config).load(*fresh.parts) == 20
    assert_same(fresh, make_job(20, 1).state())  # h31: the filter is for the warm start
    assert f"load_path {store.below('source')} is not used" in caplog.text


def test_b23_settings_that_cannot_work_are_refused_at_construction() -> None:
    store = MemoryStore()
    with pytest.raises(ConfigurationError, match="keys_not_to_resume names optimizer; known are model, optim"):
        checkpointer_at(store, resume=ResumeConfig(keys_not_to_resume=["optimizer"]))
    for settings in ({"keys_not_to_resume": "optim"}, {"overlap_keys": "w"}, {"mismatched": "overlap"}):
        with pytest.raises(ConfigurationError):
            ResumeConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", [b"iter_000000020", b"iter_000000020\r\n", b"  iter_000000020 \t\n\n", b"iter_000000020\n"]
)
def test_b24_whitespace_around_the_pointer_does_not_matter(text: bytes) -> None:
    store = MemoryStore()
    _two(store)
    checkpointer_at(store).save(*make_job().parts, 30)
    store.raw_write("job/latest_checkpoint.txt", text)
    assert checkpointer_at(store).load(*make_job().parts) == 20


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"../x", b"/etc", b"iter_20", b"iter_000000099", b"iter_000000010.pt", b"\xff\xfe", b"x" * 100_000],
)
def test_b24_h22_an_odd_pointer_is_said_and_the_newest_complete_one_is_taken(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    _two(store)
    store.raw_write("job/latest_checkpoint.txt", text)
    assert checkpointer_at(store).load(*make_job().parts) == 20
    assert f"{store.url}/job/latest_checkpoint.txt" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 3000
    checkpointer_at(store).save(*make_job().parts, 30)
    assert store.raw_read("job/latest_checkpoint.txt") == b"iter_000000030\n"


def test_b24_h22_a_full_disk_leaves_the_old_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, str(tmp_path))
    _two(store)
    catalog = Catalog(store.below("job"))
    write_iteration(store, "job/iter_000000030")
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        real(descriptor, bytes(data)[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: full(descriptor, bytes(buffers[0])))
    with pytest.raises(StorageWriteError, match="No space left"):
        catalog.advance(30)
    monkeypatch.undo()
    assert (tmp_path / "job" / "latest_checkpoint.txt").read_bytes() == b"iter_000000020\n"
    assert [name for name in os.listdir(tmp_path / "job") if not name.startswith("iter_")] == ["latest_checkpoint.txt"]


@pytest.mark.parametrize("kind", ["s3", "disk", "memory"])
def test_b26_foreign_names_are_passed_over_and_order_is_by_number(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: Store = (
        request.getfixturevalue("seaweed_store")
        if kind == "s3"
        else FolderStore(tmp_path, str(tmp_path))
        if kind == "disk"
        else MemoryStore()
    )
    catalog = Catalog(store.below("job"), **store.arguments)
    assert (catalog.iterations(), catalog.latest(), catalog.pointer()) == ([], None, None)
    for iteration in ("iter_000000002", "iter_000000010", "iter_1000000000"):
        write_iteration(store, f"job/{iteration}")
    for foreign in (
        "iter_5",
        "iter_000000011_bak",
        "best",
        "xiter_000000012",
        "iter_0000000013",
        "iter_-00000014",
        "iter_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661\u0665",
    ):
        store.raw_write(f"job/{foreign}/model/.metadata", b"x")
    store.raw_write("job/iter_000000099", b"a file")
    store.raw_write("job/iter_000000001_bak/commit.json", b"x")
    if isinstance(store, S3Store):
        store.raw_write("job/", b"")
    assert catalog.iterations() == [2, 10, 1_000_000_000]
    latest = catalog.latest()
    assert latest is not None
    assert latest.iteration == 1_000_000_000
    with pytest.raises(CheckpointNotFoundError):
        catalog.find(1)
