"""The commands that look into checkpoints and change nothing: show, verify, diff."""

import fnmatch
from collections.abc import Iterable
from typing import Any

import click
from rich.tree import Tree

from dcp_fsspec.cli import options, output
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.inspecting import CheckpointView, StoredTensor
from dcp_fsspec.tools.checking import CheckReport, check
from dcp_fsspec.tools.comparing import compare
from dcp_fsspec.tools.listing import list_checkpoints
from dcp_fsspec.tools.locating import Located, locate

_FOUND_SOMETHING = 1


@click.command("show")
@click.argument("checkpoint", metavar="CKPT")
@click.argument("pattern", metavar="[GLOB]", default="*")
@click.option("--component", help="Only this one.")
@options.common
def show(checkpoint: str, pattern: str, component: str | None, options_: tuple[str, ...], as_json: bool) -> None:
    """Show the tensors of a checkpoint: shape, dtype, in how many pieces, bytes; and what each rank wrote.

    GLOB chooses keys, as in a shell: 'layers.*.weight'. Only metadata is read.
    """
    located = locate(options.store(checkpoint, options_))
    chosen = {component: located.component(component)} if component else located.components
    views = {name: CheckpointView(store, verify="off") for name, store in chosen.items()}
    if as_json:
        head = {"url": located.store.url, "iteration": located.iteration, "record": located.record}
        output.print_json({**head, "components": [_described(name, view, pattern) for name, view in views.items()]})
        return
    output.notes(located.notes)
    for name, view in views.items():
        output.show(_tree(name, view, pattern), *_balance(view))


def _described(name: str, view: CheckpointView, pattern: str) -> dict[str, Any]:
    tensors = [
        {
            "key": one.fqn,
            "shape": one.shape,
            "dtype": _dtype(one),
            "num_bytes": one.num_bytes,
            "chunks": [output.plain(chunk) for chunk in one.chunks],
        }
        for one in _fitting(view.tensors.values(), pattern)
    ]
    values = [
        {"key": one.fqn, "file": one.item.file, "num_bytes": one.item.num_bytes}
        for one in view.values.values()
        if fnmatch.fnmatchcase(one.fqn, pattern)
    ]
    return {
        "name": name,
        "url": view.url,
        "save_id": view.save_id,
        "num_tensors": len(view.tensors),
        "num_values": len(view.values),
        "num_files": len(view.bytes_by_file()),
        "num_bytes": view.num_bytes,
        "bytes_by_rank": {"unknown" if rank is None else rank: size for rank, size in view.bytes_by_rank().items()},
        "tensors": tensors,
        "values": values,
    }


def _fitting(tensors: Iterable[StoredTensor], pattern: str) -> list[StoredTensor]:
    return [one for one in tensors if fnmatch.fnmatchcase(one.fqn, pattern)]


def _dtype(one: StoredTensor) -> str:
    return str(one.dtype).removeprefix("torch.")


def _tree(name: str, view: CheckpointView, pattern: str) -> Tree:
    total = f"{len(view.tensors)} tensors, {len(view.values)} values, {output.size(view.num_bytes)}"
    tree = Tree(f"{name or view.url}: {total} in {len(view.bytes_by_file())} files")
    branches: dict[str, Tree] = {"": tree}
    for one in _fitting(view.tensors.values(), pattern):
        parent, _, leaf = one.fqn.rpartition(".")
        pieces = f", {len(one.chunks)} pieces" if len(one.chunks) != 1 else ""
        text = f"{leaf}  {_dtype(one)}{list(one.shape)}  {output.size(one.num_bytes)}{pieces}"
        _branch(branches, parent).add(text)
    for value in view.values.values():
        if fnmatch.fnmatchcase(value.fqn, pattern):
            parent, _, leaf = value.fqn.rpartition(".")
            _branch(branches, parent).add(f"{leaf}  value  {output.size(value.item.num_bytes)}")
    return tree


def _branch(branches: dict[str, Tree], path: str) -> Tree:
    if path not in branches:
        parent, _, leaf = path.rpartition(".")
        branches[path] = _branch(branches, parent).add(leaf)
    return branches[path]


def _balance(view: CheckpointView) -> list[str]:
    ranks = view.bytes_by_rank()
    if len(ranks) < 2:
        return []
    mean = sum(ranks.values()) / len(ranks)
    most = max(ranks, key=lambda rank: ranks[rank])
    least = min(ranks, key=lambda rank: ranks[rank])
    return [
        f"{len(ranks)} ranks wrote {output.size(int(mean))} each on average: rank {least} least, "
        f"{output.size(ranks[least])}, rank {most} most, {output.size(ranks[most])}"
    ]


@click.command("verify")
@click.argument("checkpoint", metavar="CKPT")
@click.option("--all", "all_", is_flag=True, help="All committed iterations of a folder, not just the latest.")
@options.common
def verify(checkpoint: str, all_: bool, options_: tuple[str, ...], as_json: bool) -> None:
    """Read a whole checkpoint and compare it with its checksums and its commit record. Nothing of it is run."""
    found = _to_verify(options.store(checkpoint, options_), all_)
    with output.progress(as_json=as_json) as progress:
        reports = [check(one, progress) for one in found]
    ok = all(report.ok for report in reports)
    if as_json:
        output.print_json({"ok": ok, "checkpoints": [{"ok": one.ok, **output.plain(one)} for one in reports]})
    else:
        output.notes(note for one in found for note in one.notes)
        for report in reports:
            _show_check(report)
    if not ok:
        raise click.exceptions.Exit(_FOUND_SOMETHING)


def _to_verify(store: Store, all_: bool) -> list[Located]:
    if not all_:
        return [locate(store)]
    listing = list_checkpoints(store)
    return [locate(store.child(one.folder) if one.folder else store) for one in listing.iterations if one.committed]


def _show_check(report: CheckReport) -> None:
    table = output.table(
        "component", "files", "items", "bytes", "checksums", "result", right=("files", "items", "bytes")
    )
    for name, one in report.components.items():
        result = "ok" if one.ok else f"{len(one.problems)} problems"
        size = output.size(one.num_bytes)
        table.add_row(name or "(unnamed)", str(one.num_files), str(one.num_items), size, one.checksums, result)
    output.show(report.url, table)
    for problem in report.problems:
        output.show(f"{problem.file}: {problem.reason}")
    for name, one in report.components.items():
        for problem in one.problems:
            item = f" {problem.item}:" if problem.item else ""
            output.show(f"{name}/{problem.file}:{item} {problem.reason}".lstrip("/"))


@click.command("diff")
@click.argument("first", metavar="CKPT_A")
@click.argument("second", metavar="CKPT_B")
@click.option("--component", help="Only this one.")
@click.option("--no-values", is_flag=True, help="Compare keys, shapes and dtypes alone.")
@options.common
@options.two_stores
def diff(
    first: str,
    second: str,
    component: str | None,
    no_values: bool,
    options_: tuple[str, ...],
    source_options: tuple[str, ...],
    target_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes, and values. Values are read only where checksums do not tell.

    --source-option is for CKPT_A, --target-option for CKPT_B.
    """
    one = locate(options.store(first, options_, source_options))
    other = locate(options.store(second, options_, target_options))
    components = [{component: each.component(component)} if component else each.components for each in (one, other)]
    with output.progress(as_json=as_json) as progress:
        report = compare(components[0], components[1], values=not no_values, progress=progress)
    if as_json:
        output.print_json({"equal": report.equal, **output.plain(report)})
    else:
        output.notes((*one.notes, *other.notes))
        table = output.table("key", "differs in", "first", "second")
        for difference in report.differences:
            kind = difference.kind
            if difference.num_elements is not None:
                kind += f": {difference.num_elements} elements, by at most {difference.max_difference:.3g}"
            table.add_row(difference.key, kind, difference.first, difference.second)
        if report.differences:
            output.show(table)
        by_checksum = f", {report.num_by_checksum} of them by checksum" if report.num_by_checksum else ""
        output.show(f"{report.num_equal} keys are equal{by_checksum}; {len(report.differences)} differ")
    if not report.equal:
        raise click.exceptions.Exit(_FOUND_SOMETHING)


COMMANDS = (show, verify, diff)
