"""What the user sees: tables or JSON on standard output, progress bars on standard error of a terminal."""

import contextlib
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table

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


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


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
