"""Write one iteration: every component, then the commit record, then the pointer."""

import dataclasses
import datetime
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group, checkpoint_failures, raise_failures
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.plan_cache import PlanCache
from dcp_fsspec.checkpointer.records import CommitRecord, ComponentRecord
from dcp_fsspec.checkpointer.snapshot import FlatState, Snapshot, SnapshotPlanner
from dcp_fsspec.storage.report import SaveReport
from dcp_fsspec.storage.writer import FsspecStorageWriter
from dcp_fsspec.version import __version__


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """Settings of a writer of iterations.

    Attributes:
        overwrite: Replace a committed iteration.
        writer: Keyword arguments for `FsspecStorageWriter`.
    """

    overwrite: bool = False
    writer: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class IterationWriter:
    """Writes iterations, one at a time. Collective: all ranks call `write` with the same iterations.

    Args:
        catalog: Where to.
        group: The ranks. Nothing else may use it meanwhile.
        options: Settings.
    """

    def __init__(self, catalog: Catalog, group: Group, options: WriteOptions) -> None:
        self._catalog = catalog
        self._group = group
        self._options = options
        self._plans: dict[str, PlanCache] = {}

    def write(self, snapshot: Snapshot, before_commit: Callable[[], None] = lambda: None) -> Outcome:
        """Write and commit one iteration; afterwards the pointer names it, unless it names a later one.

        Args:
            snapshot: What to write.
            before_commit: Called on the coordinator right before the commit; it may raise.

        Raises:
            CheckpointExistsError: the iteration is committed already, or another job was faster.
            StorageWriteError: it is not committed, on any rank. The pointer and older iterations are as they were.
        """
        begin = time.monotonic()
        iteration = snapshot.iteration
        self._group.decide(lambda: self._catalog.begin(iteration, overwrite=self._options.overwrite))
        reports: dict[str, SaveReport] = {}
        try:
            # What can fail on one rank alone is done before the ranks wait for each other.
            writers = self._group.agree(lambda: self._writers(snapshot), "opening the store")
            for name, state in snapshot.components.items():
                self._write_one(name, writers[name], state, reports)
        except BaseException:
            self._plans.clear()
            self._clean_up(iteration, reports)
            raise
        all_reports = self._group.gather(reports)
        record = self._group.decide(lambda: self._commit(snapshot, all_reports, before_commit))
        each = [one for of_rank in all_reports for one in of_rank.values()]
        return Outcome(
            iteration,
            time.monotonic() - begin,
            record,
            num_requests=sum(one.num_requests for one in each),
            num_retries=sum(one.num_retries for one in each),
        )

    def _writers(self, snapshot: Snapshot) -> dict[str, FsspecStorageWriter]:
        # Fresh file names, and only where nothing stands: another job that writes the same iteration at the same time
        # cannot change what this one has written.
        folder = self._catalog.folder(snapshot.iteration)
        return {
            name: FsspecStorageWriter.at(folder.child(name), overwrite=False, **self._options.writer)
            for name in snapshot.components
        }

    def _write_one(
        self, name: str, writer: FsspecStorageWriter, state: FlatState, reports: dict[str, SaveReport]
    ) -> None:
        """Write one component, and note in `reports` what was written, also of a save that fails."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(
                    {},
                    storage_writer=writer,
                    planner=SnapshotPlanner(state, self._plans.setdefault(name, PlanCache()), self._group.size),
                    process_group=self._group.process_group,
                    no_dist=not self._group.is_distributed,
                )
            except CheckpointException as error:
                raise_failures(checkpoint_failures(error), f"saving {writer.checkpoint_id}")
                raise
            finally:
                reports[name] = writer.last_report

    def _commit(
        self, snapshot: Snapshot, reports: list[dict[str, SaveReport]], before_commit: Callable[[], None]
    ) -> CommitRecord:
        record = CommitRecord(
            iteration=snapshot.iteration,
            utc_time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            world_size=self._group.size,
            torch_version=torch.__version__,
            package_version=__version__,
            components={name: _component(name, reports) for name in snapshot.components},
            metrics=snapshot.metrics,
            metadata=snapshot.metadata,
        )
        before_commit()
        # Should the commit fail, the files stay: a write that timed out may still arrive, and must not find them gone.
        self._catalog.commit(record, overwrite=self._options.overwrite)
        self._catalog.advance(snapshot.iteration)
        return record

    def _clean_up(self, iteration: int, reports: Mapping[str, SaveReport]) -> None:
        """Remove what a failed save has left, on the way out with its error.

        Only that: the save may have failed because another job writes, or has committed, the same iteration.
        """
        if not self._group.is_coordinator:
            return
        self._catalog.discard_save(iteration, {name: one.save_id for name, one in reports.items() if one.save_id})


def _component(name: str, reports: list[dict[str, SaveReport]]) -> ComponentRecord:
    mine = [of_rank[name] for of_rank in reports]
    return ComponentRecord(
        num_files=sum(one.num_files for one in mine),
        num_bytes=sum(one.num_bytes for one in mine),
        save_id=mine[0].save_id,
    )
