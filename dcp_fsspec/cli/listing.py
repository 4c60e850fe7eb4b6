"""The command that lists a job's folder: ls."""

import time

import click

from dcp_fsspec.cli import options, output
from dcp_fsspec.tools.listing import IterationEntry, list_checkpoints


@click.command("ls")
@click.argument("root")
@options.common
def ls(root: str, options_: tuple[str, ...], as_json: bool) -> None:
    """List the iterations below ROOT: committed or not, age, size, components, and which the pointer names.

    No checkpoint is opened: it takes one listing and the pointer.
    """
    listing = list_checkpoints(options.store(root, options_))
    if as_json:
        iterations = [
            {**output.plain(one), "modified": output.utc(one.modified), "last_write": output.utc(one.last_write)}
            for one in listing.iterations
        ]
        output.print_json({**output.plain(listing), "iterations": iterations})
        return
    now = time.time()
    table = output.table("iteration", "state", "age", "size", "files", "components", right=("age", "size", "files"))
    for one in listing.iterations:
        name = one.folder or listing.url.rpartition("/")[2]
        age, size = output.age(one.modified, now), output.size(one.num_bytes)
        table.add_row(name, _state(one), age, size, str(one.num_files), _components(one))
    output.show(table)
    if listing.pointer is not None and not any(one.latest for one in listing.iterations):
        output.note(f"the pointer names {listing.pointer[:80]!r}, which is not here")


def _state(one: IterationEntry) -> str:
    state = "committed" if one.committed else "NOT COMMITTED"
    return f"{state}, latest" if one.latest else state


def _components(one: IterationEntry) -> str:
    names = [part.name if part.complete else f"{part.name} (incomplete)" for part in one.components if part.name]
    return ", ".join(names) or "(one, unnamed)"


COMMANDS = (ls,)
