"""Stored bytes that are not those that were written: named, by file and item, and never loaded."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import (
    CorruptCheckpointError,
    FsspecStorageReader,
    FsspecStorageWriter,
    UnsafeCheckpointError,
    verify,
)
from support.tensors import assert_bits_equal


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(3000.0).reshape(30, 100),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "half": torch.arange(64).to(torch.bfloat16),
        "values": {"lr": 0.1, "betas": [0.9, 0.95], "name": "x"},
    }


def blank() -> dict[str, Any]:
    return {
        "weight": torch.zeros(30, 100),
        "scalar": torch.tensor(0.0),
        "empty": torch.empty(0, 3),
        "half": torch.zeros(64, dtype=torch.bfloat16),
        "values": {"lr": 0.0, "betas": [0.0, 0.0], "name": ""},
    }


def save(folder: Path, **options: Any) -> list[Path]:
    dcp.save(state(), storage_writer=FsspecStorageWriter(folder, shard_bytes=64 << 10, **options))
    return sorted(folder.glob("*.distcp"))


def load(folder: Path, **options: Any) -> dict[str, Any]:
    target = blank()
    dcp.load(target, storage_reader=FsspecStorageReader(folder, **options))
    return target


def load_error(folder: Path, **options: Any) -> Exception:
    with pytest.raises(CheckpointException) as caught:
        load(folder, **options)
    reason = caught.value.failures[0][0]
    assert isinstance(reason, Exception)
    return reason


def outcome_of(folder: Path) -> tuple[dict[str, Any], BaseException | None]:
    target = blank()
    try:
        dcp.load(target, storage_reader=FsspecStorageReader(folder))
    except CheckpointException as error:
        return target, error.failures[0][0]
    return target, None


def verifies(folder: Path) -> bool:
    try:
        return verify(folder).ok
    except (CorruptCheckpointError, UnsafeCheckpointError):
        return False


def same(loaded: dict[str, Any]) -> bool:
    for key, value in state().items():
        if isinstance(value, torch.Tensor):
            assert_bits_equal(loaded[key], value)
        else:
            assert loaded[key] == value
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "ckpt"
    save(folder)
    return folder


@given(st.data())
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_any_flipped_bit_is_found(saved: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(saved.glob("*.distcp"))))
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bad)
    try:
        (problem,) = verify(saved).problems
        assert problem.file == file.name
        if problem.item == "empty":
            assert same(load(saved))  # There is nothing in it, so it is never read.
        else:
            error = load_error(saved)
            assert isinstance(error, CorruptCheckpointError)
            assert str(file) in str(error)
            assert str(problem.item) in str(error)
    finally:
        file.write_bytes(good)
    assert same(load(saved))


@given(st.data())
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_any_flipped_bit_of_the_small_files_is_found_or_does_no_harm(saved: Path, data: st.DataObject) -> None:
    file = saved / data.draw(st.sampled_from([".metadata", "checksums.json"]))
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bad)
    try:
        loaded, reason = outcome_of(saved)
        if reason is None:
            assert same(loaded)
        else:
            assert isinstance(reason, CorruptCheckpointError | UnsafeCheckpointError), reason
            assert str(saved) in str(reason)
            assert not verifies(saved)
    finally:
        file.write_bytes(good)


def test_metadata_of_another_moment_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    found = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    found.planner_data = {}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(found, protocol=4))
    error = load_error(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError)
    assert ".metadata" in str(error)
    with pytest.raises(CorruptCheckpointError, match="metadata"):
        verify(tmp_path / "c")


@pytest.mark.parametrize("name", [".metadata", "checksums.json"])
@pytest.mark.parametrize("left", [0.0, 0.3, 0.99])
def test_a_small_file_that_is_cut_short(tmp_path: Path, name: str, left: float) -> None:
    save(tmp_path / "c")
    file = tmp_path / "c" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    error = load_error(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError)
    assert str(file) in str(error)
    with pytest.raises(CorruptCheckpointError, match=name):
        verify(tmp_path / "c")


def test_a_shard_file_in_the_place_of_another(tmp_path: Path) -> None:
    big = {f"w{number}": torch.arange(40_000.0) + number for number in range(4)}
    dcp.save(big, storage_writer=FsspecStorageWriter(tmp_path, shard_bytes=64 << 10))
    one, other, *_ = sorted(file for file in tmp_path.glob("*.distcp") if file.stat().st_size > 10_000)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
        dcp.load({name: torch.zeros(40_000) for name in big}, storage_reader=FsspecStorageReader(tmp_path))
    assert {problem.file for problem in verify(tmp_path).problems} == {one.name, other.name}


def test_a_good_checkpoint_has_no_problem(saved: Path) -> None:
    report = verify(saved)
    assert report.ok
    assert report.checksums == "checked"
    assert report.num_files == len(list(saved.glob("*.distcp")))
    assert report.num_bytes == sum(file.stat().st_size for file in saved.glob("*.distcp"))


@pytest.mark.parametrize("cut", [1, 50, 5000])
def test_a_shard_file_that_is_cut_short(tmp_path: Path, cut: int) -> None:
    file = save(tmp_path / "c")[0]
    file.write_bytes(file.read_bytes()[:-cut])
    error = load_error(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError)
    assert str(file) in str(error)
    assert [problem.file for problem in verify(tmp_path / "c").problems] == [file.name]


def test_a_shard_file_that_is_gone(tmp_path: Path) -> None:
    file = save(tmp_path / "c")[0]
    file.unlink()
    error = load_error(tmp_path / "c")
    assert isinstance(error, CorruptCheckpointError)
    assert str(file) in str(error)
    assert "missing" in verify(tmp_path / "c").problems[0].reason


def test_a_shard_file_that_has_grown(tmp_path: Path) -> None:
    file = save(tmp_path / "c")[0]
    file.write_bytes(file.read_bytes() + b"x")
    assert same(load(tmp_path / "c"))
    assert [problem.file for problem in verify(tmp_path / "c").problems] == [file.name]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04N."])
def test_metadata_that_is_none(tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(content)
    assert isinstance(load_error(tmp_path / "c"), CorruptCheckpointError)


def test_full_verification_reads_what_the_load_does_not_need(tmp_path: Path) -> None:
    (file,) = save(tmp_path / "c")
    bad = bytearray(file.read_bytes())
    at = bad.find(torch.arange(100.0).numpy().tobytes())
    bad[at + 40] ^= 1
    file.write_bytes(bad)
    target = {"half": torch.zeros(64, dtype=torch.bfloat16)}
    dcp.load(target, storage_reader=FsspecStorageReader(tmp_path / "c"))
    assert_bits_equal(target["half"], state()["half"])
    with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
        dcp.load(target, storage_reader=FsspecStorageReader(tmp_path / "c", verify="full"))


def test_verification_can_be_switched_off(tmp_path: Path) -> None:
    (file,) = save(tmp_path / "c")
    bad = bytearray(file.read_bytes())
    at = bad.find(torch.arange(100.0).numpy().tobytes())
    bad[at] ^= 1
    file.write_bytes(bad)
    reader = FsspecStorageReader(tmp_path / "c", verify="off")
    dcp.load(blank(), storage_reader=reader)
    assert (reader.last_report.checksums, reader.last_report.num_verified) == ("off", 0)


def test_a_checkpoint_without_checksums_loads_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "c")
    (tmp_path / "c" / "checksums.json").unlink()
    reader = FsspecStorageReader(tmp_path / "c")
    target = blank()
    dcp.load(target, storage_reader=reader)
    assert same(target)
    assert reader.last_report.checksums == "absent"
    assert "checksums.json" in caplog.text


def test_verify_decodes_what_has_no_checksums(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    assert verify(tmp_path / "c").ok
    assert verify(tmp_path / "c").checksums == "absent"
    (file,) = (tmp_path / "c").glob("*.distcp")
    bad = file.read_bytes().replace(b"PK\x03\x04", b"PK\x03\x05")
    file.write_bytes(bad)
    assert not verify(tmp_path / "c").ok
