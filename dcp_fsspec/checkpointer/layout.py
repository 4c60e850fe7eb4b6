r"""The names of folders and files below a job's checkpoints folder, and what they tell. Pure.

::

    <root>/latest_checkpoint.txt              the pointer: "iter_000000005\n"
    <root>/iter_000000005/commit.json         the commit record, written last
    <root>/iter_000000005/<component>/        a DCP checkpoint of its own
"""

import re
from collections.abc import Iterable

from dcp_fsspec.errors import ConfigurationError
from dcp_fsspec.storage import checksums, names

POINTER_NAME = "latest_checkpoint.txt"
COMMIT_NAME = "commit.json"
CHECKPOINTS_FOLDER = "checkpoints"

MODEL = "model"
OPTIM = "optim"
SCHEDULER = "scheduler"
TRAINER = "trainer"
STANDARD_COMPONENTS = (MODEL, OPTIM, SCHEDULER, TRAINER)
"""In the order in which they are written."""

_ITERATION = re.compile(r"iter_(\d{9}|[1-9]\d{9,17})", re.ASCII)
_FOREIGN_FOLDER = re.compile(r"step-(\d{1,18})", re.ASCII)
_TEMPORARY_POINTER = re.compile(re.escape(POINTER_NAME) + r"\.tmp-[0-9a-f]{8}")
_OWN_SHARD = re.compile(r"__\d+_\d+_[0-9a-f]{8}\.distcp")
_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")


def folder_of(iteration: int) -> str:
    """Return the name of the folder of `iteration`: zero-padded to nine digits, wider from 1e9 on.

    Raises:
        ConfigurationError: not a count.
    """
    if type(iteration) is not int or iteration < 0 or iteration >= 10**18:
        raise ConfigurationError(f"an iteration is an int from 0 on, got {iteration!r}")
    return f"iter_{iteration:09d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration whose folder is called `name`, or None for every foreign name."""
    match = _ITERATION.fullmatch(name)
    return int(match[1]) if match else None


def iteration_told_by(name: str) -> int | None:
    """Return the iteration that the name of a folder tells, also one of torchtitan's ``step-500``."""
    foreign = _FOREIGN_FOLDER.fullmatch(name)
    return int(foreign[1]) if foreign else iteration_of(name)


def is_temporary_pointer(name: str) -> bool:
    """Tell whether a file is a pointer that was being written, and never got its name if its process has died."""
    return _TEMPORARY_POINTER.fullmatch(name) is not None


def is_of_save(name: str, save_id: str) -> bool:
    """Tell whether a shard file or checksums file of a component was written by the save `save_id`."""
    return name.rpartition(".")[0].endswith(checksums.name_suffix(save_id))


def missing_marks(files: Iterable[str], *, all_standard: bool) -> list[str]:
    """Return what an iteration's folder without a commit record lacks to be a complete one of other software.

    What the checkpointer of this package writes bears the save's id in its names, and is complete only with a record.

    Args:
        files: Names below the folder.
        all_standard: It needs all of the standard components; otherwise one is enough, or one flat DCP checkpoint.
    """
    files = list(files)
    # Other folders, such as one of pickles of the data loader, are no components.
    marked = {name.rpartition("/")[0]: True for name in files if name.rpartition("/")[2] == names.FILE_NAME}
    for name in files:
        component, _, below = name.rpartition("/")
        if _OWN_SHARD.fullmatch(below):
            return ["it was written by this package, which completes an iteration by that file"]
        # A component may be called like a folder that spreads keys.
        if below.endswith(names.SHARD_SUFFIX) and component not in marked:
            marked.setdefault(names.unspread(component), False)
    if marked.get("") and not all_standard:
        return []
    wanted = [name for name in STANDARD_COMPONENTS if all_standard and name not in marked]
    wanted += [name for name, complete in marked.items() if not complete]
    missing = [f"{name}/{names.FILE_NAME} is missing".removeprefix("/") for name in wanted]
    return missing if missing or marked else ["there is no component in it"]


def pointer_text(iteration: int) -> bytes:
    """Return the content of the pointer file that names `iteration`."""
    return f"{folder_of(iteration)}\n".encode()


def check_component(name: str) -> str:
    """Return `name` if a component's folder can be called so.

    Raises:
        ConfigurationError: it cannot, or the name is taken.
    """
    if not _COMPONENT.fullmatch(name) or name in (COMMIT_NAME, POINTER_NAME) or name in STANDARD_COMPONENTS:
        raise ConfigurationError(
            f"{name!r} cannot name a component: use letters, digits, '_', '-' and '.', and none of "
            f"{', '.join(STANDARD_COMPONENTS)}"
        )
    return name
