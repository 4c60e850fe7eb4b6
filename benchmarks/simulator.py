"""Plan, write and read the checkpoints of thousands of virtual ranks in one process, and say what it costs whom.

    python -m benchmarks.simulator --out report --short          # under five minutes
    python -m benchmarks.simulator --out report                  # half an hour, 8 GiB of memory
    python -m benchmarks.simulator --out report --only 1024x1000 --stock

Torch's own planners and this package's storage writer and reader plan for all ranks; what ranks would send each other
is pickled as the process group would, measured and unpickled. Every rank is planned in the first save. Only a few
ranks, spread over the job, write and read for real, into memory: what the others report is made up in the same form.
Seconds are those of a CPU: of one rank, on the average, for what the ranks do side by side, and the sum for what the
coordinator does.

Writes ``scale.jsonl``, ``scale.md`` and ``scale.png`` into the folder. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from benchmarks.machine import machine
from benchmarks.measure import measure
from benchmarks.virtual import Case, CountingStore, as_written
from dcp_fsspec.checkpointer.plan_cache import PlanCache
from dcp_fsspec.checkpointer.snapshot import SnapshotPlanner
from dcp_fsspec.storage import fanout
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.opened import SmallFiles, read_small_files
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.writer import FsspecStorageWriter

_SHORT = ((64, 100), (256, 100), (1024, 100), (64, 1000))
_LONG = (*_SHORT, (4096, 100), (256, 1000), (64, 10_000), (1024, 1000))
_NUM_REAL = 4

Line = dict[str, Any]


class Clock:
    """CPU seconds by name, one for each time that something was done: all of it is work for one core."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note how long the body takes."""
        began = time.process_time()
        yield
        self._seconds[name].append(time.process_time() - began)

    def mean(self, *names: str) -> float:
        """Return what one rank spends."""
        return sum(statistics.mean(self._seconds[name]) for name in names)

    def total(self, *names: str) -> float:
        """Return what one process spends on behalf of all."""
        return sum(sum(self._seconds[name]) for name in names)


class Simulation:
    """One job: a save, the planning of a second one of the same shapes, a load.

    Args:
        case: Its size.
        say: Told what is going on.
    """

    def __init__(self, case: Case, say: Callable[[str], None]) -> None:
        self._case = case
        self._say = say
        self._store = Store("memory://job/first", filesystem=CountingStore())
        step = max(1, case.num_ranks // _NUM_REAL)
        self._real = list(range(0, case.num_ranks, step))[:_NUM_REAL]
        self._caches = {rank: PlanCache() for rank in self._real}
        self._writers: dict[int, FsspecStorageWriter] = {}
        self._planners: dict[int, SnapshotPlanner] = {}

    def run(self, *, stock: bool) -> Line:
        """Return the figures."""
        first, finals, metadata = self._plan(range(self._case.num_ranks), "first")
        save = self._save(finals, metadata)
        del finals
        again = self._plan(self._real, "next")[0]
        line = {
            "ranks": self._case.num_ranks,
            "tensors": self._case.num_tensors,
            "items": self._case.num_items,
            "plan": first,
            "plan_again": again,
            "save": save,
            "load": self._load(),
        }
        return {**line, "stock": self._stock()} if stock else line

    def _each(self, ranks: Sequence[int], doing: str) -> Iterator[int]:
        for number, rank in enumerate(ranks, 1):
            self._say(f"{self._case.num_ranks} ranks x {self._case.num_tensors} tensors: {doing} {number}/{len(ranks)}")
            yield rank

    # Saving ----------------------------------------------------------------------------------------------

    def _plan(self, ranks: Sequence[int], folder: str) -> tuple[Line, list[SavePlan], Metadata]:
        """Plan a save. Those who are not in `ranks` are taken to say what the others say: that nothing has changed."""
        clock, made = Clock(), []
        num_bytes = 0
        for rank in self._each(ranks, "plans"):
            sent = self._local(rank, folder, clock)
            num_bytes += len(sent)
            with clock.of("receive"):
                made.append(pickle.loads(sent))
        # Without a change all say the same.
        received = made if len(made) == self._case.num_ranks else made[:1] * self._case.num_ranks
        finals: list[SavePlan] = []
        metadata: list[Metadata] = []

        def step() -> None:
            with clock.of("global"):
                plans, one = self._planners[0].create_global_plan(received)
                finals.extend(self._writers[0].prepare_global_plan(plans))
                metadata.append(one)

        memory_bytes = measure(step).peak_bytes
        received, made = [], []  # What remains is what the coordinator keeps.
        num_bytes = num_bytes * self._case.num_ranks // len(ranks)
        for number, final in enumerate(finals):
            with clock.of("send"):
                sent = pickle.dumps(final)
            num_bytes += len(sent)
            if number in self._caches:
                with clock.of("take"):
                    self._planners[number].finish_plan(pickle.loads(sent))
        figures = {
            "rank_seconds": clock.mean("local", "take"),
            "coordinator_seconds": clock.total("receive", "global", "send"),
            "global_step_seconds": clock.total("global"),
            "bytes": num_bytes,
            "coordinator_memory_bytes": memory_bytes,
        }
        return figures, finals, metadata[0]

    def _local(self, rank: int, folder: str, clock: Clock) -> bytes:
        planner = SnapshotPlanner(self._case.saved(rank), self._caches.get(rank, PlanCache()), self._case.num_ranks)
        writer = FsspecStorageWriter.at(self._store.at(f"memory://job/{folder}"), overwrite=False, progress=False)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner.set_up_planner({}, is_coordinator=rank == 0)
        if rank in self._caches:
            self._planners[rank], self._writers[rank] = planner, writer
        with clock.of("local"):
            return pickle.dumps(writer.prepare_local_plan(planner.create_local_plan()))

    def _save(self, finals: Sequence[SavePlan], metadata: Metadata) -> Line:
        """Write and commit."""
        clock, results = Clock(), []
        num_bytes = 0
        for rank in self._each(range(len(finals)), "writes"):
            if rank in self._caches:
                with clock.of("write"):
                    sent = pickle.dumps(self._writers[rank].write_data(finals[rank], self._planners[rank]).value())
            else:
                sent = pickle.dumps(as_written(finals[rank]))
            num_bytes += len(sent)
            with clock.of("receive"):
                results.append(pickle.loads(sent))

        def finish() -> None:
            with clock.of("commit"):
                self._writers[0].finish(metadata, results)

        memory_bytes = measure(finish).peak_bytes
        with clock.of("answer"):
            answer = pickle.dumps(metadata)
        with clock.of("take answer"):
            pickle.loads(answer)
        sizes = self._store.list_files()
        return {
            "write_seconds": clock.mean("write"),
            "receive_seconds": clock.total("receive"),
            "commit_seconds": clock.total("commit"),
            "answer_seconds": clock.total("answer", "take answer"),
            "results_bytes": num_bytes,
            "answer_bytes": len(answer),
            "metadata_bytes": sizes[".metadata"],
            "checksums_bytes": sum(size for name, size in sizes.items() if name.startswith("checksums")),
            "coordinator_requests": self._writers[0].last_report.num_requests,
            "rank_requests": max(self._writers[rank].last_report.num_requests for rank in self._real[1:]),
            "coordinator_memory_bytes": memory_bytes,
        }

    # Loading ---------------------------------------------------------------------------------------------

    def _load(self) -> Line:
        """Load by all ranks: the coordinator opens the checkpoint and hands the small files on."""
        clock = Clock()
        opened: list[FsspecStorageReader] = []
        plans: dict[int, LoadPlan] = {}
        planners: dict[int, DefaultLoadPlanner] = {}
        with clock.of("open"):
            opened_here = read_small_files(self._store)
        files: SmallFiles = pickle.loads(pickle.dumps(opened_here))  # As they reach the other ranks.
        del opened_here
        metadata: list[Metadata] = []

        def decode() -> None:
            reader = FsspecStorageReader.at(self._store, files, progress=False)
            with clock.of("decode"):
                metadata.append(reader.read_metadata())
                reader.set_up_storage_reader(metadata[0], False)
            opened.append(reader)

        memory_bytes = measure(decode).peak_bytes
        num_bytes = 0
        for rank in self._each(range(self._case.num_ranks), "load plans"):
            planners[rank] = DefaultLoadPlanner(flatten_state_dict=False)
            own = metadata[0] if rank in self._caches else Metadata(self._case.records_of(rank))  # type: ignore[arg-type]
            planners[rank].set_up_planner(self._case.wanted(rank), own, rank == 0)
            with clock.of("local" if rank in self._caches else "local, by a short cut"):
                sent = pickle.dumps(opened[0].prepare_local_plan(planners[rank].create_local_plan()))
            num_bytes += len(sent)
            with clock.of("receive"):
                plans[rank] = pickle.loads(sent)
            if rank not in self._caches:
                del planners[rank]
        with clock.of("share out"):
            assignments = fanout.share_out(list(plans.values()), metadata[0].storage_data)
        return {
            "open_seconds": clock.total("open"),
            "decode_seconds": clock.mean("decode"),
            "small_files_bytes": (len(files.metadata) + len(files.checksums or b"")) * self._case.num_ranks,
            "plan_seconds_rank": clock.mean("local"),
            "plan_seconds_coordinator": clock.total("receive", "share out"),
            "plan_bytes": num_bytes + sum(len(pickle.dumps(one)) for one in assignments),
            "memory_bytes": memory_bytes,
            **self._read(opened[0], plans, planners, assignments, metadata[0], clock),
        }

    def _read(
        self,
        reader: FsspecStorageReader,
        plans: dict[int, LoadPlan],
        planners: dict[int, DefaultLoadPlanner],
        assignments: Sequence[fanout.Assignment],
        metadata: Metadata,
        clock: Clock,
    ) -> Line:
        """Read what lies in files that were written for real, and count what all ranks would fetch."""
        real = {f"__{rank}_" for rank in self._real}
        requests = []
        for rank in self._each(self._real, "reads"):
            mine = [
                item
                for item in plans[rank].items
                if any(metadata.storage_data[item.storage_index].relative_path.startswith(prefix) for prefix in real)
            ]
            before = self._store.num_requests
            with clock.of("read"):
                reader.read_data(LoadPlan(mine), planners[rank])
            requests.append(self._store.num_requests - before)
        fetched = fetched_once = 0
        for rank, plan in plans.items():
            sizes = [metadata.storage_data[item.storage_index].length for item in plan.items]
            fetched += sum(sizes)
            elsewhere = fanout.received(assignments[rank], rank)
            fetched_once += sum(size for place, size in enumerate(sizes) if place not in elsewhere)
        return {
            "read_seconds": clock.mean("read"),
            "rank_requests": max(requests),
            "fetched_bytes": fetched_once,
            "fetched_bytes_without_sharing": fetched,
        }

    def _stock(self) -> Line:
        """Pickle and unpickle the same metadata as stock writers and readers do."""
        clock = Clock()
        whole = FsspecStorageReader.at(self._store, progress=False).read_metadata()
        with clock.of("write"):
            data = pickle.dumps(whole)
        del whole
        with clock.of("read"):
            pickle.loads(data)
        return {"write_seconds": clock.total("write"), "read_seconds": clock.total("read"), "bytes": len(data)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases and make the table and the plot."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for scale.jsonl, scale.md and scale.png")
    parser.add_argument("--short", action="store_true", help="only what takes minutes")
    parser.add_argument("--only", help="cases such as 64x100,1024x1000: ranks x tensors")
    parser.add_argument("--stock", action="store_true", help="also time stock pickling of the same metadata")
    parser.add_argument("--add", action="store_true", help="keep the lines that scale.jsonl has")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    figures = options.out / "scale.jsonl"
    if not options.add:
        figures.unlink(missing_ok=True)
    chosen = [tuple(map(int, one.split("x"))) for one in options.only.split(",")] if options.only else None
    say = _Progress()
    for ranks, tensors in chosen or (_SHORT if options.short else _LONG):
        began = time.monotonic()
        line = Simulation(Case(ranks, tensors), say).run(stock=options.stock)
        line |= {"simulated_seconds": time.monotonic() - began, "machine": machine()}
        text = json.dumps(line)
        say.end(text)
        with figures.open("a") as file:
            file.write(f"{text}\n")
        gc.collect()
    from benchmarks.scale_report import write_report

    for path in write_report([json.loads(text) for text in figures.read_text().splitlines()], options.out):
        print(path, file=sys.stderr)
    return 0


class _Progress:
    """Says on standard error what is going on: on a terminal in one line, else every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0
        self._every = 0.1 if sys.stderr.isatty() else 10.0

    def __call__(self, text: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        print(f"\r{text:78}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
        if not sys.stderr.isatty():
            print(file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        """Print a finished line."""
        if sys.stderr.isatty():
            print(f"\r{'':78}\r", end="", file=sys.stderr, flush=True)
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
