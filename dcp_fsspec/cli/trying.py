"""The command that tries a store: bench."""

import click

from dcp_fsspec.cli import options, output
from dcp_fsspec.tools.benchmarking import bench as run_bench


@click.command("bench")
@click.argument("url")
@click.option("--size", type=options.Size(), default="256MiB", show_default=True, help="Of the state.")
@options.common
def bench(url: str, size: int, options_: tuple[str, ...], as_json: bool) -> None:
    """Save and load a made-up state in a folder of its own below URL, remove it, and say what the figures suggest."""
    report = run_bench(options.store(url, options_), size, lambda text: None if as_json else output.note(f"{text} ..."))
    if as_json:
        output.print_json(output.plain(report))
        return
    columns = ("at a time", "save MB/s", "CPU s/GB", "load MB/s", "CPU s/GB ", "requests", "retries")
    table = output.table(*columns, right=columns)
    for one in report.rounds:
        table.add_row(
            "default" if one.max_concurrency is None else str(one.max_concurrency),
            f"{one.save_mb_per_second:.0f}",
            f"{one.save_cpu_seconds_per_gb:.1f}",
            f"{one.load_mb_per_second:.0f}",
            f"{one.load_cpu_seconds_per_gb:.1f}",
            str(one.num_requests),
            str(one.num_retries),
        )
    latency = f"reading a small file takes {report.latency_seconds * 1e3:.1f} ms"
    output.show(f"{report.filesystem}, {output.size(report.num_bytes)}; {latency}", table, *report.advice)


COMMANDS = (bench,)
