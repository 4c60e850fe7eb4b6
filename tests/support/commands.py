"""The command line in this process, and checkpoints of every kind for it to work on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import dcp_fsspec
from dcp_fsspec import Catalog, FsspecStorageWriter
from dcp_fsspec.checkpointer.records import CommitRecord, ComponentRecord
from dcp_fsspec.cli.app import cli
from support.stores import Store
from support.tensors import random_tensor

KINDS = ("ours", "stock", "cosmos", "torchtitan")
KINDS_ON_STORES = list(itertools.product(KINDS, ("file", "moto", "seaweed")))


def model_state(seed: int = 0) -> dict[str, Any]:
    """Return a small model: regular and averaged weights, cut into pieces when saved by `write_ours`."""
    return {
        "net.a.weight": random_tensor(96, 512, seed=seed).nan_to_num(),
        "net.b.bias": random_tensor(7, dtype=torch.bfloat16, seed=seed + 1),
        "net_ema.a.weight": random_tensor(96, 512, seed=seed + 2).nan_to_num(),
        "net_ema.b.bias": random_tensor(7, dtype=torch.bfloat16, seed=seed + 3),
        "count": torch.tensor(seed),
    }


def optim_state(seed: int = 0) -> dict[str, Any]:
    """Return something like an optimizer's state: nested, and with Python values."""
    return {
        "state": {"a": {"exp_avg": random_tensor(12, 5, seed=seed + 4)}},
        "param_groups": {"lr": 0.1, "names": ["a", 1]},
    }


def components(iteration: int) -> dict[str, dict[str, Any]]:
    """Return what is saved of one iteration, by component."""
    return {
        "model": model_state(iteration),
        "optim": optim_state(iteration),
        "scheduler": {"last_epoch": iteration},
        "trainer": {"iteration": iteration},
    }


def write_ours(url: str, iterations: tuple[int, ...], **arguments: Any) -> None:
    """Save, commit and point to iterations by the package."""
    catalog = Catalog(url, **arguments)
    for iteration in iterations:
        records = {}
        for name, state in components(iteration).items():
            writer = FsspecStorageWriter.at(
                catalog.folder(iteration).child(name), shard_bytes=64 << 10, overwrite=False
            )
            _save(state, writer)
            report = writer.last_report
            records[name] = ComponentRecord(report.num_files, report.num_bytes, report.save_id)
        record = CommitRecord(iteration, "2026-01-01T00:00:00+00:00", 1, "2", "0", records, {"loss": 10.0 - iteration})
        catalog.commit(record)
        catalog.advance(iteration)


def write_others(folder: Path, kind: str, iterations: tuple[int, ...]) -> None:
    """Save iterations by torch's own writer, as other software lays them out."""
    for iteration in iterations:
        if kind == "cosmos":
            for name, state in components(iteration).items():
                _save(state, dcp.FileSystemWriter(folder / f"iter_{iteration:09d}" / name))
            (folder / "latest_checkpoint.txt").write_text(f"iter_{iteration:09d}\n")
        else:
            place = folder / f"step-{iteration}" if kind == "torchtitan" else folder
            _save(model_state(iteration), dcp.FileSystemWriter(place))


def _save(state: dict[str, Any], writer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def upload(folder: Path, store: Store, name: str) -> None:
    """Put all files of a local folder below `name` of a store."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.raw_write(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@dataclass
class Answer:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The one line on standard error."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err, self.err
        return lines[0]


def flags(store: Store | None, name: str = "--option") -> list[str]:
    """Return the storage options of a store as the command line takes them."""
    return [word for text in _flat((store.storage_options or {}) if store else {}) for word in (name, text)]


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def run(store: Store | None, command: str, *arguments: str, code: int | None = 0) -> Answer:
    """Run a command in this process, with the options of `store`; `code` is what it must exit with."""
    result = CliRunner().invoke(cli, [command, *flags(store), *arguments], prog_name="dcp-fsspec")
    answer = Answer(result.exit_code, result.stdout, result.stderr)
    assert code is None or answer.code == code, f"{answer} {result.exc_info}"
    return answer


def start(*arguments: str, python: tuple[str, ...] = ("-m", "dcp_fsspec.cli")) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    root = str(Path(dcp_fsspec.__file__).parent.parent)
    command = [sys.executable, *python, *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_process(*arguments: str, python: tuple[str, ...] = ("-m", "dcp_fsspec.cli")) -> Answer:
    """Run a command in a process of its own."""
    process = start(*arguments, python=python)
    out, err = process.communicate(timeout=120)
    return Answer(process.returncode, out, err)
