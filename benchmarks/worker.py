"""The measured process: makes the state ready, warms up, waits for the word, runs one operation, checks it.

Runs in a fresh process per operation and rank (see `runner.py`).
"""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import peers, places
from benchmarks.measure import Usage, measure
from benchmarks.peers import Site

READY = "ready"
_ROW_ELEMENTS = 1024
_ROWS_AT_A_TIME = 16384
_WARM_UP_ELEMENTS = 16


@dataclass(frozen=True)
class Job:
    """One operation of one peer.

    Attributes:
        peer: its name.
        operation: "save", "load", "partial" (loads some tensors only) or "remove".
        site: where the checkpoint lies or will lie.
        num_tensors: float32 tensors in the state.
        tensor_bytes: size of each; a multiple of 4 KiB.
        seed: decides the content of the state.
        num_partial: tensors that "partial" loads.
        num_ranks: processes that take part; with more than one the state is sharded by rows.
        rendezvous: path of a file that does not exist yet, for the ranks to meet.
    """

    peer: str
    operation: str
    site: Site
    num_tensors: int
    tensor_bytes: int
    seed: int = 0
    num_partial: int = 2
    num_ranks: int = 1
    rendezvous: str = ""

    @property
    def names(self) -> list[str]:
        """Names of the tensors that the operation touches; partial loads take them from the middle on."""
        names = [f"layer{index}.weight" for index in range(self.num_tensors)]
        if self.operation == "partial":
            middle = self.num_tensors // 2
            return names[middle : middle + self.num_partial]
        return names

    @property
    def needed_bytes(self) -> int:
        """Bytes that the operation has to move, all ranks together."""
        return len(self.names) * self.tensor_bytes


@dataclass(frozen=True)
class Outcome:
    """What a rank reports.

    Attributes:
        usage: costs of the operation; None if it failed.
        error: traceback of the failure.
        notes: anything else worth telling.
    """

    usage: Usage | None = None
    error: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def run(job: Job, rank: int, wire: Connection) -> None:
    """Run one rank of `job`: send READY, wait for any object, send an `Outcome`. Entry point of a process."""
    try:
        _quieten()
        job.site.export()
        outcome = _run(job, rank, wire)
    except BaseException:  # torch's CheckpointException is no Exception, and the parent must learn of anything
        outcome = Outcome(error=traceback.format_exc())
    wire.send(outcome)
    wire.close()


def _run(job: Job, rank: int, wire: Connection) -> Outcome:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    peer = peers.by_name(job.peer)
    _warm_up(job, rank)
    if job.num_ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{job.rendezvous}", rank=rank, world_size=job.num_ranks)
    no_dist = job.num_ranks == 1
    if job.operation == "save":
        state = _make_state(job, rank, filled=True)
        wire.send(READY)
        wire.recv()
        usage = measure(lambda: _discard(save(state, storage_writer=peer.writer(job.site), no_dist=no_dist)))
    else:
        state = _make_state(job, rank, filled=False)
        wire.send(READY)
        wire.recv()
        usage = measure(lambda: load(state, storage_reader=peer.reader(job.site), no_dist=no_dist))
        _compare(job, rank, state)
    if job.num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return Outcome(usage)


def _discard(value: object) -> None:
    del value


def _warm_up(job: Job, rank: int) -> None:
    """Save and load a few elements elsewhere: late imports and the client's first connection come with it."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    peer = peers.by_name(job.peer)
    site = replace(job.site, url=f"{job.site.url}-warm-up-{job.operation}-{rank}")
    save({"x": torch.zeros(_WARM_UP_ELEMENTS)}, storage_writer=peer.writer(site), no_dist=True)
    load({"x": torch.ones(_WARM_UP_ELEMENTS)}, storage_reader=peer.reader(site), no_dist=True)


def _make_state(job: Job, rank: int, filled: bool) -> dict[str, Any]:
    """Return the state with every page touched: random bytes, or zeros to load into."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    state: dict[str, Any] = {}
    for name in job.names:
        local = torch.zeros(_local_rows(job, rank)[1], _ROW_ELEMENTS)
        local.fill_(0.0)
        for rows, content in _expected(job, name, rank) if filled else ():
            local[rows] = content
        if job.num_ranks > 1:
            mesh = init_device_mesh("cpu", (job.num_ranks,))
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        else:
            state[name] = local
    return state


def _local_rows(job: Job, rank: int) -> tuple[int, int]:
    """Return the first row of this rank's part and the number of its rows."""
    rows = job.tensor_bytes // (4 * _ROW_ELEMENTS) // job.num_ranks
    return rank * rows, rows


def _expected(job: Job, name: str, rank: int) -> Iterator[tuple[slice, Any]]:
    """Yield what this rank's part of the tensor holds, some rows at a time, the same in every process."""
    import torch

    index = int(name.removeprefix("layer").removesuffix(".weight"))
    generator = torch.Generator().manual_seed(job.seed * 1000 + index)
    first, num_rows = _local_rows(job, rank)
    for begin in range(0, first + num_rows, _ROWS_AT_A_TIME):
        rows = torch.empty(min(_ROWS_AT_A_TIME, first + num_rows - begin), _ROW_ELEMENTS)
        rows.view(torch.int64).random_(generator=generator)
        skipped = max(0, first - begin)
        if skipped < len(rows):
            start = begin + skipped - first
            yield slice(start, start + len(rows) - skipped), rows[skipped:]


def _compare(job: Job, rank: int, state: dict[str, Any]) -> None:
    import torch

    for name in job.names:
        got = state[name].to_local() if job.num_ranks > 1 else state[name]
        # As integers: the content is random bits, and a NaN differs from itself.
        for rows, expected in _expected(job, name, rank):
            if not torch.equal(got[rows].view(torch.int64), expected.view(torch.int64)):
                raise AssertionError(f"{name} was not loaded bit for bit")


def remove(site: Site) -> None:
    """Delete everything below a site. Entry point of a process."""
    places.remove(site)


def probe(names: list[str], wire: Connection) -> None:
    """Send, for each peer, why it cannot run (None if it can). Entry point of a process."""
    _quieten()
    wire.send({name: peers.why_missing(peers.by_name(name)) for name in names})


def _quieten() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
