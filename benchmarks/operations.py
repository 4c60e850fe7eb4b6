"""One operation, on all ranks together: what it took, what moved, who was late."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.layouts import local_bytes, local_of
from benchmarks.link import LinkCounters, LinkProcess
from benchmarks.measure import MemoryTimeline, Usage, measure
from benchmarks.peers import Peer, Site
from benchmarks.places import is_local
from benchmarks.ranks import Ranks
from benchmarks.training import Trainer

_TRACE = "DCP_FSSPEC_TRACE"
_MAX_POINTS = 400


@dataclass
class Sample:
    """One measured operation.

    Attributes:
        peer: Whose code.
        operation: "save", "load", "partial load", "resharded load", "background save".
        round: Number of the repetition.
        state_bytes: What the operation is about, each byte once: what had to cross at least.
        delivered_bytes: What the ranks hold of it together, replicas and all.
        seconds: From the first to the last rank.
        rank_seconds: What each rank took for its own share of the reading or writing.
        rank_gb_per_second: What each rank holds, by that time.
        cpu_seconds: Of all ranks together.
        peak_bytes: Memory on top of the state, of the rank that took most.
        moved_bytes: Payload that crossed the link, or went through read and write calls; None: nobody counted.
        requests: By verb; None: nobody counted.
        num_retries: Requests that were made again, as our own reports say.
        link_cpu_seconds: What the link took from the same machine; None: there is none.
        blocked_seconds: How long `save` of a save in the background kept the training, on the slowest rank.
        stage_seconds: How much of that was copying.
        copy_seconds: What one copy of the state to host memory that is there already takes at best.
        slowed_seconds: What the training lost while the upload was under way.
        timed: False for an operation that was made to count requests only.
        memory: Of rank 0: seconds, and bytes beyond what was resident at the beginning.
        error: Last line of the failure, if it failed.
    """

    peer: str
    operation: str
    round: int
    state_bytes: int
    delivered_bytes: int = 0
    seconds: float = 0.0
    rank_seconds: list[float] = field(default_factory=list)
    rank_gb_per_second: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    moved_bytes: int | None = None
    requests: dict[str, int] | None = None
    num_retries: int | None = None
    link_cpu_seconds: float | None = None
    blocked_seconds: float | None = None
    stage_seconds: float | None = None
    copy_seconds: float | None = None
    slowed_seconds: float | None = None
    timed: bool = True
    memory: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with the rates that everybody asks for."""
        gigabytes = self.state_bytes / 1e9
        slowest, fastest = max(self.rank_seconds, default=0.0), min(self.rank_seconds, default=0.0)
        return {
            **asdict(self),
            "gb_per_second": gigabytes / self.seconds if self.seconds else None,
            "cpu_seconds_per_gb": self.cpu_seconds / gigabytes if gigabytes else None,
            "moved_per_needed": self.moved_bytes / self.state_bytes if self.moved_bytes is not None else None,
            "skew": (slowest - fastest) / slowest if slowest else None,
        }


@dataclass(frozen=True)
class _OfRank:
    """What one rank tells of an operation."""

    usage: Usage | None
    own_seconds: float
    held_bytes: int
    num_retries: int | None
    error: str


class Operations:
    """Runs operations on all ranks and measures them. Every method is collective.

    Args:
        ranks: All of them.
        link: On rank 0, what the traffic goes through; None elsewhere, and where nothing counts.
        trace_folder: For traces of our own peers.
    """

    def __init__(self, ranks: Ranks, link: LinkProcess | None, trace_folder: str | None) -> None:
        self._ranks, self._link, self._trace_folder = ranks, link, trace_folder

    def save(self, peer: Peer, site: Site, state: dict[str, Any], sample: Sample) -> Sample:
        """Save by `peer`."""
        if self._ranks.rank == 0 and is_local(site):
            Path(site.url).mkdir(parents=True, exist_ok=True)  # Not all peers make it.
        writer = _Clocked(lambda: peer.writer(site), "write_data")
        return self._run(sample, state, writer, lambda: _discard(dcp.save(state, storage_writer=writer.made)), site)

    def load(self, peer: Peer, site: Site, state: dict[str, Any], sample: Sample) -> Sample:
        """Load by `peer` into `state`."""
        reader = _Clocked(lambda: peer.reader(site), "read_data")
        return self._run(sample, state, reader, lambda: dcp.load(state, storage_reader=reader.made), site)

    def _run(
        self, sample: Sample, state: Mapping[str, Any], clocked: _Clocked, call: Callable[[], None], site: Site
    ) -> Sample:
        usage, error, timeline = None, "", MemoryTimeline()
        _settle(self._ranks.device)
        dist.barrier()
        before = self._link.snapshot() if self._link else None
        dist.barrier()
        with _traced(self._trace_folder):
            try:
                usage = measure(lambda: _whole(call, self._ranks.device, timeline))
            except (Exception, CheckpointException) as failure:
                error = _last_line(failure)
        own = _OfRank(usage, clocked.seconds, local_bytes(state), clocked.num_retries, error)
        told = self._ranks.gather(own)
        if self._link is not None and before is not None:
            counted = self._link.snapshot() - before
            _count(sample, counted)
        elif is_local(site):
            _count_calls(sample, [one.usage for one in told])
        return _put_together(sample, told, timeline)

    def background(self, site: Site, mode: str, state: dict[str, Any], first: Sample, number: int) -> Iterator[Sample]:
        """Save in the background by `DistributedCheckpointer`, beside a stand-in for training, `number` times.

        One more save comes first: it makes the memory, and the process.
        """
        from dcp_fsspec import DistributedCheckpointer

        with tempfile.TemporaryDirectory(prefix="dcp-fsspec-bench-") as traces:
            checkpointer = DistributedCheckpointer(
                site.url,
                storage_options=site.s3fs_options(),
                async_mode=mode,  # type: ignore[arg-type]
                components={"state": _Holder(state)},
                writer_settings={"trace": traces},
            )
            device = self._ranks.device
            trainer = Trainer(device, 4096 if device.type == "cuda" else 384)
            copy_seconds = _copy_seconds(state)
            for iteration in range(number + 1):
                sample = Sample(first.peer, first.operation, iteration - 1, first.state_bytes)
                sample.copy_seconds = copy_seconds
                shutil.rmtree(traces, ignore_errors=True)
                self._one_background(checkpointer, trainer, iteration, state, sample, Path(traces))
                if iteration:
                    yield sample
            checkpointer.finalize()

    def _one_background(
        self,
        checkpointer: Any,
        trainer: Trainer,
        iteration: int,
        state: Mapping[str, Any],
        sample: Sample,
        traces: Path,
    ) -> None:
        before = trainer.speed()
        _settle(self._ranks.device)
        dist.barrier()
        began, cpu_seconds = time.perf_counter(), time.process_time()
        checkpointer.save(torch.nn.Linear(1, 1), None, None, None, iteration)
        blocked_seconds = time.perf_counter() - began
        steps = 0
        while not checkpointer.poll():
            trainer.step()
            steps += 1
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_seconds
        speed = (before + trainer.speed()) / 2
        told = self._ranks.gather(
            (seconds, blocked_seconds, seconds - steps / speed, _staging_seconds(traces, self._ranks.rank))
        )
        sample.seconds, sample.blocked_seconds, sample.slowed_seconds, sample.stage_seconds = (
            max(one[index] for one in told) for index in range(4)
        )
        sample.rank_seconds = [one[0] for one in told]
        sample.delivered_bytes = sum(self._ranks.gather(local_bytes(state)))


class _Clocked:
    """A writer or reader that is made when it is needed, with a clock on its main method."""

    def __init__(self, make: Callable[[], Any], method: str) -> None:
        self._make, self._method = make, method
        self._made: Any = None
        self.seconds = 0.0

    @property
    def made(self) -> Any:
        """The writer or reader."""
        if self._made is None:
            self._made = self._make()
            setattr(self._made, self._method, self._clock(getattr(self._made, self._method)))
        return self._made

    def _clock(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                future = call(*args, **kwargs)
                future.wait()
                return future
            finally:
                self.seconds = time.perf_counter() - began

        return clocked

    @property
    def num_retries(self) -> int | None:
        """Of a writer or reader of ours."""
        report = getattr(self._made, "last_report", None)
        return None if report is None else int(report.num_retries)


class _Holder:
    """A state that was there before, as a part of a job's state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("it is only saved")


@contextlib.contextmanager
def _traced(folder: str | None) -> Iterator[None]:
    if folder is not None:
        os.environ[_TRACE] = folder
    try:
        yield
    finally:
        if folder is not None:
            del os.environ[_TRACE]


def _whole(call: Callable[[], None], device: torch.device, timeline: MemoryTimeline) -> None:
    with timeline:
        call()
        _settle(device)


def _settle(device: torch.device) -> None:
    """Wait for what a GPU was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _discard(value: object) -> None:
    del value


def _count(sample: Sample, counted: LinkCounters) -> None:
    sample.requests, sample.link_cpu_seconds = dict(counted.requests), counted.cpu_seconds
    sample.moved_bytes = counted.up_bytes if sample.operation == "save" else counted.down_bytes


def _count_calls(sample: Sample, usages: Sequence[Usage | None]) -> None:
    name = "written_bytes" if sample.operation == "save" else "read_bytes"
    if all(usages):
        sample.moved_bytes = sum(getattr(usage, name) for usage in usages)


def _put_together(sample: Sample, told: Sequence[_OfRank], timeline: MemoryTimeline) -> Sample:
    sample.delivered_bytes = sum(one.held_bytes for one in told)
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(told) if one.error]
    if errors:
        sample.error = errors[0]
        return sample
    usages = [one.usage for one in told if one.usage is not None]
    sample.seconds = max(usage.wall_seconds for usage in usages)
    sample.cpu_seconds = sum(usage.cpu_seconds for usage in usages)
    sample.peak_bytes = max(usage.peak_bytes for usage in usages)
    sample.rank_seconds = [one.own_seconds for one in told]
    sample.rank_gb_per_second = [one.held_bytes / 1e9 / one.own_seconds if one.own_seconds else 0.0 for one in told]
    retries = [one.num_retries for one in told if one.num_retries is not None]
    sample.num_retries = sum(retries) if retries else None
    sample.memory = timeline.points[:: max(1, -(-len(timeline.points) // _MAX_POINTS))]
    return sample


def _last_line(failure: BaseException) -> str:
    lines = [line for line in f"{type(failure).__name__}: {failure}".splitlines() if line.strip()]
    return lines[-1].strip()[:500]


def _copy_seconds(state: Mapping[str, Any]) -> float:
    """Return the least time of three copies of this rank's part to host memory that is there, pinned for a GPU."""
    parts = [local_of(value) for value in state.values()]
    on_gpu = any(part.is_cuda for part in parts)
    copies = [torch.empty_like(part, device="cpu", pin_memory=on_gpu).zero_() for part in parts]
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        for copy, part in zip(copies, parts, strict=True):
            copy.copy_(part, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _staging_seconds(folder: Path, rank: int) -> float:
    """Return how long copying took, from the trace of this rank."""
    seconds = 0.0
    for path in folder.glob(f"*-stage-*-rank{rank}.json"):
        events = json.loads(path.read_text())["traceEvents"]
        seconds += sum(event["dur"] for event in events if event["ph"] == "X") / 1e6
    return seconds
