"""Run `benchmarks.throughput` with many settings, one after the other, and make the report.

    python -m benchmarks.campaign --out report                   # all, about half an hour on two cores
    python -m benchmarks.campaign --out report --short           # a look at everything, a few minutes
    python -m benchmarks.campaign --out report --only ranks,tensors

Parts:
    ranks     a sharded state, and unless short a replicated one, on 1, 2, 4 and 8 ranks (short: to 4), S3 server behind
              a link that limits each connection and all of them together
    sizes     states of several sizes on one rank, S3 server
    tensors   many small tensors on one rank, local disk and S3 server
    local     a sharded state on /dev/shm
    model     an encoder with its optimizer on two ranks: partial and resharded loads, saves in the background, traces
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report

_ROOT = Path(__file__).resolve().parent.parent
_OURS = "dcp_fsspec+s3fs,dcp_fsspec+obstore"


@dataclass(frozen=True)
class Job:
    """One start of torchrun.

    Attributes:
        num_ranks: Processes.
        arguments: For `benchmarks.throughput`.
        traced: Keep traces of it.
    """

    num_ranks: int
    arguments: tuple[str, ...]
    traced: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs of the chosen parts; return 1 if any failed."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for throughput.jsonl, traces and the report")
    parser.add_argument("--only", default=",".join(PARTS), help="parts (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="small states, one round")
    parser.add_argument("--repeat", type=int, help="rounds (default: 3, short 1)")
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    figures = options.out / "throughput.jsonl"
    figures.unlink(missing_ok=True)
    repeat = options.repeat or (1 if options.short else 3)
    jobs = [job for part in options.only.split(",") for job in PARTS[part](options.short)]
    common = ("--repeat", str(repeat), "--json", str(figures))
    traces = ("--trace", str(options.out / "traces"))
    failed = False
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.num_ranks} ranks: {' '.join(job.arguments)}", file=sys.stderr, flush=True)
        failed |= _run(job, (*common, *(traces if job.traced else ()))) != 0
    report.main([str(figures), "--out", str(options.out), *(traces if (options.out / "traces").is_dir() else ())])
    return int(failed)


def _run(job: Job, common: Sequence[str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.num_ranks)]
    command += ["-m", "benchmarks.throughput", *job.arguments, *common]
    # As torchrun does for several ranks.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(_ROOT)}
    began = time.monotonic()
    status = subprocess.run(command, env=environment, cwd=_ROOT).returncode
    print(f"    {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return status


def _ranks(short: bool) -> Iterator[Job]:
    # So slow a connection that one rank does not reach the total, and that one machine can run the ranks.
    link = ("--server", "--link", "--rate-mb", "0.5", "--total-mb", "40", "--peers", "dcp_fsspec+s3fs")
    # Enough for all connections of all ranks: files have four MiB or more. With ddp each rank holds all of it.
    states = {"fsdp": "256"} if short else {"ddp": "1024", "fsdp": "2048"}
    for layout, mib in states.items():
        for num_ranks in (1, 2, 4) if short else (1, 2, 4, 8):
            yield Job(num_ranks, ("--state", mib, "--layout", layout, *link))


def _sizes(short: bool) -> Iterator[Job]:
    for mib in (16, 64) if short else (32, 128, 512, 1024):
        yield Job(1, ("--state", str(mib), "--server", "--operations", "save,load"))


def _tensors(short: bool) -> Iterator[Job]:
    for number in (1_000, 10_000) if short else (1_000, 10_000, 100_000):
        state = ("--state", f"small:{number}", "--layout", "ddp")
        yield Job(1, (*state, "--url", tempfile.gettempdir()))
        yield Job(1, (*state, "--server", "--peers", _OURS))


def _local(short: bool) -> Iterator[Job]:
    yield Job(
        2, ("--state", "64" if short else "512", "--url", "/dev/shm", "--operations", "save,load,partial,reshard")
    )


def _model(short: bool) -> Iterator[Job]:
    operations = "save,load,partial,reshard,background"
    link = ("--server", "--link", "--peers", f"s3torchconnector,{_OURS}", "--operations", operations)
    fraction = ("--fraction", "0.25") if short else ()
    yield Job(2, ("--state", "minilm-22m", "--optimizer", *fraction, *link), traced=True)


PARTS = {"ranks": _ranks, "sizes": _sizes, "tensors": _tensors, "local": _local, "model": _model}


if __name__ == "__main__":
    sys.exit(main())
