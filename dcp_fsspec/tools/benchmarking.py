"""A short save and load of a made-up state against a user's own store, and what the figures suggest."""

import contextlib
import secrets
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.errors import ConfigurationError, CorruptCheckpointError, DcpFsspecError
from dcp_fsspec.storage.checksums import crc_of
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.writer import FsspecStorageWriter

_MIN_BYTES = 1 << 20
_PROBES = 5
_MORE_BY = 1.15
"""A setting is worth advising when it is faster by so much."""

_BUSY = 0.8
"""Above this share of one core the CPU, not the store, is what limits."""

_FAR_SECONDS = 0.05


@dataclass(frozen=True)
class Round:
    """One save and load.

    Attributes:
        max_concurrency: Requests in flight; None: the defaults, of which reads have their own.
        save_mb_per_second: Megabytes (10**6) a second.
        load_mb_per_second: Megabytes a second.
        save_cpu_seconds_per_gb: CPU seconds of this process for each 10**9 bytes.
        load_cpu_seconds_per_gb: CPU seconds of this process for each 10**9 bytes.
        num_requests: Calls made to the filesystem.
        num_retries: Those of them that repeated a failed one.
    """

    max_concurrency: int | None
    save_mb_per_second: float
    load_mb_per_second: float
    save_cpu_seconds_per_gb: float
    load_cpu_seconds_per_gb: float
    num_requests: int
    num_retries: int


@dataclass
class BenchReport:
    """What was measured.

    Attributes:
        url: Where.
        filesystem: Class of the filesystem.
        num_bytes: Size of the state.
        latency_seconds: Median time of reading a small file.
        rounds: With the default concurrency first, then with others.
        advice: Sentences.
    """

    url: str
    filesystem: str
    num_bytes: int
    latency_seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def bench(store: Store, num_bytes: int = 256 << 20, step: Callable[[str], None] = lambda _: None) -> BenchReport:
    """Save and load a state of `num_bytes` in a folder of its own below `store`, which is removed again.

    Args:
        store: A folder that can be written.
        num_bytes: Size of the state.
        step: Told what comes next, in words.

    Raises:
        ConfigurationError: a size that shows nothing.
        CheckpointNotFoundError: there is no such bucket.
        StorageReadError, StorageWriteError: the store failed.
        CorruptCheckpointError: what was loaded is not what was saved.
    """
    if num_bytes < _MIN_BYTES:
        raise ConfigurationError(f"a state of {num_bytes} bytes shows nothing, use at least {_MIN_BYTES}")
    folder = store.child(f"dcp-fsspec-bench-{secrets.token_hex(4)}")
    report = BenchReport(store.url, type(store.fs).__name__, num_bytes)
    state = _state(num_bytes)
    try:
        folder.prepare()
        step("latency")
        report.latency_seconds = _latency(folder)
        first = next(iter(state))
        _round(folder, {first: state[first]}, None)  # Connections, and memory used for the first time.
        usual = folder.capabilities.threads_for(None)
        more = sorted({max(1, usual // 2), 2 * usual} - {usual}) if folder.capabilities.threads else []
        for threads in (None, *more):
            step(f"{threads or 'usual number of'} requests at a time")
            report.rounds.append(_round(folder, state, threads))
    except BaseException as error:
        if report.latency_seconds or isinstance(
            error, Exception
        ):  # Else the user waits no longer for the first answer.
            with contextlib.suppress(DcpFsspecError):
                _remove(folder)
        raise
    _remove(folder)
    report.advice = _advice(report, object_store=not folder.capabilities.local)
    return report


def _remove(folder: Store) -> None:
    folder.remove_all(folder.list_files(), "left behind by a benchmark")
    folder.remove_folder()


def _state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Return eight tensors of random bits."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, num_bytes // 8 // 4096), 1024)
    low, high = -(2**31), 2**31 - 1
    return {
        f"layers.{number}.weight": torch.randint(low, high, shape, dtype=torch.int32, generator=generator)
        for number in range(8)
    }


def _latency(folder: Store) -> float:
    folder.publish("probe", [b"x"], crc_of([b"x"]))
    seconds = []
    for _ in range(_PROBES):
        begin = time.monotonic()
        folder.read("probe")
        seconds.append(time.monotonic() - begin)
    folder.remove(["probe"])
    return statistics.median(seconds)


def _round(folder: Store, state: dict[str, torch.Tensor], threads: int | None) -> Round:
    place = folder.child(f"with-{threads or 'defaults'}")
    writer = FsspecStorageWriter.at(place, max_concurrency=threads)
    reader = FsspecStorageReader.at(place, max_concurrency=threads)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    save = _timed(lambda: dcp.save(dict(state), storage_writer=writer, no_dist=True))
    loaded: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load = _timed(lambda: dcp.load(loaded, storage_reader=reader, no_dist=True))
    if not all(torch.equal(loaded[key], tensor) for key, tensor in state.items()):
        raise CorruptCheckpointError(f"{place.url}: what was loaded is not what was saved")
    place.remove(place.list_files())
    place.remove_folder()
    return Round(
        threads,
        save_mb_per_second=gigabytes * 1e3 / save[0],
        load_mb_per_second=gigabytes * 1e3 / load[0],
        save_cpu_seconds_per_gb=save[1] / gigabytes,
        load_cpu_seconds_per_gb=load[1] / gigabytes,
        num_requests=writer.last_report.num_requests + reader.last_report.num_requests,
        num_retries=writer.last_report.num_retries + reader.last_report.num_retries,
    )


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of `call`."""
    begin, cpu = time.monotonic(), time.process_time()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            call()
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, DcpFsspecError):
                    raise failure from error
            raise
    return time.monotonic() - begin, time.process_time() - cpu


def _advice(report: BenchReport, *, object_store: bool) -> list[str]:
    usual = report.rounds[0]
    advice = []
    for verb, attribute in (("save", "save_mb_per_second"), ("load", "load_mb_per_second")):
        best = max(report.rounds, key=lambda one: float(getattr(one, attribute)))
        if best is not usual and getattr(best, attribute) > _MORE_BY * getattr(usual, attribute):
            whose = "FsspecStorageWriter" if verb == "save" else "FsspecStorageReader"
            reached, default = (f"{getattr(one, attribute):.0f}" for one in (best, usual))
            advice.append(
                f"{verb}: max_concurrency={best.max_concurrency} on {whose} made {reached} MB/s, the default {default}."
            )
    cores = max(
        usual.save_cpu_seconds_per_gb * usual.save_mb_per_second,
        usual.load_cpu_seconds_per_gb * usual.load_mb_per_second,
    )
    if object_store and cores / 1e3 > _BUSY and report.filesystem != "FsspecStore":
        advice.append(
            "The CPU of this process is what limits, not the store: try obstore (the extra `obstore`), or spread the "
            "state over more ranks."
        )
    if report.latency_seconds > _FAR_SECONDS:
        advice.append(
            f"The store is {report.latency_seconds * 1e3:.0f} ms away: save in the background, and keep checkpoints "
            "in the region of the job."
        )
    if any(one.num_retries for one in report.rounds):
        advice.append("Requests had to be tried again: the store throttles or loses connections; use fewer at a time.")
    return advice or ["The defaults do well here."]
