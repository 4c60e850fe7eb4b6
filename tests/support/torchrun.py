"""Scripts run by torchrun, as users run theirs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Finished:
    """A torchrun that ended.

    Attributes:
        returncode: 0 if all ranks ended well; None if it was killed at the deadline.
        output: stdout and stderr of all ranks.
    """

    returncode: int | None
    output: str


def torchrun(
    script: Path | str,
    *arguments: str,
    num_ranks: int,
    environment: dict[str, str] | None = None,
    deadline_seconds: float = 150.0,
) -> Finished:
    """Run a script on `num_ranks` gloo ranks, on a port that the system chooses.

    Args:
        script: a path, or the source of the script itself.
        arguments: for the script.
        num_ranks: number of processes, all on this machine.
        environment: additions to ours.
        deadline_seconds: after which torchrun and all ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="torchrun-") as folder:
        path = script if isinstance(script, Path) else Path(folder, "script.py")
        if isinstance(script, str):
            path.write_text(script, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *_single_node(num_ranks),
            str(path),
            *arguments,
        ]
        log_path = Path(folder, "log")
        with open(log_path, "wb") as log:
            process = subprocess.Popen(
                command,
                env=_environment(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            returncode = _wait(process, deadline_seconds)
        return Finished(returncode, log_path.read_text(encoding="utf-8", errors="replace"))


def _single_node(num_ranks: int) -> list[str]:
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return ["--nnodes=1", f"--nproc-per-node={num_ranks}", *rendezvous]


def _environment(additions: dict[str, str]) -> dict[str, str]:
    python_path = os.pathsep.join(path for path in sys.path if path)
    return {
        **os.environ,
        "PYTHONPATH": python_path,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **additions,
    }


def _wait(process: subprocess.Popen[bytes], deadline_seconds: float) -> int | None:
    try:
        return process.wait(deadline_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            _kill_tree(process)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    # torchrun puts each rank in a session of its own, so that no process group holds them all.
    launcher = psutil.Process(process.pid)
    doomed = [launcher, *launcher.children(recursive=True)]
    for each in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(doomed)
