"""The commands that look after a job's folder: latest, prune, sweep."""

import time

import click

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.retention import AnyOf, KeepBest, KeepEvery, KeepLatest, RetentionPolicy
from dcp_fsspec.cli import options, output
from dcp_fsspec.errors import CheckpointNotFoundError
from dcp_fsspec.tools.sweeping import sweep as run_sweep

_DEFAULT_AGE = "1h"

_dry_run = click.option("--dry-run", is_flag=True, help="Only say what would go; this is what happens without --yes.")


@click.command("latest")
@click.argument("root")
@click.option(
    "--set", "number", type=int, metavar="N", help="Let the pointer name iteration N, which must be committed."
)
@options.destructive
@options.common
def latest(root: str, number: int | None, yes: bool, options_: tuple[str, ...], as_json: bool) -> None:
    """Print the iteration that a job would resume from, or choose another one."""
    catalog = Catalog.of(options.store(root, options_))
    if number is not None:
        pointee = catalog.pointee()
        if pointee is not None and pointee > number:
            options.confirm(
                f"The pointer names iteration {pointee}. Behind {number}, the job will write anew what is there.",
                yes=yes,
            )
        catalog.advance(number, backward=True)
    found = catalog.latest()
    if found is None:
        raise CheckpointNotFoundError(f"there is no committed iteration below {catalog.url}")
    folder = catalog.folder(found.iteration)
    if as_json:
        document = {"iteration": found.iteration, "url": folder.url, "notes": found.notes, "record": found.record}
        output.print_json(document)
        return
    output.notes(found.notes)
    output.show(folder.url)


@click.command("prune")
@click.argument("root")
@click.option("--keep-latest", type=click.IntRange(1), metavar="N", help="Keep the newest N.")
@click.option("--keep-every", type=click.IntRange(1), metavar="M", help="Keep each multiple of M.")
@click.option(
    "--keep-best",
    metavar="METRIC[:min|max][:K]",
    help="Keep the K best (default 1) by a metric that was passed to save; lower is better unless max is said.",
)
@_dry_run
@options.destructive
@options.common
def prune(
    root: str,
    keep_latest: int | None,
    keep_every: int | None,
    keep_best: str | None,
    dry_run: bool,
    yes: bool,
    options_: tuple[str, ...],
    as_json: bool,
) -> None:
    """Remove the committed iterations that no rule keeps. What the pointer names always stays."""
    policies: list[RetentionPolicy] = []
    if keep_latest:
        policies.append(KeepLatest(keep_latest))
    if keep_every:
        policies.append(KeepEvery(keep_every))
    if keep_best:
        policies.append(_best(keep_best))
    if not policies:
        raise click.UsageError("say what to keep: --keep-latest, --keep-every, --keep-best")
    catalog = Catalog.of(options.store(root, options_))
    _check_there(catalog)
    dry_run = dry_run or not yes
    gone = catalog.prune(AnyOf(*policies), dry_run=dry_run)
    if as_json:
        output.print_json({"url": catalog.url, "dry_run": dry_run, "iterations": gone})
        return
    output.show(*(layout.folder_of(iteration) for iteration in gone))
    _say(f"{len(gone)} iterations", dry_run)


def _best(text: str) -> KeepBest:
    metric, *rest = text.split(":")
    mode = rest.pop(0) if rest and rest[0] in ("min", "max") else "min"
    if not metric or len(rest) > 1 or not all(one.isdecimal() and int(one) for one in rest):
        raise click.BadParameter(f"{text!r}: write METRIC, METRIC:3 or METRIC:max:3", param_hint="--keep-best")
    return KeepBest(int(rest[0]) if rest else 1, metric, "max" if mode == "max" else "min")


def _check_there(catalog: Catalog) -> None:
    if not catalog.store.list_folder():
        raise CheckpointNotFoundError(f"there is nothing at {catalog.url}, or no such folder or bucket")


def _say(what: str, dry_run: bool) -> None:
    output.note(f"{what} would be removed; say --yes to do it" if dry_run else f"{what} removed")


@click.command("sweep")
@click.argument("root")
@click.option(
    "--older-than",
    type=options.Duration(),
    default=_DEFAULT_AGE,
    show_default=True,
    help="Leave alone what was written to since: a save under way looks like one that crashed.",
)
@_dry_run
@options.destructive
@options.common
def sweep(root: str, older_than: float, dry_run: bool, yes: bool, options_: tuple[str, ...], as_json: bool) -> None:
    """Remove what crashed saves and interrupted copies left: uncommitted iterations and open multipart uploads."""
    catalog = Catalog.of(options.store(root, options_))
    _check_there(catalog)
    dry_run = dry_run or not yes
    report = run_sweep(catalog, before=time.time() - older_than, dry_run=dry_run)
    if as_json:
        output.print_json({"url": catalog.url, "dry_run": dry_run, **output.plain(report)})
        return
    for iteration, num_bytes in report.iterations.items():
        output.show(f"{layout.folder_of(iteration)}  {output.size(num_bytes)}")
    output.show(*report.files, *(f"open upload of {path}" for path in report.uploads))
    for iteration in report.too_young:
        output.note(f"{layout.folder_of(iteration)} is not committed, and too young to go")
    _say(f"{len(report.iterations)} iterations and {len(report.uploads)} open uploads", dry_run)


COMMANDS = (latest, prune, sweep)
