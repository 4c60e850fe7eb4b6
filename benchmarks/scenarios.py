"""The scenarios: which jobs run, where, through which link, in which order.

In each round every peer runs the same operation before the next operation begins, so that what disturbs the
machine disturbs all of them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.link import LinkProcess
from benchmarks.peers import Peer, Site
from benchmarks.places import through
from benchmarks.runner import Runner, Sample
from benchmarks.worker import Job

_SMALL_TENSORS = 3
_SMALL_TENSOR_BYTES = 4096
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        tensor_bytes: size of each tensor.
        num_tensors: tensors in the state.
        num_partial: tensors that a partial load takes.
        num_rounds: how often each operation is measured.
        patience_seconds: a peer with an operation that took longer runs no further round.
        latency_seconds: of the slow link, one round trip.
        rate_bytes_per_second: of the slow link, each direction of each connection.
        total_bytes_per_second: of the slow link, all connections; None for no limit.
        single_bytes: size of the one tensor of scenario "single".
        local_dir: where the local disk is measured.
        s3_peers: who runs against S3.
        local_peers: who runs on local paths.
    """

    tensor_bytes: int
    num_tensors: int
    num_partial: int
    num_rounds: int
    patience_seconds: float
    latency_seconds: float
    rate_bytes_per_second: float
    total_bytes_per_second: float | None
    single_bytes: int
    local_dir: Path
    s3_peers: tuple[Peer, ...]
    local_peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Step:
    """One operation of a round: its name in the table, what it is for the worker, how many ranks run it."""

    label: str
    operation: str
    num_ranks: int = 1


_PLAIN = (Step("save", "save"), Step("load", "load"), Step("partial load", "partial"))
_WHOLE = (Step("save", "save"), Step("load", "load"))
_RESHARD = (
    Step("save, 2 ranks", "save", 2),
    Step("load, 1 rank", "load", 1),
    Step("load, 4 ranks", "load", 4),
)


@dataclass
class Bench:
    """Runs scenarios and keeps their samples.

    Attributes:
        settings: what the user chose.
        runner: starts the processes.
        open_server: gives a fresh S3 site for the length of a `with`.
        samples: filled by the scenarios.
    """

    settings: Settings
    runner: Runner
    open_server: Callable[[], contextlib.AbstractContextManager[Site]]
    samples: list[Sample] = field(default_factory=list)

    def run(self, scenario: str) -> None:
        """Run one scenario of `SCENARIOS`."""
        SCENARIOS[scenario](self)

    def rounds(
        self,
        scenario: str,
        base: Site,
        peers: tuple[Peer, ...],
        steps: tuple[Step, ...],
        num_rounds: int,
        *,
        state: tuple[int, int] | None = None,
        link: LinkProcess | None = None,
        timed: bool = True,
    ) -> None:
        """Measure `steps` of `peers` in `num_rounds` rounds.

        Args:
            scenario: for the samples.
            base: everything goes below it and is removed after each round.
            peers: who runs.
            steps: what runs, the save first.
            num_rounds: how often.
            state: number of tensors and bytes of each; that of the settings if None.
            link: what the traffic goes through.
            timed: whether the times of these runs count.
        """
        num_tensors, tensor_bytes = state or (self.settings.num_tensors, self.settings.tensor_bytes)
        given_up: set[str] = set()
        for round_number in range(num_rounds):
            site = base.child(f"{scenario}-{round_number}")
            for step in steps:
                # Whoever runs second finds what the first left to do: write-back, garbage in the server.
                for peer in peers if round_number % 2 == 0 else reversed(peers):
                    if peer.name in given_up:
                        continue
                    job = Job(
                        peer.name,
                        step.operation,
                        site.child(peer.name.replace("+", "-")),
                        num_tensors,
                        tensor_bytes,
                        seed=round_number,
                        num_partial=self.settings.num_partial,
                        num_ranks=step.num_ranks,
                    )
                    sample = Sample(scenario, step.label, peer.name, round_number, job.needed_bytes, timed=timed)
                    sample = self.runner.run(job, sample, link)
                    self.samples.append(sample)
                    _tell(sample)
                    if sample.error and step.operation == "save":
                        given_up.add(peer.name)
            given_up |= self._slow(scenario)
            self._remove(site)

    def _slow(self, scenario: str) -> set[str]:
        """Return the peers that lost our patience: what they did so far has to do."""
        patience = self.settings.patience_seconds
        return {s.peer for s in self.samples if s.scenario == scenario and s.wall_seconds > patience}

    def _remove(self, site: Site) -> None:
        if site.endpoint_url:
            self.runner.remove(site)
        else:
            shutil.rmtree(site.url, ignore_errors=True)


def _tell(sample: Sample) -> None:
    result = sample.error or f"{sample.wall_seconds:.2f} s, CPU {sample.cpu_seconds:.2f} s"
    counted = "" if sample.timed else " (counting only)"
    print(
        f"  {sample.scenario} #{sample.repetition} {sample.operation}: {sample.peer}: {result}{counted}",
        file=sys.stderr,
        flush=True,
    )


def _direct(bench: Bench) -> None:
    """Client and server side by side; one more round, through a link without limits, counts what moves."""
    settings = bench.settings
    with bench.open_server() as site:
        bench.rounds("direct", site, settings.s3_peers, _PLAIN, settings.num_rounds)
        with through(site) as (counted, link):
            bench.rounds("direct", counted, settings.s3_peers, _PLAIN, 1, link=link, timed=False)


def _slow_link(bench: Bench) -> None:
    settings = bench.settings
    limits = (settings.latency_seconds, settings.rate_bytes_per_second, settings.total_bytes_per_second)
    with bench.open_server() as site, through(site, *limits) as (slow, link):
        bench.rounds("link", slow, settings.s3_peers, _PLAIN, settings.num_rounds, link=link)


def _reshard(bench: Bench) -> None:
    """Saved by two ranks as `Shard(0)`; loaded by one and by four."""
    settings = bench.settings
    with bench.open_server() as site, through(site) as (counted, link):
        bench.rounds("reshard", counted, settings.s3_peers, _RESHARD, 1, link=link)


def _small(bench: Bench) -> None:
    """Three tensors of 4 KiB: what a save costs in requests."""
    state = (_SMALL_TENSORS, _SMALL_TENSOR_BYTES)
    with bench.open_server() as site, through(site) as (counted, link):
        bench.rounds("small", counted, bench.settings.s3_peers, _WHOLE, 1, state=state, link=link)


def _single(bench: Bench) -> None:
    """One large tensor through this project only: is memory bounded?"""
    ours = tuple(peer for peer in bench.settings.s3_peers if peer.is_ours)
    with bench.open_server() as site:
        bench.rounds("single", site, ours, _WHOLE, 1, state=(1, bench.settings.single_bytes))


def _local(bench: Bench) -> None:
    settings = bench.settings
    places = {"local disk": settings.local_dir, "local shm": _SHM}
    for scenario, parent in places.items():
        if not parent.is_dir():
            continue
        with tempfile.TemporaryDirectory(prefix="dcp-fsspec-bench-", dir=parent) as folder:
            bench.rounds(scenario, Site(folder), settings.local_peers, _PLAIN, settings.num_rounds)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "direct": _direct,
    "link": _slow_link,
    "reshard": _reshard,
    "local": _local,
    "small": _small,
    "single": _single,
}
