"""What lies below a folder, from one recursive listing: iterations and their components, of whatever software."""

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.errors import CheckpointNotFoundError
from dcp_fsspec.storage import names
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.object_listing import list_times

Kind = Literal["component", "iteration", "folder"]
Files = Mapping[str, tuple[int, float | None]]
"""Size in bytes and time of the last change by name."""

_STEP = re.compile(r"step-(\d+)")
"""How torchtitan calls the folder of an iteration."""

_PARTS = 3


@dataclass(frozen=True)
class ComponentEntry:
    """One DCP checkpoint.

    Attributes:
        name: Name of its folder in that of the iteration; empty if it is the same folder.
        num_files: Files in it.
        num_bytes: Bytes of them.
        complete: It has its ``.metadata``.
    """

    name: str
    num_files: int
    num_bytes: int
    complete: bool


@dataclass(frozen=True)
class IterationEntry:
    """One iteration, or a checkpoint of other software that stands in a folder of its own.

    Attributes:
        folder: Name of its folder; empty if it is the one that was listed.
        iteration: The training iteration, where the name says it.
        committed: A job would resume from it.
        has_record: It has a commit record, so this package committed it.
        latest: The pointer names it.
        components: Its components.
        num_files: Files in it.
        num_bytes: Bytes of them.
        modified: When it was committed, or last written to if it was not; seconds since 1970.
        last_write: When it was last written to.
    """

    folder: str
    iteration: int | None
    committed: bool
    has_record: bool
    latest: bool
    components: tuple[ComponentEntry, ...]
    num_files: int
    num_bytes: int
    modified: float | None
    last_write: float | None


@dataclass(frozen=True)
class Listing:
    """What lies below a folder.

    Attributes:
        url: The folder.
        kind: What it is itself: one DCP checkpoint, an iteration of several, or a folder of iterations.
        pointer: What the pointer says; None if there is none.
        iterations: In order of iteration, those without a number first.
    """

    url: str
    kind: Kind
    pointer: str | None
    iterations: tuple[IterationEntry, ...]


def kind_of(name: str, entries: Collection[str]) -> Kind:
    """Tell what a folder is from its `name` and the names of what lies directly in it."""
    if names.FILE_NAME in entries:
        return "component"
    if layout.COMMIT_NAME in entries or layout.iteration_of(name) is not None:
        return "iteration"
    return "iteration" if any(one in entries for one in layout.STANDARD_COMPONENTS) else "folder"


def number_of(folder: str) -> int | None:
    """Return the iteration that the name of a folder says."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match else layout.iteration_of(folder)


def list_checkpoints(store: Store) -> Listing:
    """List the checkpoints below a folder: the pointer and one recursive listing, no checkpoint is opened.

    A long listing takes up to two requests more, since ranges of it are asked for at a time. Whether a commit record
    can be read as one is not looked at.

    Raises:
        CheckpointNotFoundError: there is nothing.
        StorageReadError: the store did not answer.
    """
    pointer = Catalog.of(store).pointer()
    files = list_times(store, functools.partial(_thirds, pointer))
    if not files:
        raise CheckpointNotFoundError(f"there is nothing at {store.url}, or no such folder or bucket")
    below = f"{layout.CHECKPOINTS_FOLDER}/"
    if f"{below}{layout.POINTER_NAME}" in files and layout.POINTER_NAME not in files:
        store = store.child(layout.CHECKPOINTS_FOLDER)  # The folder of a job.
        files = {name.removeprefix(below): one for name, one in files.items() if name.startswith(below)}
        pointer = Catalog.of(store).pointer()
    kind = kind_of(store.url.rpartition("/")[2], {name.partition("/")[0] for name in files})
    if kind != "folder":
        name = store.url.rpartition("/")[2]
        found = [_iteration("", files, pointed=False, number=number_of(name), named=layout.iteration_of(name))]
        return Listing(store.url, kind, pointer, tuple(found))
    found = []
    for name, own in _by_folder(files).items():
        number, named = number_of(name), layout.iteration_of(name)
        entry = _iteration(name, own, pointed=name == pointer, number=number, named=named)
        if named is not None or any(one.complete for one in entry.components):
            found.append(entry)
    found.sort(key=lambda entry: (entry.iteration if entry.iteration is not None else -1, entry.folder))
    return Listing(store.url, kind, pointer, tuple(found))


def _thirds(pointer: str | None, first: str) -> list[str]:
    """Return names by which a long listing, of which the first name is known, falls into about equal parts."""
    begin, end = layout.iteration_of(first.partition("/")[0]), layout.iteration_of(pointer or "")
    if begin is None or end is None or end - begin < _PARTS:
        return []
    return [layout.folder_of(begin + (end - begin) * part // _PARTS) for part in range(1, _PARTS)]


def _by_folder(files: Files) -> dict[str, dict[str, tuple[int, float | None]]]:
    folders: dict[str, dict[str, tuple[int, float | None]]] = {}
    for name, one in files.items():
        folder, separator, rest = name.partition("/")
        if separator:
            folders.setdefault(folder, {})[rest] = one
    return folders


def _iteration(folder: str, files: Files, *, pointed: bool, number: int | None, named: int | None) -> IterationEntry:
    flat = names.FILE_NAME in files
    components = [_component("", files)] if flat else [_component(*one) for one in sorted(_by_folder(files).items())]
    has_record = layout.COMMIT_NAME in files
    complete = bool(components) and all(one.complete for one in components)
    standard = set(layout.STANDARD_COMPONENTS) <= {one.name for one in components}
    # The rule of the catalog for folders of other software; a folder with a name of its own is no affair of it.
    foreign = complete and (pointed or named is None or (standard and not flat))
    times = [time for _, time in files.values() if time is not None]
    marks = [files[name][1] for name in (layout.COMMIT_NAME, names.FILE_NAME) if name in files]
    return IterationEntry(
        folder,
        number,
        committed=has_record or foreign,
        has_record=has_record,
        latest=pointed,
        components=tuple(components),
        num_files=len(files),
        num_bytes=sum(size for size, _ in files.values()),
        modified=next((mark for mark in marks if mark is not None), max(times, default=None)),
        last_write=max(times, default=None),
    )


def _component(name: str, files: Files) -> ComponentEntry:
    return ComponentEntry(name, len(files), sum(size for size, _ in files.values()), names.FILE_NAME in files)
