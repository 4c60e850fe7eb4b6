"""A short, repeatable run of the fuzzer; `nox -s fuzz` makes a long one."""

from __future__ import annotations

import os
import subprocess
import sys

NUM_EXECUTIONS = os.environ.get("DCP_FSSPEC_FUZZ_EXECUTIONS", "200")


def test_damaged_and_hostile_checkpoints_raise_errors_of_the_package_and_do_nothing_else() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.fuzzer", "--executions", NUM_EXECUTIONS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
