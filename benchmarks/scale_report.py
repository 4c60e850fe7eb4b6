"""Table and plot of what `benchmarks.simulator` has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

_COLUMNS: dict[str, Callable[[Line], str]] = {
    "ranks": lambda line: f"{line['ranks']:,}",
    "tensors": lambda line: f"{line['tensors']:,}",
    "items": lambda line: f"{line['items']:,}",
    "first save: plan s": lambda line: f"{planning_seconds(line['plan']):.1f}",
    "plans MB": lambda line: f"{line['plan']['bytes'] / 1e6:.1f}",
    "next save: plan s": lambda line: f"{planning_seconds(line['plan_again']):.2f}",
    "plans kB": lambda line: f"{line['plan_again']['bytes'] / 1e3:.0f}",
    "commit s": lambda line: f"{commit_seconds(line):.1f}",
    "`.metadata` MB": lambda line: f"{line['save']['metadata_bytes'] / 1e6:.1f}",
    "checksums MB": lambda line: f"{line['save']['checksums_bytes'] / 1e6:.1f}",
    "open s": lambda line: f"{line['load']['decode_seconds']:.1f}",
    "load: plan s": lambda line: f"{line['load']['plan_seconds_rank'] + line['load']['plan_seconds_coordinator']:.1f}",
    "peak MiB": lambda line: f"{peak_bytes(line) / 2**20:.0f}",
}


def planning_seconds(plan: Line) -> float:
    """Return how long a save waits for its plan."""
    return float(plan["rank_seconds"] + plan["coordinator_seconds"])


def commit_seconds(line: Line) -> float:
    """Return how long a save takes from the last shard file to the end, beside what the store takes."""
    save = line["save"]
    return float(save["receive_seconds"] + save["commit_seconds"] + save["answer_seconds"])


def peak_bytes(line: Line) -> int:
    """Return the memory that the coordinator needs."""
    parts = (line["plan"], line["save"], line["load"])
    return int(max(part.get("coordinator_memory_bytes", part.get("memory_bytes", 0)) for part in parts))


def table(lines: Sequence[Line]) -> str:
    """Return the figures as a table."""
    rows = ["| " + " | ".join(_COLUMNS) + " |", "|" + " ---: |" * len(_COLUMNS)]
    rows += ["| " + " | ".join(cell(line) for cell in _COLUMNS.values()) + " |" for line in _ordered(lines)]
    return "\n".join(rows) + "\n"


def write_report(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write the table and the plot; return the files."""
    page, picture = folder / "scale.md", folder / "scale.png"
    page.write_text(table(lines))
    plot(lines, picture)
    return [page, picture]


def plot(lines: Sequence[Line], path: Path) -> None:
    """Plot what grows with the ranks and with the tensors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    over = (("ranks", "tensors", "ranks"), ("tensors", "ranks", "tensors"))
    curves: dict[str, Callable[[Line], float]] = {
        "planning, first save": lambda line: planning_seconds(line["plan"]),
        "planning, next save": lambda line: planning_seconds(line["plan_again"]),
        "commit": commit_seconds,
        "opening, each rank": lambda line: float(line["load"]["decode_seconds"]),
    }
    for panel, (x, fixed, label) in zip(panels, over, strict=True):
        held = _most_common([line[fixed] for line in lines])
        own = sorted((line for line in lines if line[fixed] == held), key=lambda line: int(line[x]))
        for name, value in curves.items():
            panel.plot([line[x] for line in own], [value(line) for line in own], marker="o", label=name)
        panel.set(xscale="log", yscale="log", xlabel=label, title=f"{held:,} {fixed}")
        panel.set_xticks([line[x] for line in own], [f"{line[x]:,}" for line in own])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds")
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _most_common(values: Sequence[int]) -> int:
    return max(values, key=values.count)


def _ordered(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: (int(line["items"]), int(line["ranks"])))
