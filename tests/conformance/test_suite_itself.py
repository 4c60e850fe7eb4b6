"""The conformance suite finds what is wrong with a filesystem, says it, and cleans up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcp_fsspec.testing.conformance import (
    CHECKS,
    CheckResult,
    ConformanceReport,
    NotApplicableError,
    Target,
    check_filesystem,
    run_check,
)
from dcp_fsspec.testing.faults import Drop, Fail, FaultyFileSystem, Flip, Truncate
from support.stores import MemoryStore, unique_name

QUICK = {name: CHECKS[name] for name in ("round_trip", "stock_files_land", "empty_state")}


@pytest.mark.parametrize("by_url", [True, False], ids=["url", "filesystem"])
def test_a_good_filesystem_passes_and_nothing_stays_behind(by_url: bool) -> None:
    before = dict(MemoryFileSystem.store)
    root = unique_name()
    store = "memory://" if by_url else fsspec.filesystem("memory")
    report = check_filesystem(store, root if by_url else f"/{root}", checks=QUICK)
    assert report.passed
    assert report.failures == ()
    assert [result.name for result in report.results] == list(QUICK)
    assert MemoryFileSystem.store == before


def test_the_report_is_a_table_with_reasons() -> None:
    report = ConformanceReport(
        "memory://x",
        (
            CheckResult("good", "passed", seconds=1.0),
            CheckResult("bad", "failed", "two bytes differ"),
            CheckResult("odd", "not applicable", "no ranges"),
        ),
    )
    assert not report.passed
    assert [result.name for result in report.failures] == ["bad"]
    heading, *lines = str(report).splitlines()
    assert heading == "memory://x"
    assert [line.split()[0] for line in lines] == ["good", "bad", "odd"]
    assert lines[1].endswith("two bytes differ")


def test_a_report_in_which_nothing_applied_has_not_passed() -> None:
    assert not ConformanceReport("x", (CheckResult("a", "not applicable"),)).passed


def test_a_check_without_a_verdict_is_not_a_failure() -> None:
    def undecided(_: Target) -> None:
        raise NotApplicableError("cannot tell")

    result = run_check(undecided, Target("memory://nowhere"))
    assert (result.name, result.outcome, result.reason) == ("undecided", "not applicable", "cannot tell")


def _flips(fs: FaultyFileSystem) -> None:
    fs.inject("pipe_file", Flip(), path="*.distcp", times=None)


def _loses_writes(fs: FaultyFileSystem) -> None:
    fs.inject("pipe_file", Drop(), path="*.distcp", times=None)


def _keeps_all(fs: FaultyFileSystem) -> None:
    fs.inject("rm_file", Drop(), times=None)


def _cuts(fs: FaultyFileSystem) -> None:
    fs.inject("pipe_file", Truncate(1000), path="*.distcp", times=None)


def _refuses(fs: FaultyFileSystem) -> None:
    fs.inject("pipe_file", Fail(OSError(errno.EROFS, "read only")), times=None)


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [
        (_flips, "round_trip"),
        (_flips, "stock_files_land"),
        (_loses_writes, "stock_files_land"),
        (_loses_writes, "stock_reader_reads_it"),
        (_keeps_all, "overwrite_replaces"),
        (_keeps_all, "failed_write_leaves_nothing"),
        (_cuts, "round_trip"),
        (_cuts, "many_threads_at_once"),
        (_refuses, "empty_state"),
    ],
)
def test_a_bad_filesystem_fails_and_the_reason_is_said(sabotage: Callable[[FaultyFileSystem], None], name: str) -> None:
    store = MemoryStore()
    fs = FaultyFileSystem(fsspec.filesystem("memory"))
    sabotage(fs)
    result = run_check(CHECKS[name], Target(store.url, filesystem=fs))
    store.close()
    assert result.outcome == "failed"
    assert result.reason
    assert result.error is not None


class PatternFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Takes a name for a pattern when it removes, as fsspec's `rm` does."""

    def rm_file(self, path: str) -> None:
        for match in self.glob(path.rpartition("/")[0]):
            super().rm_file(f"{match}/{path.rpartition('/')[2]}")


class ForgetfulFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Drops what follows a hash sign, as a careless client of HTTP does."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(path)).partition("#")[0]


@pytest.mark.parametrize(
    ("filesystem", "name"),
    [(PatternFileSystem, "neighbours_are_left_alone"), (ForgetfulFileSystem, "awkward_names_are_literal")],
)
def test_names_that_are_not_literal_are_found(filesystem: type[MemoryFileSystem], name: str) -> None:
    store = MemoryStore()
    result = run_check(CHECKS[name], Target(store.url, filesystem=filesystem(skip_instance_cache=True)))
    store.close()
    assert result.outcome == "failed"
