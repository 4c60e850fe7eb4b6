"""Feed damaged and hostile checkpoints to every way in, and report whatever is not an error of the package.

    python -m support.fuzzer --seconds 600

Run with ``tests`` on the path, in a process of its own: its memory is limited, and it watches what is opened for
writing, imported, executed or connected to while a checkpoint is read.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import logging
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec import DcpFsspecError, FsspecStorageReader, FsspecStorageWriter, verify
from support.mutations import mutated, mutated_archive, mutated_json, mutated_program, random_program

Files = dict[str, bytes]

_SPARE_BYTES = 1 << 30
_HANG_SECONDS = 60
_MAX_SHOWN = 20
_WATCHED = ("exec", "import", "os.", "subprocess.", "socket.", "shutil.", "ctypes.dlopen", "pty.")
_HARMLESS = ("os.listdir", "os.scandir", "os.fwalk", "os.walk", "os.putenv")


class Watch:
    """Notes what a read does to the world beside reading."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            _, mode, flags = arguments
            if (mode and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.seen.append(f"opens {arguments}")
        elif event == "import" and arguments[0] in sys.modules:
            return
        elif event.startswith(_WATCHED) and event not in _HARMLESS:
            self.seen.append(f"{event} {arguments!r:.200}")


def _state() -> dict[str, Any]:
    return {
        "w": torch.arange(600.0).reshape(20, 30),
        "half": torch.arange(64).to(torch.bfloat16),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "values": {"lr": 0.1, "betas": (0.9, 0.95), "name": "x", "tensor": torch.ones(3), "raw": bytearray(b"ab")},
    }


def _blank() -> dict[str, Any]:
    return {
        "w": torch.zeros(20, 30),
        "half": torch.zeros(64, dtype=torch.bfloat16),
        "scalar": torch.tensor(0),
        "flags": torch.tensor([False, False]),
        "values": None,
    }


class _WholeValues(dcp.DefaultSavePlanner):
    """Keeps a dict of Python values in one item."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


class _WholeTargets(dcp.DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)


def _corpus(folder: Path) -> list[Files]:
    """Return good checkpoints of every kind."""
    writers: list[Any] = [
        FsspecStorageWriter(folder / "plain"),
        FsspecStorageWriter(folder / "packed", extensions=[ZStandard()]),
        dcp.FileSystemWriter(folder / "stock"),
    ]
    for writer in writers:
        dcp.save(_state(), storage_writer=writer, planner=_WholeValues())
    found = [
        {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}
        for name in ("plain", "packed", "stock")
    ]
    return [*found, {name: data for name, data in found[0].items() if name != "checksums.json"}]


class Fuzzer:
    """One run.

    Args:
        seed: Of the random numbers.
        folder: For the checkpoints; a filesystem in memory does best.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = Random(seed)
        self._folder = folder / "ckpt"
        self._corpus = _corpus(folder / "corpus")
        self._pieces = [data for files in self._corpus for data in files.values()]
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []

    def run(self, num_executions: int | None, seconds: float | None) -> None:
        """Go on until either is reached."""
        watch = Watch()
        for files in self._corpus:
            self._execute(files, watch)  # Whatever is imported late is imported here.
        good = set(self.outcomes)
        if good != {"read"}:
            raise RuntimeError(f"good checkpoints were not read: {good}, {self.findings}")
        self.findings.clear()
        self.outcomes.clear()
        _limit_memory()
        begin = time.monotonic()
        while num_executions is None or sum(self.outcomes.values()) < num_executions:
            if seconds is not None and time.monotonic() - begin > seconds:
                break
            self._execute(self._bad(), watch)

    def _bad(self) -> Files:
        random = self._random
        files = dict(random.choice(self._corpus))
        name = random.choice(sorted(files))
        kind = random.randrange(3)
        if kind == 0:
            files[name] = mutated(random, files[name], self._pieces)
        elif name == ".metadata":
            whole = random.random() < 0.2
            files[name] = random_program(random) if whole else mutated_program(random, files[name])
        elif name.endswith(".json"):
            files[name] = mutated_json(random, files[name])
        else:
            self._replace_item(files)
        if random.random() < 0.02:
            del files[name]
        return files

    def _replace_item(self, files: Files) -> None:
        """Put another archive in the place of one item, and let ``.metadata`` say so."""
        random = self._random
        metadata: Metadata = pickle.loads(files[".metadata"])
        index = random.choice(sorted(metadata.storage_data, key=str))
        info = metadata.storage_data[index]
        old = files[info.relative_path][info.offset : info.offset + info.length]
        new = mutated_archive(random, old, self._pieces)
        info.offset, info.length = len(files[info.relative_path]), len(new)
        files[info.relative_path] += new
        files[".metadata"] = pickle.dumps(metadata, protocol=4)
        files.pop("checksums.json", None)

    def _execute(self, files: Files, watch: Watch) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name, data in files.items():
            (self._folder / name).write_bytes(data)
        faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
        watch.armed, watch.seen = True, []
        try:
            outcomes = {self._attempt(way) for way in (self._load, self._open, self._verify)}
        finally:
            watch.armed = False
            faulthandler.cancel_dump_traceback_later()
        for seen in watch.seen:
            self._find(files, f"side effect: {seen}")
        for outcome in outcomes:
            if outcome.startswith("!"):
                self._find(files, outcome)
        self.outcomes[" / ".join(sorted(outcome.partition("\n")[0] for outcome in outcomes))] += 1

    def _attempt(self, way: Any) -> str:
        try:
            way()
        except (Exception, CheckpointException) as error:
            return _verdict(error)
        return "read"

    def _load(self) -> None:
        reader = FsspecStorageReader(self._folder, verify=self._random.choice(("read", "read", "full", "off")))
        dcp.load(_blank(), storage_reader=reader, planner=_WholeTargets())

    def _open(self) -> None:
        FsspecStorageReader(self._folder).read_metadata()

    def _verify(self) -> None:
        verify(self._folder)

    def _find(self, files: Files, what: str) -> None:
        self.findings.append(what)
        kept = os.environ.get("DCP_FSSPEC_FUZZ_KEEP")
        if kept:
            target = Path(kept) / f"finding-{len(self.findings)}"
            target.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (target / name).write_bytes(data)
            (target / "why").write_text(what)


def _verdict(error: BaseException) -> str:
    """Return the name of an error that is right, and a whole traceback after ``!`` for any other one."""
    reasons = [reason for reason, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for reason in reasons:
        if any(isinstance(cause, MemoryError) for cause in _causes(reason)):
            return "! memory\n" + "".join(traceback.format_exception(reason))
        if not isinstance(reason, DcpFsspecError) and not _of_planner(error):
            return "! " + "".join(traceback.format_exception(reason)) + "".join(traceback.format_exception(error))
    return type(reasons[0]).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_planner(error: BaseException) -> bool:
    """Tell whether torch's planner found that the checkpoint does not fit the state: a good one, of another model."""
    if not isinstance(error, CheckpointException):
        return False
    return all(
        isinstance(reason, RuntimeError | ValueError)
        and frames[-1].filename.endswith(("default_planner.py", "planner_helpers.py"))
        and not any("dcp_fsspec" in frame.filename for frame in frames)
        for reason, frames in error.failures.values()
    )


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Run, print what came out, and return the exit status."""
    parser = argparse.ArgumentParser(description="Feed damaged checkpoints to the reader.")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--executions", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dcp_fsspec-fuzz-", dir=parent) as folder:
        fuzzer = Fuzzer(arguments.seed, Path(folder))
        fuzzer.run(arguments.executions, arguments.seconds)
    for outcome, count in fuzzer.outcomes.most_common():
        print(f"{count:8}  {outcome}")
    kinds = collections.Counter(finding.strip().rpartition("\n")[2] for finding in fuzzer.findings)
    for kind, count in kinds.most_common(_MAX_SHOWN):
        first = next(finding for finding in fuzzer.findings if finding.strip().rpartition("\n")[2] == kind)
        print(f"FINDING, {count} times: {first}")
    print(f"{sum(fuzzer.outcomes.values())} executions, {len(fuzzer.findings)} findings, seed {arguments.seed}")
    return 1 if fuzzer.findings else 0


if __name__ == "__main__":
    sys.exit(main())
