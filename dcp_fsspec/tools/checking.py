"""Check a checkpoint of several components: each of them, and that they are what was committed together."""

from dataclasses import dataclass, field

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.opened import read_metadata
from dcp_fsspec.storage.progress import ProgressCallback
from dcp_fsspec.storage.verifying import Problem, VerifyReport, verify_store
from dcp_fsspec.tools.locating import Located


@dataclass
class CheckReport:
    """What was found.

    Attributes:
        url: The checkpoint.
        components: What was found in each component, by name.
        problems: What is wrong with the checkpoint as a whole.
    """

    url: str
    components: dict[str, VerifyReport] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and all(report.ok for report in self.components.values())


def check(located: Located, progress: ProgressCallback | None = None) -> CheckReport:
    """Read all of a checkpoint and compare it with its checksums and its commit record. Nothing of it is run.

    Raises:
        StorageReadError: a store did not deliver, so nothing can be said.
    """
    report = CheckReport(located.store.url)
    _check_record(located, report)
    for name in located.incomplete:
        report.problems.append(Problem(name, None, f"it has no {metadata.FILE_NAME}, so it is no complete component"))
    for name in sorted(set(located.record.components if located.record else ()) - set(located.components)):
        if name not in located.incomplete:
            report.problems.append(Problem(name, None, "it was committed, and is gone"))
    for name, store in located.components.items():
        try:
            report.components[name] = verify_store(store, progress=progress)
            _compare_with_record(located, name, store, report)
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            report.problems.append(Problem(f"{name}/{metadata.FILE_NAME}".lstrip("/"), None, str(error)))
    return report


def _check_record(located: Located, report: CheckReport) -> None:
    record = located.record
    if record is None:
        if "" not in located.components and located.store.exists(layout.COMMIT_NAME):
            reason = "it cannot be read as a commit record; the iteration counts as not committed"
            report.problems.append(Problem(layout.COMMIT_NAME, None, reason))
    elif located.iteration not in (None, record.iteration):
        reason = f"it is that of iteration {record.iteration}; this one counts as not committed"
        report.problems.append(Problem(layout.COMMIT_NAME, None, reason))


def _compare_with_record(located: Located, name: str, store: Store, report: CheckReport) -> None:
    record = located.record.components.get(name) if located.record else None
    if record is None:
        return
    save_id = metadata.save_id_of(read_metadata(store)[0])
    if save_id != record.save_id:
        reason = f"it is of the save {save_id}, the commit record speaks of {record.save_id}"
        report.problems.append(Problem(f"{name}/{metadata.FILE_NAME}", None, reason))
