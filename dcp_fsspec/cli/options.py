"""What the commands share: storage options, sizes, confirmation."""

import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.location import is_secret_name

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class Size(click.ParamType[int]):
    """A number of bytes: ``5GB``, ``256MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        match = _SIZE.fullmatch(str(value).strip())
        if isinstance(value, int):
            return value
        if not match:
            self.fail(f"{value!r} is no size: write 5GB or 256MiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class Duration(click.ParamType[float]):
    """A time: ``90s``, ``30m``, ``2h``, ``7d``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        match = _DURATION.fullmatch(str(value).strip())
        if not match:
            self.fail(f"{value!r} is no time: write 90s, 30m, 2h or 7d", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


def storage_options(texts: Iterable[str]) -> dict[str, Any]:
    """Return nested options from texts of the form ``a.b=value``.

    true, false, null and numbers are what they look like, unless the name is that of a secret; what follows ``:=`` is
    JSON.

    Raises:
        click.BadParameter: a text of another form.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip(":"):
            raise click.BadParameter(f"{name!r} has no value: write --option key=value")
        path = name.removesuffix(":").split(".")
        inner = options
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"{name} is given twice, once as a value and once as a group")
        inner[path[-1]] = _json(name, value) if name.endswith(":") else _value(path[-1], value)
    return options


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"what follows {name}= is no JSON") from error


def _value(name: str, value: str) -> Any:
    if is_secret_name(name):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    return json.loads(value) if _NUMBER.fullmatch(value) and not value.lstrip("-").startswith("0") else value


def common(function: F) -> F:
    """Add the options that every command has."""
    function = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)
    return click.option(
        "-o",
        "--option",
        "options_",
        multiple=True,
        metavar="KEY=VALUE",
        help="A storage option of fsspec, nested ones by dots: client_kwargs.endpoint_url=http://... Repeatable.",
    )(function)


def two_stores(function: F) -> F:
    """Add storage options of their own for a source and a target."""
    for name in ("target", "source"):
        function = click.option(
            f"--{name}-option",
            f"{name}_options",
            multiple=True,
            metavar="KEY=VALUE",
            help=f"A storage option for the {name} alone.",
        )(function)
    return function


def destructive(function: F) -> F:
    """Add the word without which nothing is destroyed."""
    return click.option("-y", "--yes", is_flag=True, help="Do it without asking.")(function)


def store(url: str, options: Iterable[str], own: Iterable[str] = ()) -> Store:
    """Return the store at `url`, reached by the options of the command line."""
    return Store(url, storage_options([*options, *own]))


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost; where nobody can answer, `yes` must have been said.

    Raises:
        click.UsageError: it was not.
        click.exceptions.Exit: the answer was no.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{question} Say --yes if so.")
    if not click.confirm(f"{question} Go on?", err=True):
        raise click.exceptions.Exit(0)
