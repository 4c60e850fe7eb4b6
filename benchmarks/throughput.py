"""Measure saves and loads of a sharded state, on any number of ranks and machines, on GPUs or CPUs.

    torchrun --nproc-per-node 8 -m benchmarks.throughput --state decoder-8b --optimizer --url s3://bucket/folder
    torchrun --nproc-per-node 4 -m benchmarks.throughput --state 256 --server --link --json out.jsonl
    python -m benchmarks.throughput --state small:100000 --layout ddp --url /tmp/somewhere

The state is one of the presets (see `benchmarks.models`), a number of MiB, or `small:N` for N tensors of 1 KiB. With
`--fraction`, only that share of the rows of each matrix is made: the part of a large job that the ranks at hand hold.

Layouts: fsdp (each tensor cut by rows over all ranks), hsdp (so within groups of `--group` ranks, the groups alike),
ddp (all ranks alike), tp (matrices cut by rows or columns within groups of `--group` ranks, the groups alike).

Operations: save; load; partial (a quarter of the tensors); reshard (loaded in another layout); background (a save by
DistributedCheckpointer beside a stand-in for training: time blocked, staging, slow-down).

Targets: a path, any url, or `--server`: an S3 server (SeaweedFS) on this machine, for ranks of this machine; `--link`
puts a link with latency and limits in front of it, or of the server that `--endpoint` names (with its key in
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY). Everything is written below a new folder and removed. What lies in local
folders is read from the page cache.

Progress goes to stderr, a JSON line for each operation to `--json`, of which `python -m benchmarks.report` makes tables
and plots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.layouts import Layout, check_state, clear_state, make_state
from benchmarks.link import LinkProcess
from benchmarks.machine import machine
from benchmarks.models import PRESETS, TensorSpec, plain_tensors, preset, small_tensors
from benchmarks.operations import Operations, Sample
from benchmarks.peers import Peer, Site
from benchmarks.places import is_local, local_server, remove, through, usual_peers
from benchmarks.ranks import Ranks, meet

_OPERATIONS = ("save", "load", "partial", "reshard", "background")
_LAYOUTS = ("fsdp", "hsdp", "ddp", "tp")
_SMALL_BYTES = 1024
_WARM_UP = (TensorSpec("warm-up", (64, 16)),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all operations; return the exit status: 1 if any failed."""
    options = _parse(arguments)
    _quieten()
    with meet(options.device) as ranks, _places(options, ranks) as (site, link):
        run = Run(options, ranks, site, link)
        try:
            for sample in run.samples():
                run.keep(sample)
        finally:
            run.clean_up()
        return int(run.failed)


class Run:
    """One run of this program.

    Args:
        options: What the user chose.
        ranks: Who takes part.
        site: Where everything goes.
        link: On rank 0, what counts the traffic; None if nothing does.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks, site: Site, link: LinkProcess | None) -> None:
        self._options, self._ranks, self._link = options, ranks, link
        self._site = site.child(ranks.told(lambda: f"dcp-fsspec-bench-{uuid.uuid4().hex[:12]}"))
        self._specs = _specs(options)
        self._layouts: dict[str, Layout] = {}
        self._layout = self._make_layout(options.layout)
        self._peers = self._runnable(_chosen(options.peers, site))
        self.failed = False
        self._about = self._describe(site)
        size = f"{len(self._specs)} tensors, {self._state_bytes / 2**20:.0f} MiB"
        ranks.say(f"{size}, {options.layout}, {ranks.size} ranks, {self._about['target']}")

    @property
    def _state_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self._specs)

    def _make_layout(self, kind: str) -> Layout:
        """Return the layout, made once: its process groups stay."""
        if kind not in self._layouts:
            size, group = self._ranks.size, self._options.group
            group = group or (2 if kind == "tp" else max(1, size // 2))
            self._layouts[kind] = Layout(kind, self._ranks.device, size, group if size % group == 0 else size)
        return self._layouts[kind]

    def _runnable(self, wanted: Sequence[Peer]) -> list[Peer]:
        able = []
        for peer in wanted:
            reasons = [reason for reason in self._ranks.gather(peers.why_missing(peer)) if reason]
            if reasons:
                self._ranks.say(f"skipped {peer.name}: {reasons[0]}")
            else:
                able.append(peer)
        return able

    def _describe(self, site: Site) -> dict[str, Any]:
        hidden = ("json", "storage_options")
        settings = {name: value for name, value in vars(self._options).items() if name not in hidden}
        nodes = [one for rank, one in enumerate(self._ranks.gather(machine())) if rank % self._per_node == 0]
        gpus = torch.cuda.get_device_name(self._ranks.device) if self._ranks.device.type == "cuda" else None
        return {
            "run": self._ranks.told(lambda: uuid.uuid4().hex[:12]),
            "ranks": self._ranks.size,
            "num_nodes": self._ranks.num_nodes,
            "layout": self._options.layout,
            "state": self._options.state,
            "num_tensors": len(self._specs),
            "target": _target(self._options, site),
            "device": self._ranks.device.type,
            "gpu": gpus,
            "versions": peers.versions(),
            "machines": nodes,
            "settings": {name: str(value) for name, value in settings.items()},
        }

    @property
    def _per_node(self) -> int:
        return max(1, self._ranks.size // self._ranks.num_nodes)

    # Measuring -------------------------------------------------------------------------------------------

    def samples(self) -> Iterator[Sample]:
        """Measure, one operation after the other; every peer in turn, in another order each round."""
        wanted = self._options.operations.split(",")
        operations = Operations(self._ranks, self._link, self._options.trace)
        for peer in self._peers:
            self._warm_up(peer)
        for number in range(self._options.repeat):
            for peer in self._peers if number % 2 == 0 else reversed(self._peers):
                yield from self._round(operations, peer, number, wanted)
        if "background" in wanted:
            yield from self._background(operations)

    def _warm_up(self, peer: Peer) -> None:
        """Late imports, first connections: nobody's first operation should pay for them."""
        site = self._site.child(f"warm-up-{peer.name.replace('+', '-')}")
        operations = Operations(self._ranks, None, None)
        state = make_state(_WARM_UP, self._layout, seed=0)
        operations.save(peer, site, state, Sample(peer.name, "save", -1, 0))
        operations.load(peer, site, state, Sample(peer.name, "load", -1, 0))
        self._remove(site)

    def _round(self, operations: Operations, peer: Peer, number: int, wanted: Sequence[str]) -> Iterator[Sample]:
        site = self._site.child(f"{peer.name.replace('+', '-')}-{number}")
        sample = Sample(peer.name, "save", number, self._state_bytes)
        state = make_state(self._specs, self._layout, seed=number)
        saved = operations.save(peer, site, state, sample)
        yield saved
        clear_state(state)
        if not saved.error:
            if "load" in wanted:
                yield self._load(operations, peer, site, state, self._layout, replace(sample, operation="load"))
            if "partial" in wanted:
                part = self._partial(state)
                yield self._load(operations, peer, site, part, self._layout, replace(sample, operation="partial load"))
            if "reshard" in wanted:
                state.clear()
                layout = self._make_layout(self._options.reshard_to or ("fsdp", "tp")[self._layout.kind == "fsdp"])
                state = make_state(self._specs, layout, seed=None)
                yield self._load(operations, peer, site, state, layout, replace(sample, operation="resharded load"))
        self._remove(site)

    def _load(
        self, operations: Operations, peer: Peer, site: Site, state: dict[str, Any], layout: Layout, sample: Sample
    ) -> Sample:
        clear_state(state)
        sample.state_bytes = sum(spec.num_bytes for spec in self._specs if spec.name in state)
        sample = operations.load(peer, site, state, sample)
        if not sample.error and not self._options.unchecked:
            sample.error = self._differences(state, layout, sample.round)
        return sample

    def _differences(self, state: dict[str, Any], layout: Layout, seed: int) -> str:
        try:
            check_state(state, self._specs, layout, seed)
            error = ""
        except AssertionError as failure:
            error = str(failure)
        return next(filter(None, self._ranks.gather(error)), "")

    def _partial(self, state: dict[str, Any]) -> dict[str, Any]:
        names = list(state)
        quarter = max(1, len(names) // 4)
        middle = (len(names) - quarter) // 2
        return {name: state[name] for name in names[middle : middle + quarter]}

    def _background(self, operations: Operations) -> Iterator[Sample]:
        if not any(peer.is_ours for peer in self._peers):
            return
        state = make_state(self._specs, self._layout, seed=0)
        for mode in self._options.async_modes.split(","):
            site = self._site.child(f"background-{mode}")
            first = Sample(f"dcp_fsspec {mode}", "background save", 0, self._state_bytes)
            yield from operations.background(site, mode, state, first, self._options.repeat)
            self._remove(site)

    def clean_up(self) -> None:
        """Remove all that is left. Not collective: it also comes after a failure."""
        if self._ranks.rank == 0:
            remove(self._site)

    def _remove(self, site: Site) -> None:
        self._ranks.told(lambda: remove(site))

    # Telling ---------------------------------------------------------------------------------------------

    def keep(self, sample: Sample) -> None:
        """Show a sample and append it to the file. All ranks call it."""
        self.failed = self.failed or bool(sample.error)
        values = sample.to_dict()
        self._ranks.say(f"  #{sample.round} {sample.operation}: {sample.peer}: {_in_words(values)}")
        if self._ranks.rank == 0 and self._options.json:
            with open(self._options.json, "a") as file:
                file.write(json.dumps({**self._about, **values}) + "\n")


def _in_words(values: dict[str, Any]) -> str:
    if values["error"]:
        return f"failed: {values['error']}"
    words = f"{values['seconds']:.2f} s, {values['gb_per_second'] or 0:.3f} GB/s"
    if values["blocked_seconds"] is not None:
        return f"{words}, blocked {values['blocked_seconds']:.3f} s, of that staging {values['stage_seconds']:.3f} s"
    return f"{words}, CPU {values['cpu_seconds_per_gb'] or 0:.2f} s/GB, skew {values['skew'] or 0:.0%}"


def _specs(options: argparse.Namespace) -> list[TensorSpec]:
    if options.state in PRESETS:
        dtype = getattr(torch, options.dtype)
        return preset(options.state, dtype=dtype, optimizer=options.optimizer, fraction=options.fraction)
    kind, _, number = options.state.rpartition(":")
    return small_tensors(int(number), _SMALL_BYTES) if kind else plain_tensors(int(number) << 20, options.tensors)


def _chosen(names: str | None, site: Site) -> tuple[Peer, ...]:
    return tuple(map(peers.by_name, names.split(","))) if names else usual_peers(site)


def _target(options: argparse.Namespace, site: Site) -> str:
    """Name the target for tables, without what is different each time."""
    if is_local(site):
        return site.url
    place = "S3 server" if options.server else site.url
    if not options.link:
        return place
    total = f", {options.total_mb:g} MB/s in all" if options.total_mb else ""
    return f"{place}, link of {options.rate_mb:g} MB/s a connection, {options.latency_ms:g} ms{total}"


@contextlib.contextmanager
def _places(options: argparse.Namespace, ranks: Ranks) -> Iterator[tuple[Site, LinkProcess | None]]:
    """Give the site to all ranks, and the link to rank 0, which starts server and link."""
    with contextlib.ExitStack() as stack:
        link: LinkProcess | None = None

        if options.server and ranks.num_nodes > 1:
            raise SystemExit("--server is for the ranks of one machine; give an --endpoint that all machines reach")

        def make() -> Site:
            nonlocal link
            site = Site(options.url or "", *_credentials(options))
            if options.server:
                site = stack.enter_context(local_server())
            if site.endpoint_url and (options.link or options.count):
                limits = (options.latency_ms / 1e3, options.rate_mb * 1e6, (options.total_mb or 0) * 1e6 or None)
                site, link = stack.enter_context(through(site, *limits) if options.link else through(site))
            return site

        site = ranks.told(make)
        site.export()
        yield site, link


def _credentials(options: argparse.Namespace) -> tuple[str, ...]:
    if not options.endpoint:
        return ()
    return (options.endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--state", default="128", help=f"MiB, small:N, or any of {', '.join(PRESETS)} (default: %(default)s)")
    add("--tensors", type=int, default=8, help="tensors in a state of so many MiB (default: %(default)s)")
    add("--optimizer", action="store_true", help="add Adam's state to a preset")
    add("--fraction", type=float, default=1.0, help="share of the rows of a preset (default: %(default)s)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of a preset's parameters")
    add("--layout", default="fsdp", choices=_LAYOUTS, help="(default: %(default)s)")
    add("--group", type=int, help="ranks that hold a copy together (default: half of them for hsdp, 2 for tp)")
    add("--reshard-to", choices=_LAYOUTS, help="layout of the resharded load (default: tp for fsdp, else fsdp)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: %(default)s)")
    add("--operations", default="save,load", help=f"save and any of {','.join(_OPERATIONS)} (default: %(default)s)")
    add("--async-modes", default="async,async_with_pinned_mem", help="for background (default: %(default)s)")
    add("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    add("--peers", help="comma-separated; any of " + ", ".join(peer.name for peer in peers.ALL_PEERS))
    add("--url", help="path or url of a folder")
    add("--server", action="store_true", help="an S3 server on this machine")
    add("--endpoint", help="an S3 server that is there already, for an s3:// url")
    add("--link", action="store_true", help="put a slow link in front of the S3 server")
    add("--count", action="store_true", help="put a link without limits there, which counts requests and bytes")
    add("--latency-ms", type=float, default=20.0, help="of the link, one round trip (default: %(default)s)")
    add("--rate-mb", type=float, default=8.0, help="of the link, MB/s a connection and way (default: %(default)s)")
    add("--total-mb", type=float, help="of the link, MB/s of all connections, each way (default: no limit)")
    add("--trace", help="folder for traces of what this package does, which Perfetto shows")
    add("--unchecked", action="store_true", help="do not compare what was loaded")
    add("--json", type=Path, help="file to which a JSON line is appended for each operation")
    options = parser.parse_args(arguments)
    if bool(options.url) == options.server:
        parser.error("give a target: either --url or --server")
    if options.link and not (options.server or options.endpoint):
        parser.error("--link needs --server or --endpoint")
    unknown = set(options.operations.split(",")) - set(_OPERATIONS)
    if unknown:
        parser.error(f"unknown operations: {', '.join(sorted(unknown))}")
    return options


def _quieten() -> None:
    import logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
