"""The command ``dcp-fsspec``. It needs the extra `cli`, and imports it only when it is run.

``app`` is the group of commands and turns errors into exit codes, ``options`` what the commands share, ``output``
tables, JSON and progress bars; ``listing``, ``looking``, ``moving``, ``keeping`` and ``trying`` are the commands.
"""

import importlib
import sys

_LIBRARIES = ("click", "rich")


def main() -> None:
    """Run the command line and exit."""
    try:
        for library in _LIBRARIES:
            importlib.import_module(library)
        from dcp_fsspec.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _LIBRARIES:
            raise
        print(
            f"dcp-fsspec: the command line needs {' and '.join(_LIBRARIES)}, and {missing} is not installed: "
            'pip install "dcp-fsspec[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("dcp-fsspec: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
