"""Where checkpoints go while something is measured: an S3 server of our own, a link in front of it, a folder, a url."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.link import LinkProcess, host_and_port
from benchmarks.peers import LOCAL_PEERS, OTHER_PEERS, S3_PEERS, Peer, Site

_SHM = Path("/dev/shm")
_ROOM_FOR_SERVER_BYTES = 8 * 2**30


@contextlib.contextmanager
def local_server(state_bytes: int = 0) -> Iterator[Site]:
    """Give a site on a new S3 server, SeaweedFS, that keeps its data in memory where there is room.

    Args:
        state_bytes: What will be stored, and lie twice in the memory of whoever saves and loads it.
    """
    from dcp_fsspec.testing.servers import SeaweedServer

    # More memory than its default spares the server half of its CPU time, which all peers wait for.
    with SeaweedServer(bucket="bench", memory_limit="2GiB", data_parent=_roomy_folder(state_bytes)) as server:
        yield Site(f"s3://{server.bucket}", server.endpoint_url, server.access_key, server.secret_key)


def _roomy_folder(state_bytes: int) -> Path | None:
    if not _SHM.is_dir():
        return None
    room = os.statvfs(_SHM)
    free_bytes = min(room.f_bavail * room.f_frsize, _available_memory_bytes())
    return _SHM if free_bytes > _ROOM_FOR_SERVER_BYTES + 3 * state_bytes else None


def _available_memory_bytes() -> int:
    """Return what programs can still get, the file cache included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


@contextlib.contextmanager
def through(
    site: Site,
    latency_seconds: float = 0.0,
    rate_bytes_per_second: float | None = None,
    total_bytes_per_second: float | None = None,
) -> Iterator[tuple[Site, LinkProcess]]:
    """Put a link in front of the site's server; without limits it only counts."""
    target = host_and_port(site.endpoint_url)
    with LinkProcess(target, latency_seconds, rate_bytes_per_second, total_bytes_per_second) as link:
        yield replace(site, endpoint_url=link.endpoint_url), link


def is_local(site: Site) -> bool:
    """Tell whether the site is a folder of this machine."""
    return "://" not in site.url


def usual_peers(site: Site) -> tuple[Peer, ...]:
    """Return who can be compared there."""
    if is_local(site):
        return LOCAL_PEERS
    return S3_PEERS if site.url.startswith("s3://") else OTHER_PEERS


def remove(site: Site) -> None:
    """Delete everything below a site."""
    if is_local(site):
        shutil.rmtree(site.url, ignore_errors=True)
        return
    import fsspec

    filesystem, path = fsspec.url_to_fs(site.url, **site.s3fs_options())
    filesystem.invalidate_cache()
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)
