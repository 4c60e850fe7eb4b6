r"""The names of folders and files below a job's checkpoints folder. Pure.

::

    <root>/latest_checkpoint.txt              the pointer: "iter_000000005\n"
    <root>/iter_000000005/commit.json         the commit record, written last
    <root>/iter_000000005/<component>/        a DCP checkpoint of its own
"""

import re

from dcp_fsspec.errors import ConfigurationError

POINTER_NAME = "latest_checkpoint.txt"
COMMIT_NAME = "commit.json"
CHECKPOINTS_FOLDER = "checkpoints"

MODEL = "model"
OPTIM = "optim"
SCHEDULER = "scheduler"
TRAINER = "trainer"
STANDARD_COMPONENTS = (MODEL, OPTIM, SCHEDULER, TRAINER)
"""In the order in which they are written."""

_ITERATION = re.compile(r"iter_(\d{9}|[1-9]\d{9,17})")
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
