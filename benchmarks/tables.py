"""Samples to tables: medians, spread, and how each peer stands to the stock one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.peers import ALL_PEERS
from benchmarks.runner import Sample

_STOCK = {peer.name for peer in ALL_PEERS if peer.is_stock}
_COLUMNS = (
    "operation",
    "peer",
    "wall s (min-max)",
    "MB/s",
    "speed / stock",
    "CPU s/GB",
    "CPU / stock",
    "peak MiB",
    "moved / needed",
    "requests",
)
# Below this a rate would say nothing.
_MEGABYTE = 1_000_000


def markdown(samples: Iterable[Sample]) -> str:
    """Return one table per scenario. MB and GB are decimal, MiB binary; ratios are taken round by round."""
    groups: dict[str, dict[tuple[str, str], list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.scenario, {}).setdefault((sample.operation, sample.peer), []).append(sample)
    return "\n".join(_table(scenario, rows) for scenario, rows in groups.items())


def _table(scenario: str, rows: dict[tuple[str, str], list[Sample]]) -> str:
    lines = [f"## {scenario}", "", _row(_COLUMNS), _row(("---",) * 2 + ("---:",) * (len(_COLUMNS) - 2))]
    order = list(dict.fromkeys(operation for operation, _ in rows))
    for (operation, peer), own in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        stock = next((rows[o, p] for o, p in rows if o == operation and p in _STOCK), [])
        lines.append(_row((operation, peer, *_cells(own, stock))))
    return "\n".join([*lines, ""])


def _cells(own: list[Sample], stock: list[Sample]) -> tuple[str, ...]:
    errors = [sample.error for sample in own if sample.error]
    timed = [sample for sample in own if sample.timed and not sample.error]
    if not timed:
        return (f"failed: {errors[0]}" if errors else "not measured", *[""] * (len(_COLUMNS) - 3))
    walls = [sample.wall_seconds for sample in timed]
    wall = statistics.median(walls)
    spread = f"{wall:.2f} ({min(walls):.2f}-{max(walls):.2f})" if len(walls) > 1 else f"{wall:.2f}"
    cpu = statistics.median(sample.cpu_seconds for sample in timed)
    needed_bytes = timed[0].needed_bytes
    speed = _ratio([(s.wall_seconds, o.wall_seconds) for o, s in _pairs(timed, stock)])
    work = _ratio([(o.cpu_seconds, s.cpu_seconds) for o, s in _pairs(timed, stock)])
    return (
        spread + (f" [{len(errors)} failed]" if errors else ""),
        f"{needed_bytes / 1e6 / wall:.0f}" if needed_bytes >= _MEGABYTE else "-",
        speed,
        f"{cpu / (needed_bytes / 1e9):.2f}" if needed_bytes >= _MEGABYTE else f"{cpu * 1e3:.0f} ms in all",
        work,
        f"{max(sample.peak_bytes for sample in timed) / 2**20:.0f}",
        _moved(own, needed_bytes),
        _requests(own),
    )


def _pairs(own: list[Sample], stock: list[Sample]) -> list[tuple[Sample, Sample]]:
    """Return each run with the stock peer's run of the same round, or of the first where it ran no more."""
    by_round = {s.repetition: s for s in stock if s.timed and not s.error}
    if not by_round:
        return []
    first = by_round[min(by_round)]
    return [(sample, by_round.get(sample.repetition, first)) for sample in own]


def _ratio(pairs: list[tuple[float, float]]) -> str:
    """Return the median of the quotients."""
    quotients = [above / below for above, below in pairs if below > 0]
    return f"{statistics.median(quotients):.2f}" if quotients else "-"


def _moved(own: list[Sample], needed_bytes: int) -> str:
    moved = [sample.moved_bytes for sample in own if sample.moved_bytes is not None and not sample.error]
    return f"{statistics.median(moved) / needed_bytes:.3f}" if moved else "-"


def _requests(own: list[Sample]) -> str:
    """Return the counts of the last counted run, those of one verb together."""
    counted = [sample for sample in own if sample.requests is not None and not sample.error]
    if not counted or counted[-1].requests is None:
        return "-"
    counts = sorted(counted[-1].requests.items(), key=lambda item: -item[1])
    return " ".join(f"{number} {verb}" for verb, number in counts)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
