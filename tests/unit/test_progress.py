"""Progress of saves and loads, and the lines and numbers that they leave."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_fsspec
import metrics
from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter, Progress
from support.tensors import random_tensor

STATE_BYTES = 1 << 20


def _state() -> dict[str, torch.Tensor]:
    return {f"t{number}": random_tensor(1 << 16, seed=number) for number in range(4)}


def test_a_function_is_told_of_every_byte_of_saves_and_loads(tmp_path: Path) -> None:
    told: list[Progress] = []
    writer = FsspecStorageWriter(tmp_path, shard_bytes=256 << 10, progress=told.append)
    dcp.save(_state(), storage_writer=writer, no_dist=True)
    saved, told[:] = list(told), []
    dcp.load(_state(), storage_reader=FsspecStorageReader(tmp_path, progress=told.append), no_dist=True)
    for seen, what in ((saved, "save"), (told, "load")):
        assert seen[0].done_bytes == 0
        assert seen[-1].done_bytes == seen[-1].total_bytes >= STATE_BYTES
        assert [one.done_bytes for one in seen] == sorted(one.done_bytes for one in seen)
        assert {one.what for one in seen} == {f"{what} {tmp_path}"}
    assert len(saved) > 2


def test_a_function_that_fails_ends_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(now: Progress) -> None:
        raise ValueError("a bug of the user")

    dcp.save(_state(), storage_writer=FsspecStorageWriter(tmp_path, progress=fail), no_dist=True)
    dcp.load(_state(), storage_reader=FsspecStorageReader(tmp_path, progress=fail), no_dist=True)
    assert sum("it is not called again" in one.message for one in caplog.records) == 2


def test_a_save_and_a_load_leave_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dcp_fsspec"):
        dcp.save(_state(), storage_writer=FsspecStorageWriter(tmp_path), no_dist=True)
        dcp.load(_state(), storage_reader=FsspecStorageReader(tmp_path), no_dist=True)
    lines = [one.getMessage() for one in caplog.records if one.name.startswith("dcp_fsspec")]
    assert len(lines) == 2
    for line in lines:
        assert all(word in line for word in (str(tmp_path), " MB in ", "MB/s", "requests", "retries"))


SCRIPT = """
import sys, torch, torch.distributed.checkpoint as dcp
import dcp_fsspec.storage.bars as bars
from dcp_fsspec import FsspecStorageWriter
bars._LONG_SECONDS = 0.0
for progress in (True, False):
    writer = FsspecStorageWriter(sys.argv[1], progress=progress)
    dcp.save({"a": torch.ones(1 << 18)}, storage_writer=writer, no_dist=True)
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only_and_only_if_wished_for(tmp_path: Path, is_terminal: bool) -> None:
    ours, theirs = pty.openpty() if is_terminal else os.pipe()  # Both: what to read from, what to write to.
    environment = {**os.environ, "PYTHONPATH": str(Path(dcp_fsspec.__file__).parents[1]), "TERM": "xterm"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        seen = b""
        while chunk := _read(ours):
            seen += chunk
    os.close(ours)
    assert process.returncode == 0, seen
    assert seen.count(b"\x1b[?25l") == is_terminal  # The cursor is hidden while a bar is drawn: once.
    assert (b"save " in seen) == is_terminal


TROUBLE = """
import io, sys
import dcp_fsspec.storage.bars as bars
from dcp_fsspec.storage.progress import Meter
bars._LONG_SECONDS = 0.0
class Terminal(io.StringIO):
    def isatty(self): return True
    def write(self, text): raise BrokenPipeError("nobody looks any more")
sys.stderr = Terminal()
with bars.told(True) as callback:
    meter = Meter("save", 10, callback)
    meter.add(10)
sys.stderr = io.StringIO()
sys.stderr.close()
with bars.told(True) as callback:
    assert callback is None
"""


def test_a_terminal_that_cannot_be_written_to_ends_nothing() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(dcp_fsspec.__file__).parents[1]), "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", TROUBLE], env=environment, check=True, timeout=60)


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # The terminal's other end is closed.
        return b""


def test_the_example_prints_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.main()
    numbers = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(numbers["checkpoint_save_bytes"]) > 256 * 256 * 4
    assert float(numbers["checkpoint_load_bytes"]) > 256 * 256 * 4
    assert {"checkpoint_save_seconds", "checkpoint_save_requests", "checkpoint_save_retries"} < set(numbers)
    assert numbers["checkpoint_iteration"] == "1"
