"""The group of commands, and what each kind of error exits with."""

import importlib
import logging
import os
import sys
import warnings
from typing import Any

import click

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    IncompatibleStateError,
    StorageReadError,
    StorageWriteError,
    UncommittedCheckpointError,
    UnsafeCheckpointError,
)
from dcp_fsspec.version import __version__

_USAGE, _NOT_FOUND, _STORAGE, _BROKEN, _INTERNAL, _INTERRUPTED = 2, 3, 4, 5, 70, 130
_CODES: dict[type[DcpFsspecError], int] = {
    ConfigurationError: _USAGE,
    CheckpointExistsError: _USAGE,
    IncompatibleStateError: _USAGE,
    CheckpointNotFoundError: _NOT_FOUND,
    StorageReadError: _STORAGE,
    StorageWriteError: _STORAGE,
    UncommittedCheckpointError: _BROKEN,
    CorruptCheckpointError: _BROKEN,
    UnsafeCheckpointError: _BROKEN,
}
_DEBUG = "DCP_FSSPEC_DEBUG"

_HELP = """Look at, check, copy and keep PyTorch distributed checkpoints on any storage that fsspec can reach.

A url is whatever fsspec takes: s3://bucket/run, gs://..., a local path. CKPT is one DCP checkpoint (the folder with
.metadata), an iteration (iter_000000100) or a folder of iterations, of which the latest is meant.

Storage options come from --option, from the environment (FSSPEC_S3_KEY, AWS_PROFILE, ...) or from fsspec's own
configuration files.

Exit codes: 0 all is well; 1 verify or diff found something; 2 wrong usage; 3 nothing there; 4 the store failed or
refused; 5 the checkpoint is incomplete, damaged or not safe to open; 130 interrupted.
"""


_MODULES = {
    "ls": "listing",
    "show": "looking",
    "verify": "looking",
    "diff": "looking",
    "cp": "moving",
    "export": "moving",
    "import": "moving",
    "latest": "keeping",
    "prune": "keeping",
    "sweep": "keeping",
    "bench": "trying",
}
"""Where each command is. Some need torch, which takes seconds to import, so each is imported when it is wanted."""


class _Group(click.Group):
    """Ends each command that fails with one line and a code that scripts can trust."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"dcp_fsspec.cli.{_MODULES[cmd_name]}")
        found: click.Command = next(one for one in module.COMMANDS if one.name == cmd_name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DcpFsspecError as error:
            code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), _INTERNAL)
            _end(ctx, str(error), code)
        except KeyboardInterrupt:
            _end(ctx, "interrupted; nothing half-done counts, and what was begun can be run again", _INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get(_DEBUG):
                raise
            text = f"unexpected {type(error).__name__}: {error} (set {_DEBUG}=1 to see where)"
            _end(ctx, text, _INTERNAL)


def _end(ctx: click.Context, text: str, code: int) -> None:
    click.echo(f"{ctx.info_name or 'dcp-fsspec'}: {' '.join(text.split())}", err=True)
    ctx.exit(code)


@click.group(cls=_Group, help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dcp-fsspec")
@click.option("-v", "--verbose", is_flag=True, help="Say what is being done.")
def cli(verbose: bool) -> None:
    """See `_HELP`."""
    logging.getLogger("dcp_fsspec").setLevel(logging.INFO if verbose else logging.WARNING)


def run() -> None:
    """Run the command line of this process and exit."""
    logging.basicConfig(format="dcp-fsspec: %(message)s", stream=sys.stderr)
    warnings.simplefilter("ignore")  # Torch's, about itself.
    cli(prog_name="dcp-fsspec")
