"""Training jobs that start at once and can be killed at once: their ranks are forks of a process that has torch loaded.

`python -m support.forks` is that process; `Forks` talks to it. A job is a process group of its own, a leader and its
ranks, so one SIGKILL ends all of it in one moment, as a machine that loses its power does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

_POLL_SECONDS = 0.0005
_COLLECTIVE_SECONDS = 60


@dataclass
class RunningJob:
    """A job whose ranks run `train.train`.

    Attributes:
        leader: id of the process, and of the process group, that holds the ranks.
        ranks: process ids.
        output: file with what the ranks print.
    """

    leader: int
    ranks: list[int]
    output: Path
    _forks: Forks

    def kill(self, *, workers: bool = False) -> None:
        """Kill all ranks at once, and wait until they are gone.

        Args:
            workers: Also what they have started in sessions of their own. Otherwise these end what they have in hand,
                and are waited for as well.
        """
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # The job has ended by itself.
            below = psutil.Process(self.leader).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.leader, signal.SIGKILL)
        for one in below if workers else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._forks.reap()
        psutil.wait_procs([psutil.Process(pid) for pid in self.ranks if psutil.pid_exists(pid)])
        _, left = psutil.wait_procs(below, timeout=_COLLECTIVE_SECONDS)
        assert not left, f"still there: {left}"

    def wait(self, deadline_seconds: float = 90.0) -> list[int]:
        """Return the exit codes of the ranks; past the deadline they are killed."""
        return self._forks.reap(deadline_seconds)

    def wait_until(self, moment: Callable[[], bool], deadline_seconds: float = 60.0) -> bool:
        """Return True as soon as `moment` does, False if the job ended before.

        Raises:
            TimeoutError: neither came.
        """
        give_up_at = time.monotonic() + deadline_seconds
        while not moment():
            if self._forks.has_news():
                return moment()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the job did not come so far:\n{self.output.read_text(errors='replace')}")
            time.sleep(_POLL_SECONDS)
        return True


class Forks:
    """Starts jobs, one after the other."""

    def __enter__(self) -> Self:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",  # Threads do not survive a fork.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-m", "support.forks"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._number = 0
        self._answer()
        return self

    def __exit__(self, *exception_info: object) -> None:
        assert self._process.stdin is not None
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # The leader of a job that a failed test has left.
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def start(self, num_ranks: int, *arguments: str) -> RunningJob:
        """Start `train.train` with these arguments of its command line on `num_ranks` ranks."""
        self._number += 1
        scratch = Path(self._folder.name, str(self._number))
        scratch.mkdir()
        assert self._process.stdin is not None
        order = {"num_ranks": num_ranks, "arguments": arguments, "scratch": str(scratch)}
        self._process.stdin.write(json.dumps(order) + "\n")
        started = self._answer()
        return RunningJob(started["leader"], started["ranks"], scratch / "output", self)

    def has_news(self) -> bool:
        """Tell whether the job has ended."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def reap(self, deadline_seconds: float = 90.0) -> list[int]:
        """Return the exit codes of the job's ranks, once it has ended; none if its leader was killed."""
        give_up_at = time.monotonic() + deadline_seconds
        while not self.has_news() and time.monotonic() < give_up_at:
            time.sleep(_POLL_SECONDS)
        if not self.has_news():
            for child in psutil.Process(self._process.pid).children():
                os.killpg(child.pid, signal.SIGKILL)
        codes: list[int] = self._answer()["codes"]
        return codes

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError("the process that forks the ranks has died")
        return json.loads(line)


def _lead(order: dict[str, Any], news: int) -> None:
    """Fork the ranks, and wait for them. Runs in the leader of a job."""
    os.setsid()
    os.nice(10)  # Who watches for the moment to kill it comes first.
    output = os.open(f"{order['scratch']}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks = []
    for rank in range(order["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_run_rank(rank, order))
        ranks.append(pid)
    os.write(news, json.dumps(ranks).encode() + b"\n")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    os.write(news, json.dumps(codes).encode() + b"\n")


def _run_rank(rank: int, order: dict[str, Any]) -> int:
    import datetime
    import traceback

    import torch.distributed as dist

    import train

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order['scratch']}/rendezvous",
            rank=rank,
            world_size=order["num_ranks"],
            timeout=datetime.timedelta(seconds=_COLLECTIVE_SECONDS),
        )
        train.train(train.Settings.read(order["arguments"]))
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    """Take orders, one a line, and answer each with two lines: when its job has started, and when it has ended."""
    # Before any fork, once for all; the second is what `fully_shard` loads when it is first called.
    import torch
    import torch._dynamo

    import train  # noqa: F401

    torch.set_num_threads(1)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        news, tell = os.pipe()
        leader = os.fork()
        if leader == 0:
            os.close(news)
            _lead(json.loads(line), tell)
            os._exit(0)
        os.close(tell)
        with os.fdopen(news) as heard:
            ranks = json.loads(heard.readline())
            print(json.dumps({"leader": leader, "ranks": ranks}), flush=True)
            codes = heard.readline()
        os.waitpid(leader, 0)
        print(json.dumps({"codes": json.loads(codes or "[]")}), flush=True)


if __name__ == "__main__":
    main()
