"""Does this package keep its promises on your filesystem? Checks for whoever writes or runs an fsspec backend.

From a program::

    report = check_filesystem("myfs://bucket", "conformance", {"key": "..."})
    print(report)
    assert report.passed

From pytest, one test for each check::

    @pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
    def test_conformance(check):
        result = run_check(check, Target(f"myfs://bucket/{uuid.uuid4()}"))
        assert result.outcome != "failed", result.reason

The checks write small checkpoints in a new folder and remove it afterwards.
"""

import contextlib
import dataclasses
import logging
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.testing.checks import CHECKS, Check
from dcp_fsspec.testing.target import ConformanceError, NotApplicableError, Target, first_failure

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "NotApplicableError",
    "Target",
    "check_filesystem",
    "run_check",
]

logger = logging.getLogger(__name__)

Outcome = Literal["passed", "failed", "not applicable"]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What came out of one check.

    Attributes:
        name: Of the check.
        outcome: ``"passed"``, ``"failed"`` or ``"not applicable"``.
        reason: Why it failed or does not apply; empty if it passed.
        seconds: How long it took.
        error: The exception behind the reason, if any.
    """

    name: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """What came out of all checks on one store. As text it is a table with a line for each check."""

    url: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """No check failed, and at least one passed."""
        outcomes = {result.outcome for result in self.results}
        return "failed" not in outcomes and "passed" in outcomes

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome == "failed")

    def __str__(self) -> str:
        width = max((len(result.name) for result in self.results), default=0)
        lines = [
            f"{result.name:{width}}  {result.outcome:14}  {result.seconds:6.2f} s  {result.reason}".rstrip()
            for result in self.results
        ]
        return "\n".join([self.url, *lines])


def check_filesystem(
    filesystem_or_url: AbstractFileSystem | str,
    root: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    checks: Mapping[str, Check] = CHECKS,
    forbidden: str = "",
) -> ConformanceReport:
    """Run the checks in a new folder below `root`, and remove it.

    Args:
        filesystem_or_url: An fsspec filesystem, or the url of a bucket or a folder.
        root: Path on the filesystem, or relative to the url. It need not exist.
        storage_options: For a url, as in fsspec.
        checks: Which checks to run, by name.
        forbidden: Characters that names on this store cannot have.
    """
    if isinstance(filesystem_or_url, str):
        slash = "" if filesystem_or_url.endswith("/") else "/"
        base, filesystem = f"{filesystem_or_url}{slash}{root.strip('/')}".rstrip("/"), None
    else:
        base, filesystem = root.rstrip("/"), filesystem_or_url
    folder = Target(f"{base}/conformance-{uuid.uuid4().hex[:8]}", storage_options, filesystem, forbidden=forbidden)
    results = []
    try:
        for name, check in checks.items():
            target = Target(folder.below(name), storage_options, filesystem, forbidden=forbidden)
            results.append(run_check(check, target))
    finally:
        _remove(folder)
    return ConformanceReport(base, tuple(results))


def run_check(check: Check, target: Target) -> CheckResult:
    """Run one check on `target`, a folder that nothing else uses. It is not removed afterwards."""
    begin = time.monotonic()
    outcome: Outcome = "passed"
    reason, error = "", None
    try:
        with _quiet():
            check(target)
    except NotApplicableError as verdict:
        outcome, reason = "not applicable", str(verdict)
    except (Exception, CheckpointException) as failure:
        outcome, error = "failed", first_failure(failure)
        reason = str(error) if isinstance(error, ConformanceError) else f"{type(error).__name__}: {error}"
    return CheckResult(check.__name__, outcome, reason, time.monotonic() - begin, error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back torch's remarks about saving without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield


def _remove(folder: Target) -> None:
    fs, path = folder.raw()
    try:
        if fs.exists(path):
            fs.rm(path, recursive=True)
    except Exception as error:
        logger.warning("%s could not be removed: %s: %s", folder.url, type(error).__name__, error)
