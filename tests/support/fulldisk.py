"""Saves by several ranks on a disk that is full, in a mount of its own that nobody else sees.

    outcome = run_on_small_disk(folder, num_ranks=4)

The process that fills the disk runs in a namespace of its own (`unshare`), where it may mount a small tmpfs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.crashing import SHARD_BYTES, state_of

DISK_BYTES = 4 << 20
PAGE_BYTES = 4096
_IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def why_not() -> str | None:
    """Return why no disk can be mounted here, or None."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    mount = "mount -t tmpfs none /mnt"
    tried = subprocess.run([*_IN_NAMESPACE, "sh", "-c", mount], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no mounts in a namespace: {tried.stderr.strip()}"


def run_on_small_disk(folder: Path, num_ranks: int, deadline_seconds: float = 150.0) -> list[dict[str, Any]]:
    """Save over a checkpoint with more and more room left, until it fits; return what became of each save.

    Each has `room_bytes`, `failures` (texts on each rank; empty if it went well), `ranks` (that failed), `causes` (type
    and errno), `left` (names that are there and were not before) and `stands` (the number of the state that loads; 1
    is the old one).
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [*_IN_NAMESPACE, sys.executable, "-m", "support.fulldisk", str(folder), str(num_ranks)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=deadline_seconds, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def _save(rank: int, url: str, number: int) -> tuple[str, list[int], list[tuple[str, int | None]]]:
    import torch.distributed as dist

    from support.checkpoints import fails, save, threads_of_ours

    with contextlib.suppress(AssertionError), fails() as failure:
        save(state_of(number, rank, dist.get_world_size()), url, shard_bytes=SHARD_BYTES)
    dist.barrier()
    assert threads_of_ours() == []
    return (
        failure.text,
        failure.ranks,
        [(type(cause).__name__, getattr(cause, "errno", None)) for cause in failure.causes],
    )


@contextlib.contextmanager
def _room(disk: Path, room_bytes: int) -> Iterator[None]:
    """Leave so much room on the disk."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    filler.write_bytes(b"\x55" * (status.f_bavail * status.f_bsize - room_bytes))
    try:
        yield
    finally:
        filler.unlink()


def _stands(url: str) -> int:
    from support.checkpoints import load
    from support.tensors import assert_bits_equal

    loaded = load(state_of(0), url, verify="full")
    assert_bits_equal(loaded, state_of(loaded["number"]))
    return int(loaded["number"])


def main() -> None:
    """Mount a disk at the folder that the command line names, and save there."""
    from support.ranks import RankPool, values

    disk, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], check=True)
    url = str(disk / "c")
    with RankPool(num_ranks, forked=True) as pool:
        values(pool.run(_save, url, 1))
        # Large steps first, then small ones where only the small files do not fit any more.
        needed = sum(path.stat().st_blocks * 512 for path in Path(url).iterdir())
        rooms = [needed * share // 5 for share in range(5)]
        rooms += range(needed - 4 * PAGE_BYTES, needed + 8 * PAGE_BYTES, PAGE_BYTES)
        for room_bytes in rooms:
            before = set(os.listdir(url))
            with _room(disk, room_bytes):
                outcomes = values(pool.run(_save, url, 2))
            failed = any(text for text, *_ in outcomes)
            report = {
                "room_bytes": room_bytes,
                "failures": [text for text, *_ in outcomes],
                "ranks": outcomes[0][1],
                "causes": outcomes[0][2],
                "left": sorted(set(os.listdir(url)) - before) if failed else [],
                "stands": _stands(url),
            }
            print(json.dumps(report), flush=True)
            if not failed:
                break
    subprocess.run(["umount", str(disk)], check=True)


if __name__ == "__main__":
    main()
