"""Write one iteration: every component, then the commit record, then the pointer."""

import dataclasses
import datetime
import logging
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group, checkpoint_failures, raise_failures
from dcp_fsspec.checkpointer.records import CommitRecord, ComponentRecord
from dcp_fsspec.checkpointer.snapshot import FlatState, Snapshot, SnapshotPlanner
from dcp_fsspec.errors import DcpFsspecError
from dcp_fsspec.storage.report import SaveReport
from dcp_fsspec.storage.writer import FsspecStorageWriter
from dcp_fsspec.version import __version__

logger = logging.getLogger(__name__)


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

    def write(self, snapshot: Snapshot) -> CommitRecord:
        """Write and commit one iteration; afterwards the pointer names it, unless it names a later one.

        Raises:
            CheckpointExistsError: the iteration is committed already, or another job was faster.
            StorageWriteError: it is not committed, on any rank. The pointer and older iterations are as they were.
        """
        begin = time.monotonic()
        iteration = snapshot.iteration
        self._group.decide(lambda: self._catalog.begin(iteration, overwrite=self._options.overwrite))
        try:
            reports = {name: self._write_one(iteration, name, state) for name, state in snapshot.components.items()}
        except BaseException:
            self._clean_up(iteration)
            raise
        all_reports = self._group.gather(reports)
        record = self._group.decide(lambda: self._commit(snapshot, all_reports))
        if self._group.is_coordinator:
            self._log(record, time.monotonic() - begin, all_reports)
        return record

    def _write_one(self, iteration: int, name: str, state: FlatState) -> SaveReport:
        store = self._catalog.folder(iteration).child(name)
        # Fresh file names, and only where nothing stands: another job that writes the same iteration at the same time
        # cannot change what this one has written.
        writer = FsspecStorageWriter.at(store, overwrite=False, **self._options.writer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(
                    {},
                    storage_writer=writer,
                    planner=SnapshotPlanner(state),
                    process_group=self._group.process_group,
                    no_dist=not self._group.is_distributed,
                )
            except CheckpointException as error:
                raise_failures(checkpoint_failures(error), f"saving {store.url}")
                raise
        return writer.last_report

    def _commit(self, snapshot: Snapshot, reports: list[dict[str, SaveReport]]) -> CommitRecord:
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
        # Should the commit fail, the files stay: a write that timed out may still arrive, and must not find them gone.
        self._catalog.commit(record, overwrite=self._options.overwrite)
        self._catalog.advance(snapshot.iteration)
        return record

    def _clean_up(self, iteration: int) -> None:
        """Remove what a failed save has left, on the way out with its error."""
        if not self._group.is_coordinator:
            return
        folder = self._catalog.folder(iteration)
        try:
            folder.remove_all(folder.list_files(), "left behind by a failed save")
        except DcpFsspecError as error:
            logger.warning("%s: leftovers of a failed save stay: %s", folder.url, error)

    def _log(self, record: CommitRecord, seconds: float, reports: list[dict[str, SaveReport]]) -> None:
        num_bytes = sum(one.num_bytes for one in record.components.values())
        each = [one for of_rank in reports for one in of_rank.values()]
        logger.info(
            "saved %s: %.1f MB in %.2f s (%.0f MB/s), %d requests, %d retries",
            self._catalog.folder(record.iteration).url,
            num_bytes / 1e6,
            seconds,
            num_bytes / 1e6 / seconds if seconds else 0.0,
            sum(one.num_requests for one in each),
            sum(one.num_retries for one in each),
        )


def _component(name: str, reports: list[dict[str, SaveReport]]) -> ComponentRecord:
    mine = [of_rank[name] for of_rank in reports]
    return ComponentRecord(
        num_files=sum(one.num_files for one in mine),
        num_bytes=sum(one.num_bytes for one in mine),
        save_id=mine[0].save_id,
    )
