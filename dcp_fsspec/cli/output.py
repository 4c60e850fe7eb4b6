"""What the user sees: tables or JSON on standard output, progress bars on standard error of a terminal."""

import contextlib
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from dcp_fsspec.storage.bars import told
from dcp_fsspec.storage.progress import ProgressCallback

_NO_WIDTH = 10_000


def plain(value: Any) -> Any:
    """Return `value` in the form that JSON takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document."""
    click.echo(json.dumps(plain(document), indent=2, ensure_ascii=False))


def show(*what: RenderableType) -> None:
    """Print tables, trees and lines."""
    # What is no terminal has no width, and scripts want one line for each thing.
    width = None if sys.stdout.isatty() else _NO_WIDTH
    console = Console(file=sys.stdout, highlight=False, width=width)
    for one in what:
        console.print(one, markup=False)


def note(text: str) -> None:
    """Print what is no result, on standard error."""
    click.echo(text, err=True)


def notes(texts: Iterable[str]) -> None:
    """Print what the user should know about how a checkpoint was found."""
    for text in texts:
        note(text)


class Table:
    """Rows of text in columns as wide as their longest entry. Rich's own tables take a millisecond for each row."""

    def __init__(self, columns: Sequence[str], right: Collection[str]) -> None:
        self._rows = [columns]
        self._right = [column in right for column in columns]

    def add_row(self, *entries: str) -> None:
        """Add a row, with an entry for each column."""
        self._rows.append(entries)

    def __rich__(self) -> Text:
        widths = [max(map(cell_len, column)) for column in zip(*self._rows, strict=True)]
        head, *others = (self._line(row, widths) for row in self._rows)
        return Text("\n").join([Text(head, style="bold"), *map(Text, others)])

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        entries = []
        for text, width, right in zip(row, widths, self._right, strict=True):
            space = " " * (width - cell_len(text))
            entries.append(f"{space}{text}" if right else f"{text}{space}")
        return "  ".join(entries).rstrip()


def table(*columns: str, right: Collection[str] = ()) -> Table:
    """Return an empty table; the columns `right` hold numbers."""
    return Table(columns, right)


def size(num_bytes: int) -> str:
    """Return bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def utc(seconds: float | None) -> str | None:
    """Return a time, seconds since 1970, in ISO 8601."""
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def age(seconds: float | None, now: float) -> str:
    """Return how long ago that was, for people."""
    if seconds is None:
        return "?"
    left = max(0.0, now - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if left >= length:
            return f"{left / length:.0f} {unit}"
    return f"{left:.0f} s"


def progress(*, as_json: bool) -> contextlib.AbstractContextManager[ProgressCallback | None]:
    """Give a callback that draws a bar; None where nobody would see it."""
    return told(not as_json)
