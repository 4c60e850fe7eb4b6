"""Plots of measured operations, as PNG files."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report import Line, grouped, succeeded

_SIZE = (5.2, 3.8)
_OPERATIONS = ("save", "load", "partial load", "resharded load")


def plot_all(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Make all plots that the figures allow, and return the files."""
    lines = succeeded(lines)
    foreground = [line for line in lines if line["operation"] in _OPERATIONS]
    many = [line for line in foreground if str(line["state"]).startswith("small:")]
    return [
        *_over(foreground, ("target", "state", "layout"), "ranks", folder, "ranks"),
        *_over(foreground, ("target", "layout", "ranks"), "size", folder, "MiB of state"),
        *_over(many, ("target", "layout", "ranks"), "num_tensors", folder, "tensors of 1 KiB", y="seconds"),
        *_memory(lines, folder),
    ]


def _over(
    lines: Sequence[Line], same: Sequence[str], x: str, folder: Path, label: str, *, y: str = "gb_per_second"
) -> list[Path]:
    """Plot `y` over `x` for each setting of the fields `same` in which `x` varies: a panel for each operation."""
    if x == "size":
        sized = [line for line in lines if not str(line["state"]).startswith("small:")]
        whole = {line["run"]: line["state_bytes"] for line in sized if line["operation"] == "save"}
        lines = [{**line, "size": whole[line["run"]] / 2**20} for line in sized if line["run"] in whole]
    pictures = []
    for setting, own in grouped(lines, same).items():
        if len({line[x] for line in own}) < 2:
            continue
        operations = [one for one in _OPERATIONS if any(line["operation"] == one for line in own)]
        figure, panels = plt.subplots(
            1, len(operations), figsize=(_SIZE[0] * len(operations), _SIZE[1]), squeeze=False, sharey=True
        )
        for operation, panel in zip(operations, panels[0], strict=True):
            _curves(panel, [line for line in own if line["operation"] == operation], x, y)
            panel.set(title=operation, xlabel=label)
            panel.set_xscale("log", base=10 if x == "num_tensors" else 2)
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel("seconds" if y == "seconds" else "GB/s, all ranks together")
        panels[0][0].set_ylim(bottom=0)
        panels[0][-1].legend(fontsize="small")
        pictures.append(_saved(figure, folder, f"over-{x}", ", ".join(map(str, setting))))
    return pictures


def _curves(panel: Axes, lines: Sequence[Line], x: str, y: str) -> None:
    for (peer,), own in grouped(lines, ("peer",)).items():
        at = sorted({line[x] for line in own})
        points = [[line for line in own if line[x] == one] for one in at]
        medians = [statistics.median(line[y] for line in point) for point in points]
        low, high = ([pick(line[y] for line in point) for point in points] for pick in (min, max))
        (curve,) = panel.plot(at, medians, marker="o", label=peer)
        panel.fill_between(at, low, high, alpha=0.15, color=curve.get_color())
        panel.set_xticks(at, [f"{one:g}" for one in at])
        panel.minorticks_off()


def _memory(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Plot the memory of the first rank in the last round of the largest state."""
    with_memory = [line for line in lines if line["memory"] and line["operation"] in ("save", "load")]
    if not with_memory:
        return []
    largest = max(with_memory, key=lambda line: (line["state_bytes"], -line["ranks"]))
    own = [line for line in with_memory if line["run"] == largest["run"]]
    figure, panels = plt.subplots(1, 2, figsize=(_SIZE[0] * 2, _SIZE[1]), squeeze=False, sharey=True)
    for operation, panel in zip(("save", "load"), panels[0], strict=True):
        for (peer,), same in grouped([line for line in own if line["operation"] == operation], ("peer",)).items():
            seconds, resident = zip(*same[-1]["memory"], strict=True)
            panel.plot(seconds, [one / 2**20 for one in resident], label=peer)
        panel.set(title=operation, xlabel="seconds")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("MiB on top of the state, rank 0")
    panels[0][-1].legend(fontsize="small")
    about = f"{largest['target']}, {largest['state_bytes'] / 2**20:.0f} MiB, {largest['layout']}"
    return [_saved(figure, folder, "memory", f"{about}, {largest['ranks']} ranks")]


def _saved(figure: Any, folder: Path, name: str, about: str) -> Path:
    figure.suptitle(about, fontsize="small")
    figure.tight_layout()
    path = folder / f"{name}-{re.sub(r'[^A-Za-z0-9]+', '-', about).strip('-').lower()}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
