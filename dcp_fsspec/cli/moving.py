"""The commands that write checkpoints: cp, export, import."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import click
import torch

from dcp_fsspec.cli import options, output
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.tools.copying import CopyOptions, copy_checkpoint
from dcp_fsspec.tools.exporting import DEFAULT_SHARD_BYTES, DTYPES, ExportOptions, export_checkpoint
from dcp_fsspec.tools.importing import ImportOptions, import_files
from dcp_fsspec.tools.keys import KeyChoice
from dcp_fsspec.tools.locating import locate

_only = click.option("--only", multiple=True, metavar="GLOB", help="Keys to take, as in a shell. Repeatable.")
_strip = click.option("--strip-prefix", default="", metavar="TEXT", help="Remove this from the beginning of names.")
_dtype = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    callback=lambda context, parameter, value: DTYPES.get(value),
    help="What floating-point tensors become.",
)


def _from_store_to_store(function: Callable[..., None]) -> Callable[..., None]:
    """Add what all of these commands have, and hand on two stores for two urls and their options."""

    @functools.wraps(function)
    def command(
        source: str,
        target: str,
        overwrite: bool,
        yes: bool,
        options_: tuple[str, ...],
        source_options: tuple[str, ...],
        target_options: tuple[str, ...],
        **others: Any,
    ) -> None:
        there = options.store(target, options_, target_options)
        if overwrite:
            options.confirm(f"What stands at {there.url} will be lost.", yes=yes)
        function(options.store(source, options_, source_options), there, overwrite=overwrite, **others)

    replacing = click.option("--overwrite", is_flag=True, help="Replace what stands in the target. Needs --yes.")
    return replacing(options.destructive(options.common(options.two_stores(command))))


@click.command("cp")
@click.argument("source")
@click.argument("target")
@click.option("--verify", is_flag=True, help="Read the copy back before it becomes valid.")
@click.option("--concurrency", type=click.IntRange(1), help="Files at a time.")
@_from_store_to_store
def cp(source: Store, target: Store, *, overwrite: bool, verify: bool, concurrency: int | None, as_json: bool) -> None:
    """Copy a checkpoint, an iteration or all committed iterations of a folder; TARGET becomes the copy.

    Within one store the store copies by itself. An interrupted copy is continued when it is run again: files that are
    there and equal are not copied a second time. The copy is a checkpoint only when it is whole.
    """
    with output.progress(as_json=as_json) as progress:
        settings = CopyOptions(overwrite=overwrite, verify=verify, max_concurrency=concurrency, progress=progress)
        report = copy_checkpoint(source, target, settings)
    if as_json:
        output.print_json(output.plain(report))
        return
    for folder in report.skipped:
        output.note(f"{folder} is not committed and was left out")
    within = f", {report.num_files_within_store} of them within the store" if report.num_files_within_store else ""
    output.show(
        f"{len(report.copied)} checkpoints complete: {report.num_files} files, {output.size(report.num_bytes)} copied"
        f"{within}; "
        f"{report.num_files_found} files, {output.size(report.num_bytes_found)} were there; {report.seconds:.1f} s"
    )


@click.command("export")
@click.argument("source", metavar="CKPT")
@click.argument("target", metavar="OUT")
@click.option(
    "--format", "format_", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True
)
@click.option("--component", default="model", show_default=True, help="Which part of an iteration.")
@_dtype
@click.option("--shard-size", type=options.Size(), default=DEFAULT_SHARD_BYTES, help="Of a file.  [default: 5GB]")
@_only
@click.option("--ema", is_flag=True, help="The averaged weights (net_ema.) alone, called as the regular ones (net.).")
@_strip
@_from_store_to_store
def export(
    source: Store,
    target: Store,
    *,
    format_: Literal["safetensors", "torch"],
    component: str,
    dtype: torch.dtype | None,
    shard_size: int,
    only: tuple[str, ...],
    ema: bool,
    strip_prefix: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the tensors of a checkpoint as safetensors or as a torch file, from store to store in little memory.

    OUT is a folder, or one file ending in .safetensors, .pt or .pth. Several safetensors files get the index that
    Hugging Face's loaders expect.
    """
    keys = KeyChoice(only, ema, strip_prefix)
    located = locate(source)
    stored = located.component(component)
    with output.progress(as_json=as_json) as progress:
        settings = ExportOptions(format_, keys, dtype, shard_size, overwrite, progress)
        report = export_checkpoint(stored, target, settings)
    if as_json:
        output.print_json(output.plain(report))
        return
    output.notes(located.notes)
    if report.num_unverified:
        output.note(f"{report.num_unverified} parts could not be compared with a checksum; `verify` checks all of it")
    if report.left_out:
        output.note(f"left out: {', '.join(report.left_out[:10])}{' ...' if len(report.left_out) > 10 else ''}")
    output.show(
        f"{report.num_tensors} tensors, {output.size(report.num_bytes)} in {report.seconds:.1f} s:", *report.files
    )


@click.command("import")
@click.argument("source")
@click.argument("target", metavar="CKPT")
@_dtype
@_only
@_strip
@click.option("--add-prefix", default="", metavar="TEXT", help="Put this before all names.")
@_from_store_to_store
def import_(
    source: Store,
    target: Store,
    *,
    dtype: torch.dtype | None,
    only: tuple[str, ...],
    strip_prefix: str,
    add_prefix: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make a DCP checkpoint of a safetensors file, a folder of them, or a torch file. Nothing in them is run."""
    keys = KeyChoice(only, False, strip_prefix, add_prefix)
    with output.progress(as_json=as_json) as progress:
        report = import_files(source, target, ImportOptions(keys, dtype, overwrite, progress))
    if as_json:
        output.print_json(output.plain(report))
        return
    output.show(f"{report.num_keys} keys, {output.size(report.num_bytes)} in {report.seconds:.1f} s: {target.url}")


COMMANDS = (cp, export, import_)
