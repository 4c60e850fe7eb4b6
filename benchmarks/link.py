"""A loopback TCP link, slow the way a link to an object store is slow, that counts what crosses it.

Runs in a process of its own, so that its CPU time is not the client's:

    with LinkProcess("127.0.0.1:8333", latency_seconds=0.02, rate_bytes_per_second=8_000_000) as link:
        before = link.snapshot()
        ...                                  # talk to link.endpoint_url
        print(link.snapshot() - before)

What it does to a connection:
  latency   half on the way to the server and half on the way back, at the start of each HTTP message; a new
            connection pays one round trip, as for TCP's handshake, and so does a client that waits for
            "100 Continue". There is no slow start.
  rate      each direction of each connection has its own; bytes that a client asked for and then did not
            wait for were sent all the same.
  total     optional, shared by all connections, each direction apart.
Without any limit it is a counter of requests and body bytes. Bytes are passed on unchanged, so signatures
stay valid.

By hand: `python -m benchmarks.link --target 127.0.0.1:8333 --latency-ms 20 --rate-mb 8`; every line on stdin
is answered with the counters as JSON, and the end of stdin ends the link.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from benchmarks.carrier import Link, LinkCounters

__all__ = ["LinkCounters", "LinkProcess", "host_and_port"]

_RUNS_FROM = Path(__file__).resolve().parent.parent


class LinkProcess:
    """A `Link` in a process of its own, from `start` or `with` until `stop`, or until this process ends.

    Args:
        target: "host:port" of the server.
        latency_seconds: of one round trip.
        rate_bytes_per_second: of each direction of each connection; None for no limit.
        total_bytes_per_second: of all connections together, each direction; None for no limit.
    """

    def __init__(
        self,
        target: str,
        latency_seconds: float = 0.0,
        rate_bytes_per_second: float | None = None,
        total_bytes_per_second: float | None = None,
    ) -> None:
        self._arguments = ["--target", target, "--latency-ms", str(latency_seconds * 1e3)]
        for name, rate in (("--rate-mb", rate_bytes_per_second), ("--total-mb", total_bytes_per_second)):
            if rate is not None:
                self._arguments += [name, str(rate / 1e6)]
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    def start(self) -> Self:
        """Start the process and learn its address."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.link", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_RUNS_FROM,
        )
        self.endpoint_url = self._read_line()
        return self

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def snapshot(self) -> LinkCounters:
        """Return the counters as they are now."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("counters\n")
        self._process.stdin.flush()
        return LinkCounters.from_json(self._read_line())

    def _read_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the link's process has ended")
        return line

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception_info: object) -> None:
        self.stop()


def host_and_port(url: str) -> str:
    """Return "host:port" of an endpoint."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def main() -> None:
    """Run a link, answer lines on stdin with the counters, end with stdin."""
    parser = argparse.ArgumentParser("python -m benchmarks.link", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the server")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of one round trip")
    parser.add_argument("--rate-mb", type=float, help="MB/s of each direction of each connection")
    parser.add_argument("--total-mb", type=float, help="MB/s of all connections together, each direction")
    options = parser.parse_args()
    rates = [None if rate is None else rate * 1e6 for rate in (options.rate_mb, options.total_mb)]
    link = Link(options.target, options.latency_ms / 1e3, *rates)
    threading.Thread(target=link.serve, daemon=True).start()
    print(f"http://127.0.0.1:{link.port}", flush=True)
    for _ in sys.stdin:
        print(link.counters().to_json(), flush=True)


if __name__ == "__main__":
    main()
