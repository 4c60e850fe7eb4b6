"""Start the measured processes of a job, give them the word together, put their reports into one sample."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks import worker
from benchmarks.link import LinkCounters, LinkProcess
from benchmarks.measure import Usage
from benchmarks.peers import Site
from benchmarks.worker import Job, Outcome

_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Sample:
    """One measured run of one operation.

    Attributes:
        scenario: where it ran.
        operation: what ran, as the table names it.
        peer: whose code.
        repetition: number of the round.
        needed_bytes: what the operation had to move.
        wall_seconds: of the slowest rank.
        cpu_seconds: of all ranks together.
        peak_bytes: memory above the state, of the rank that took most.
        moved_bytes: payload bytes that crossed the link or the file system; None if nobody counted.
        requests: by verb; None if nobody counted.
        num_connections: opened in the link; None if nobody counted.
        link_cpu_seconds: what the link took from the same machine.
        timed: False for runs that were made to count only.
        error: last line of the failure, if it failed.
    """

    scenario: str
    operation: str
    peer: str
    repetition: int
    needed_bytes: int
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    moved_bytes: int | None = None
    requests: dict[str, int] | None = None
    num_connections: int | None = None
    link_cpu_seconds: float = 0.0
    timed: bool = True
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


class Runner:
    """Runs jobs, each rank in a fresh fork of a process that has done the imports."""

    def __init__(self) -> None:
        # As torchrun does; set before torch is imported.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks.preload"])

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Return the peers that cannot run here, with the reason."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=worker.probe, args=(list(names), theirs))
        process.start()
        theirs.close()
        reasons: dict[str, str | None] = ours.recv()
        process.join()
        return {name: reason for name, reason in reasons.items() if reason}

    def run(self, job: Job, sample: Sample, link: LinkProcess | None = None) -> Sample:
        """Run `job` and return `sample` with what it took.

        Args:
            job: what to run.
            sample: names the run.
            link: what the job's traffic goes through, if it shall be counted.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks = self._start(replace(job, rendezvous=str(Path(folder) / "rendezvous")))
            try:
                return _conduct(ranks, sample, job, link)
            finally:
                for process, _ in ranks:
                    process.join(10)
                    process.kill()

    def remove(self, site: Site) -> None:
        """Delete everything below an S3 site."""
        process = self._context.Process(target=worker.remove, args=(site,))
        process.start()
        process.join()

    def _start(self, job: Job) -> list[tuple[ForkServerProcess, Connection]]:
        ranks = []
        for rank in range(job.num_ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=worker.run, args=(job, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return ranks


def _conduct(
    ranks: list[tuple[ForkServerProcess, Connection]], sample: Sample, job: Job, link: LinkProcess | None
) -> Sample:
    for _, wire in ranks:
        first = _receive(wire)
        if isinstance(first, Outcome):
            return replace(sample, error=_last_line(first.error))
    before = link.snapshot() if link else LinkCounters()
    for _, wire in ranks:
        wire.send("go")
    outcomes = [_receive(wire) for _, wire in ranks]
    after = link.snapshot() if link else None
    for outcome in outcomes:
        if outcome.usage is None:
            return replace(sample, error=_last_line(outcome.error))
    sample = _with_usage(sample, [outcome.usage for outcome in outcomes])
    if after is not None:
        counted = after - before
        return replace(
            sample,
            moved_bytes=counted.up_bytes if job.operation == "save" else counted.down_bytes,
            requests=dict(counted.requests),
            num_connections=counted.num_connections,
            link_cpu_seconds=counted.cpu_seconds,
        )
    if not job.site.endpoint_url:
        name = "written_bytes" if job.operation == "save" else "read_bytes"
        return replace(sample, moved_bytes=sum(getattr(outcome.usage, name) for outcome in outcomes))
    return sample


def _with_usage(sample: Sample, usages: list[Usage]) -> Sample:
    return replace(
        sample,
        wall_seconds=max(usage.wall_seconds for usage in usages),
        cpu_seconds=sum(usage.cpu_seconds for usage in usages),
        peak_bytes=max(usage.peak_bytes for usage in usages),
    )


def _receive(wire: Connection) -> Any:
    if not wire.poll(_TIMEOUT_SECONDS):
        return Outcome(error=f"TimeoutError: no answer within {_TIMEOUT_SECONDS:.0f} s")
    try:
        return wire.recv()
    except EOFError:
        return Outcome(error="EOFError: the process died")


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "unknown"
