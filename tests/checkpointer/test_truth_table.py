"""Which checkpoint, which components, which iteration: every combination of pointer, load_path and settings."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from dcp_fsspec import Catalog, CheckpointNotFoundError, ConfigurationError, ResumeConfig, UncommittedCheckpointError
from dcp_fsspec.checkpointer.layout import STANDARD_COMPONENTS as KEYS
from dcp_fsspec.checkpointer.locating import decide
from dcp_fsspec.checkpointer.resume import Decision
from support.stores import FolderStore, MemoryStore, Store
from support.training import write_iteration

POINTERS = {
    "absent": None,
    "good": b"iter_000000020\n",
    "empty": b"",
    "garbage": b"../x\n",
    "to an uncommitted": b"iter_000000020\n",
    "to a deleted": b"iter_000000020\n",
}
LOAD_PATHS = [""] + [
    f"{where} {folder}{slash}"
    for where in ("same", "other")
    for folder in ("iteration", "job", "checkpoints")
    for slash in ("", "/")
]
FOLDERS = {"iteration": "src/checkpoints/iter_000000003", "job": "src", "checkpoints": "src/checkpoints"}
FILTERS: tuple[tuple[str, ...], ...] = ((), ("trainer", "scheduler"), KEYS)
SETTINGS = list(itertools.product((False, True), (False, True), FILTERS))


@pytest.fixture
def job_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def sources(job_store: MemoryStore, tmp_path: Path) -> dict[str, Store]:
    """Another job's folder in the job's own store and in another one."""
    stores: dict[str, Store] = {"same": job_store, "other": FolderStore(tmp_path, str(tmp_path))}
    for store in stores.values():
        write_iteration(store, "src/checkpoints/iter_000000003")
        write_iteration(store, "src/checkpoints/iter_000000005")
        store.raw_write("src/checkpoints/latest_checkpoint.txt", b"iter_000000005\n")
    return stores


def _fill_job(store: Store, pointer: str, *, older: bool) -> None:
    content = POINTERS[pointer]
    if content is not None:
        store.raw_write("job/latest_checkpoint.txt", content)
    if older:
        write_iteration(store, "job/iter_000000010")
    if pointer == "good":
        write_iteration(store, "job/iter_000000020")
    if pointer == "to an uncommitted":
        write_iteration(store, "job/iter_000000020", marks=("model", "scheduler", "trainer"), commit=False)


def _expected_keys(auto: bool, training: bool, scheduler: bool, left_out: tuple[str, ...]) -> tuple[str, ...]:
    """Heritage's table, amended: what is left out is left out of a warm start only."""
    if auto:
        return KEYS
    chosen = KEYS if training else ("model", "scheduler") if scheduler else ("model",)
    return tuple(key for key in chosen if key not in left_out)


@pytest.mark.parametrize("load_path", LOAD_PATHS)
@pytest.mark.parametrize(("pointer", "older"), [(one, older) for one in POINTERS for older in (False, True)])
def test_truth_table(
    pointer: str,
    load_path: str,
    older: bool,
    job_store: MemoryStore,
    sources: dict[str, Store],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _fill_job(job_store, pointer, older=older)
    where, _, folder = load_path.partition(" ")
    source = sources[where].below(FOLDERS[folder.rstrip("/")] + "/" * folder.endswith("/")) if load_path else ""
    auto = 20 if pointer == "good" else 10 if older else None
    for training, scheduler, left_out in SETTINGS:
        caplog.clear()
        config = ResumeConfig(source, training, scheduler, left_out)
        decision = decide(Catalog(job_store.below("job")), config, KEYS)
        case = (training, scheduler, left_out, decision)
        said = [
            *decision.notes,
            *(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING),
        ]
        _check_pointer_warnings(said, pointer, auto)
        if auto is not None:
            assert decision.location == job_store.below(f"job/iter_{auto:09d}"), case
            assert (decision.is_auto_resume, decision.iteration) == (True, auto), case
            assert any("load_path" in note and "not used" in note for note in said) == bool(load_path), case
        elif load_path:
            iteration = 3 if "iteration" in folder else 5
            assert decision.location is not None
            assert decision.location.rstrip("/") == sources[where].below(f"src/checkpoints/iter_{iteration:09d}"), case
            assert (decision.is_auto_resume, decision.iteration) == (False, iteration), case
        else:
            assert decision == Decision(None, notes=(f"{job_store.below('job')} holds no checkpoint: fresh start",)), (
                case
            )
        if decision.location is not None:
            assert decision.components == _expected_keys(auto is not None, training, scheduler, left_out), case


def _check_pointer_warnings(said: list[str], pointer: str, auto: int | None) -> None:
    text = "\n".join(said)
    expected = {
        "absent": "",
        "good": "",
        "empty": "holds '', which names no iteration",
        "garbage": "holds '../x', which names no iteration",
        "to an uncommitted": "names iter_000000020, which cannot be used",
        "to a deleted": "names iter_000000020, which cannot be used",
    }[pointer]
    assert expected in text
    assert ("latest_checkpoint.txt" in text) == bool(expected), text
    assert ("iter_000000010 is the newest that is committed" in text) == (auto == 10), text


@pytest.mark.parametrize("left_out", [("trainer",), KEYS])
def test_the_old_filter_of_auto_resume_is_there_by_name(job_store: MemoryStore, left_out: tuple[str, ...]) -> None:
    _fill_job(job_store, "good", older=False)
    config = ResumeConfig(keys_not_to_resume=left_out, filter_auto_resume=True)
    decision = decide(Catalog(job_store.below("job")), config, KEYS)
    assert decision.components == tuple(key for key in KEYS if key not in left_out)


@pytest.mark.parametrize("pointer", ["absent", "good"])
def test_a_wrong_name_in_the_filter_is_an_error_whatever_is_found(job_store: MemoryStore, pointer: str) -> None:
    _fill_job(job_store, pointer, older=False)
    with pytest.raises(ConfigurationError, match="keys_not_to_resume names modle"):
        decide(Catalog(job_store.below("job")), ResumeConfig(keys_not_to_resume=["modle"]), KEYS)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_single_file_is_left_to_the_caller(job_store: MemoryStore, suffix: str) -> None:
    decision = decide(Catalog(job_store.below("job")), ResumeConfig(f"s3://bucket/model{suffix}"), KEYS)
    assert (decision.location, decision.components) == (None, ())
    assert "single file" in decision.notes[0]


@pytest.mark.parametrize("folder", ["nothing", "src/checkpoints/iter_000000099"])
def test_a_load_path_without_anything_is_an_error_that_names_it(
    job_store: MemoryStore, sources: dict[str, Store], folder: str
) -> None:
    for store in sources.values():
        with pytest.raises(CheckpointNotFoundError, match=folder):
            decide(Catalog(job_store.below("job")), ResumeConfig(store.below(folder)), KEYS)


def test_an_incomplete_iteration_asked_for_by_name_is_an_error_that_names_what_is_missing(
    job_store: MemoryStore, sources: dict[str, Store]
) -> None:
    write_iteration(job_store, "src/checkpoints/iter_000000007", marks=("model",), commit=False)
    path = job_store.below("src/checkpoints/iter_000000007")
    with pytest.raises(UncommittedCheckpointError, match=r"optim/\.metadata"):
        decide(Catalog(job_store.below("job")), ResumeConfig(path, load_training_state=True), KEYS)
    decision = decide(Catalog(job_store.below("job")), ResumeConfig(path), KEYS)
    assert decision.components == ("model",)
    assert any("not completed" in note for note in decision.notes)


@pytest.mark.parametrize("iteration", [10, 20])
def test_an_iteration_asked_for_by_number_wins_over_the_pointer(job_store: MemoryStore, iteration: int) -> None:
    _fill_job(job_store, "good", older=True)
    decision = decide(Catalog(job_store.below("job")), ResumeConfig(), KEYS, iteration)
    assert (decision.iteration, decision.is_auto_resume) == (iteration, True)
    with pytest.raises(CheckpointNotFoundError, match="iter_000000015"):
        decide(Catalog(job_store.below("job")), ResumeConfig(), KEYS, 15)


def test_a_load_path_in_another_store_does_not_get_the_options_or_the_filesystem_of_the_job(
    job_store: MemoryStore, sources: dict[str, Store]
) -> None:
    import fsspec

    catalog = Catalog(job_store.below("job"), filesystem=fsspec.filesystem("memory"))
    for prefix in ("", "file://"):
        path = prefix + sources["other"].below("src")
        assert decide(catalog, ResumeConfig(path), KEYS).iteration == 5
