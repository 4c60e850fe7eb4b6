"""What every thread did, from the traces of the ranks: a picture, and one file of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

Document = dict[str, Any]
_MAX_PICTURES = 8
_OUTER = ("write", "read", "commit")
"""Spans that only hold others."""


def joined(documents: Sequence[Document]) -> Document:
    """Return one document of all: a process for each rank, and in it a row for each thread of each operation."""
    events: list[dict[str, Any]] = []
    for number, document in enumerate(documents):
        about = document["otherData"]
        for event in document["traceEvents"]:
            event = {**event, "tid": event["tid"] + number * 1_000_000}
            if event["name"] == "thread_name":
                event["args"] = {"name": f"{about['operation']}: {event['args']['name']}"}
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def plot_threads(documents: Sequence[Document], folder: Path) -> list[Path]:
    """Draw each operation, its ranks below one another; of many operations the last ones."""
    pictures = []
    for number, own in enumerate(list(_operations(documents))[-_MAX_PICTURES:]):
        path = folder / f"threads-{number}-{own[0]['otherData']['operation']}.png"
        _draw(own, path)
        pictures.append(path)
    return pictures


def _operations(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Put together the ranks of one operation: files of one url that follow each other, until a rank comes again."""
    together: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        about = document["otherData"]
        key = (about["operation"], about["url"])
        if any(one["otherData"]["rank"] == about["rank"] for one in together.get(key, ())):
            yield together.pop(key)
        together.setdefault(key, []).append(document)
    yield from together.values()


def _draw(documents: Sequence[Document], path: Path) -> None:
    documents = sorted(documents, key=lambda one: int(one["otherData"]["rank"]))
    spans = [(document, event) for document in documents for event in document["traceEvents"] if event["ph"] == "X"]
    begin = min(event["ts"] for _, event in spans)
    names = list(dict.fromkeys(event["name"] for _, event in spans if event["name"] not in _OUTER))
    colors = {name: plt.get_cmap("tab20")(number % 20) for number, name in enumerate(names)}
    labels: list[str] = []
    figure, panel = plt.subplots(figsize=(11, 1.2 + 0.16 * _num_rows(documents)))
    for document in documents:
        rows = {
            event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"
        }
        for row, thread in rows.items():
            own = [event for event in document["traceEvents"] if event["ph"] == "X" and event["tid"] == row]
            # The outer ones first, so that what lies within is drawn over them.
            own.sort(key=lambda event: -event["dur"])
            shown = [event for event in own if event["name"] in colors]
            stretches = [((event["ts"] - begin) / 1e6, event["dur"] / 1e6) for event in shown]
            panel.broken_barh(stretches, (len(labels), 0.85), facecolors=[colors[event["name"]] for event in shown])
            labels.append(f"{document['otherData']['rank']}: {thread}")
    panel.set_yticks([number + 0.4 for number in range(len(labels))], labels, fontsize=6)
    panel.invert_yaxis()
    panel.set_xlabel("seconds")
    panel.legend(
        handles=[Patch(color=colors[name], label=name) for name in names], fontsize=7, ncols=6, loc="lower left",
        bbox_to_anchor=(0, 1.0),
    )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _num_rows(documents: Sequence[Document]) -> int:
    return sum(event["name"] == "thread_name" for document in documents for event in document["traceEvents"])
