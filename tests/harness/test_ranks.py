"""Ranks report what happened to each of them, and the pool lives on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from support.ranks import RankPool, values
from support.torchrun import torchrun

pytestmark = pytest.mark.distributed


def _sum_of_ranks(rank: int, factor: int) -> tuple[int, int]:
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    return dist.get_world_size(), int(total)


def _fail_on_rank_1(rank: int) -> str:
    if rank == 1:
        raise FileNotFoundError("gone")
    return "fine"


def _die_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on_rank_0(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()


def test_pool_survives_errors_deaths_and_hangs(two_ranks: RankPool) -> None:
    assert values(two_ranks.run(_sum_of_ranks, 5)) == [(2, 5), (2, 5)]
    fine, failed = two_ranks.run(_fail_on_rank_1)
    assert fine.value == "fine"
    assert isinstance(failed.exception, FileNotFoundError)
    assert "_fail_on_rank_1" in str(failed.error)
    left, died = two_ranks.run(_die_on_rank_1)
    assert left.error is not None
    assert died.error == "process ended with exit code -9"
    hung, ended = two_ranks.run(_hang_on_rank_0, deadline_seconds=5)
    assert hung.error == "still running at the deadline, killed"
    assert ended.error is None
    assert values(two_ranks.run(_sum_of_ranks, 7)) == [(2, 7), (2, 7)]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
os.write(1, f"total {int(total)} {sys.argv[1]}".encode() + bytes([10]))  # In one piece, whatever the other rank does.
dist.destroy_process_group()
"""


def test_torchrun_returns_what_all_ranks_printed() -> None:
    finished = torchrun(SCRIPT, "argument", num_ranks=2)
    assert (finished.returncode, finished.output.count("total 3 argument")) == (0, 2), finished.output


def test_torchrun_kills_every_rank_at_the_deadline(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("while True: pass")
    assert torchrun(script, num_ranks=2, deadline_seconds=10).returncode is None
    running = [each for each in psutil.process_iter(["cmdline"]) if str(script) in (each.info["cmdline"] or [])]
    assert running == []
