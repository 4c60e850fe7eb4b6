"""Make tables and plots of what `benchmarks.throughput` has measured.

    python -m benchmarks.report out.jsonl --out report           # report/report.md and report/*.png
    python -m benchmarks.report --trace traces --out report      # report/threads-*.png, report/trace.json

The plots that the figures allow are made: throughput over ranks, over the size of the state, over the number of
tensors; memory while one operation runs. Of a folder of traces: what every thread did, as a picture, and one file of
all ranks for <https://ui.perfetto.dev>. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""One measured operation, as in the file."""

_SETTING = ("target", "state", "num_tensors", "layout", "ranks")
_COLUMNS = (
    "operation",
    "peer",
    "s (min-max)",
    "GB/s",
    "of it a rank",
    "CPU s/GB",
    "peak MiB",
    "moved / needed",
    "requests",
    "retries",
    "skew",
)
_BACKGROUND_COLUMNS = ("peer", "blocked s", "staging s", "staging / copy", "complete after s", "training lost s/GB")
_MEGABYTE = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="JSON lines of benchmarks.throughput")
    parser.add_argument("--trace", type=Path, help="folder of traces")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(text) for path in options.files for text in path.read_text().splitlines() if text]
    pictures: list[Path] = []
    if options.trace:
        from benchmarks.timeline import joined, plot_threads

        documents = [json.loads(path.read_text()) for path in sorted(options.trace.glob("*.json"))]
        (options.out / "trace.json").write_text(json.dumps(joined(documents)))
        pictures += plot_threads(documents, options.out)
    if lines:
        from benchmarks.plots import plot_all

        pictures += plot_all(lines, options.out)
        (options.out / "report.md").write_text(markdown(lines, [picture.name for picture in pictures]))
    for path in pictures:
        print(path)
    return 0


def markdown(lines: Sequence[Line], pictures: Iterable[str] = ()) -> str:
    """Return the report. MB and GB are decimal, MiB binary; figures are medians of the rounds."""
    parts = ["# Throughput", "", *_about(lines)]
    groups = grouped([line for line in lines if line["operation"] != "background save"], _SETTING)
    for setting, own in groups.items():
        parts += [f"## {_heading(setting, own[0])}", "", *_table(own), ""]
    for setting, own in grouped([line for line in lines if line["operation"] == "background save"], _SETTING).items():
        parts += [f"## Saves in the background: {_heading(setting, own[0])}", "", *_background_table(own), ""]
    parts += _scaling(lines)
    parts += [f"![]({name})\n" for name in pictures]
    return "\n".join(parts)


def grouped(lines: Iterable[Line], by: Sequence[str]) -> dict[tuple[Any, ...], list[Line]]:
    """Return the lines by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in by), []).append(line)
    return groups


def succeeded(lines: Iterable[Line]) -> list[Line]:
    """Return the lines whose times count."""
    return [line for line in lines if line["timed"] and not line["error"]]


def median_of(lines: Iterable[Line], name: str) -> float | None:
    """Return the median of a field, None if it is nowhere."""
    values = [line[name] for line in lines if line[name] is not None]
    return statistics.median(values) if values else None


def _about(lines: Sequence[Line]) -> list[str]:
    about = []
    for (versions, machines), own in grouped(
        [{**line, "versions": _pairs(line["versions"]), "machines": _machines(line)} for line in lines],
        ("versions", "machines"),
    ).items():
        about += [f"{len(own)} operations on {machines}.", "", f"Versions: {versions}.", ""]
    if not any(line["gpu"] for line in lines):
        about += ["No GPU took part: copies from a device to the host, and nccl, were not run.", ""]
    return about


def _machines(line: Line) -> str:
    first = line["machines"][0]
    gpu = f", {line['gpu']}" if line["gpu"] else ""
    return f"{line['num_nodes']} x {first['cpu']}, {first['num_cpus']} CPUs, {first['memory_gib']} GiB{gpu}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _heading(setting: tuple[Any, ...], line: Line) -> str:
    target, state, num_tensors, layout, ranks = setting
    size = max(1, round(line["state_bytes"] / 2**20))
    name = f"{state}: " if not str(state).isdigit() else ""
    return f"{target}; {name}{size} MiB in {num_tensors} tensors, {layout}, {ranks} ranks"


def _table(lines: Sequence[Line]) -> list[str]:
    rows = [_row(_COLUMNS), _row(("---",) * 2 + ("---:",) * (len(_COLUMNS) - 2))]
    operations = list(dict.fromkeys(line["operation"] for line in lines))
    groups = grouped(lines, ("operation", "peer"))
    for (operation, peer), own in sorted(groups.items(), key=lambda item: operations.index(item[0][0])):
        rows.append(_row((operation, peer, *_cells(own))))
    return rows


def _cells(own: Sequence[Line]) -> tuple[str, ...]:
    errors = [line["error"] for line in own if line["error"]]
    timed = succeeded(own)
    if not timed:
        return (f"failed: {errors[0]}" if errors else "not measured", *[""] * (len(_COLUMNS) - 3))
    seconds = [line["seconds"] for line in timed]
    spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    of_ranks = [rate for line in timed for rate in line["rank_gb_per_second"]]
    large = timed[0]["state_bytes"] >= _MEGABYTE
    return (
        spread + (f" [{len(errors)} failed]" if errors else ""),
        _number(median_of(timed, "gb_per_second"), ".3f") if large else "-",
        f"{min(of_ranks):.3f}-{max(of_ranks):.3f}" if large else "-",
        _number(median_of(timed, "cpu_seconds_per_gb"), ".2f") if large else "-",
        f"{max(line['peak_bytes'] for line in timed) / 2**20:.0f}",
        _number(median_of(own, "moved_per_needed"), ".3f"),
        _requests(own),
        _number(median_of(timed, "num_retries"), ".0f"),
        _number(median_of(timed, "skew"), ".0%"),
    )


def _requests(own: Sequence[Line]) -> str:
    counted = [line["requests"] for line in own if line["requests"]]
    if not counted:
        return "-"
    return " ".join(f"{number} {verb}" for verb, number in sorted(counted[-1].items(), key=lambda item: -item[1]))


def _background_table(lines: Sequence[Line]) -> list[str]:
    rows = [_row(_BACKGROUND_COLUMNS), _row(("---",) + ("---:",) * (len(_BACKGROUND_COLUMNS) - 1))]
    for (peer,), own in grouped(succeeded(lines), ("peer",)).items():
        staging = [line["stage_seconds"] / line["copy_seconds"] for line in own if line["copy_seconds"]]
        lost = [line["slowed_seconds"] / (line["state_bytes"] / 1e9) for line in own]
        cells = [_number(median_of(own, name), ".3f") for name in ("blocked_seconds", "stage_seconds")]
        cells += [_number(statistics.median(staging) if staging else None, ".2f")]
        cells += [_number(median_of(own, "seconds"), ".2f"), f"{statistics.median(lost):.2f}"]
        rows.append(_row((peer, *cells)))
    return rows


def _scaling(lines: Sequence[Line]) -> list[str]:
    """Return a table over the ranks for each setting that was measured with several numbers of them."""
    parts = []
    timed = [line for line in succeeded(lines) if line["operation"] != "background save"]
    for setting, own in grouped(timed, ("target", "state", "layout")).items():
        ranks = sorted({line["ranks"] for line in own})
        if len(ranks) < 2:
            continue
        parts += [f"## Over the ranks: {setting[0]}; {setting[1]}, {setting[2]}", "", "GB/s of all ranks together.", ""]
        parts += [_row(("operation", "peer", *map(str, ranks))), _row(("---",) * 2 + ("---:",) * len(ranks))]
        for names, same in grouped(own, ("operation", "peer")).items():
            rates = (median_of([line for line in same if line["ranks"] == one], "gb_per_second") for one in ranks)
            parts.append(_row((*names, *(_number(rate, ".3f") for rate in rates))))
        parts.append("")
    return parts


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
