"""Remove what crashed saves and interrupted copies have left below a folder of iterations."""

from dataclasses import dataclass, field

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.tools.listing import list_checkpoints


@dataclass
class SweepReport:
    """What was removed, or would be.

    Attributes:
        iterations: By uncommitted iteration, the bytes that it held.
        files: Pointers that were being written when a process died.
        uploads: Paths of multipart uploads that were begun and never completed.
        too_young: Uncommitted iterations that stay, since something was written to them lately.
    """

    iterations: dict[int, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    too_young: list[int] = field(default_factory=list)


def sweep(catalog: Catalog, *, before: float | None = None, dry_run: bool = False) -> SweepReport:
    """Remove uncommitted iterations, temporary pointers and open uploads.

    Args:
        catalog: The folder.
        before: Leave alone what was written to later than this; seconds since 1970. None: a save that is under way
            would go as well.
        dry_run: Only say what would go.

    Raises:
        StorageReadError, StorageWriteError: the store failed; some of it may be gone.
    """
    report = SweepReport()
    for entry in list_checkpoints(catalog.store).iterations:
        young = before is not None and (entry.last_write is None or entry.last_write > before)
        if entry.iteration is not None and not entry.committed and young:
            report.too_young.append(entry.iteration)
    report.files = catalog.temporaries(before)
    report.iterations = catalog.sweep(protected=report.too_young, before=before, dry_run=dry_run)
    for path, upload_id, begun in catalog.store.open_uploads():
        if before is not None and (begun is None or begun > before):
            continue
        if not dry_run:
            catalog.store.abort_upload(path, upload_id)
        report.uploads.append(path)
    return report
