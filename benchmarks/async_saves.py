"""Measure what a save in the background costs the training beside it.

    python -m benchmarks.async_saves --mib 128 --repeat 3

One process trains (a fixed matrix product a step, one thread) and saves its state to a real S3 server behind a link
that limits each connection (8 MB/s, 20 ms). For each way to save, in turn:

    blocked   seconds in the call that begins the save, also as a multiple of a plain copy of the state into memory
              that is already there
    upload    seconds from that call until the checkpoint is complete
    lost      steps not done while the save was under way, against the speed before and after, in seconds per GB

"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import peers
from benchmarks.link import LinkProcess, host_and_port
from benchmarks.peers import Site
from benchmarks.training import Trainer

_WAYS = ("torch+s3torchconnector", "torch+fsspec", "async", "async_with_pinned_mem")


@dataclass(frozen=True)
class Cost:
    """What one save cost."""

    way: str
    blocked_seconds: float
    copy_seconds: float
    upload_seconds: float
    lost_seconds: float
    num_bytes: int


def main(arguments: list[str] | None = None) -> int:
    """Run all ways in turn, each in a fresh process, and print a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.async_saves", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the state")
    parser.add_argument("--repeat", type=int, default=3, help="measured saves of each way; one more warms up")
    parser.add_argument("--rounds", type=int, default=1, help="how often to go through all ways")
    parser.add_argument("--ways", default=",".join(_WAYS))
    parser.add_argument("--json", help="write all costs to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        _measure(options.one, options.mib, options.repeat)
        return 0
    costs = _run_all(options)
    print(_table(costs))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": peers.versions(), "costs": [asdict(cost) for cost in costs]}, file, indent=1)
    return 0


def _run_all(options: argparse.Namespace) -> list[Cost]:
    from dcp_fsspec.testing.servers import SeaweedServer

    costs = []
    with SeaweedServer() as server:
        site = Site(f"s3://{server.bucket}", server.endpoint_url, server.access_key, server.secret_key)
        with LinkProcess(host_and_port(site.endpoint_url), 0.02, 8e6) as link:
            for way in options.ways.split(",") * options.rounds:
                print(f"{way} ...", file=sys.stderr, flush=True)
                costs += _run_one(way, options, Site(site.url, link.endpoint_url, site.access_key, site.secret_key))
    return costs


def _run_one(way: str, options: argparse.Namespace, site: Site) -> list[Cost]:
    command = [sys.executable, "-m", "benchmarks.async_saves", "--one", way]
    command += ["--mib", str(options.mib), "--repeat", str(options.repeat)]
    environment = {**os.environ, "BENCH_SITE": json.dumps(asdict(site))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Cost(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


# In the measured process ---------------------------------------------------------------------------------


def _measure(way: str, mib: int, repeat: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    site = Site(**json.loads(os.environ["BENCH_SITE"])).child(f"async-{uuid.uuid4().hex[:8]}")
    site.export()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # For torch's own upload process.
        model = torch.nn.ParameterDict({f"layer{n}": torch.nn.Parameter(torch.randn(1 << 20)) for n in range(mib // 4)})
        copies = {name: tensor.detach().clone() for name, tensor in model.items()}
        save, end = _saver(way, model, site)
        trainer = Trainer()
        for number in range(repeat + 1):
            cost = _one_save(way, trainer, save, number, model, copies)
            if number:
                print(json.dumps(asdict(cost)), flush=True)
        end()
        dist.destroy_process_group()


def _one_save(way: str, trainer: Trainer, save: Any, number: int, model: Any, copies: dict[str, Any]) -> Cost:
    import torch

    began = time.perf_counter()
    with torch.no_grad():
        for name, tensor in model.items():
            copies[name].copy_(tensor)
    copy_seconds = time.perf_counter() - began
    before = trainer.speed()
    began = time.perf_counter()
    is_done = save(number)
    blocked_seconds = time.perf_counter() - began
    steps = 0
    while not is_done():
        trainer.step()
        steps += 1
    upload_seconds = time.perf_counter() - began
    speed = (before + trainer.speed()) / 2
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in model.values())
    return Cost(way, blocked_seconds, copy_seconds, upload_seconds, upload_seconds - steps / speed, num_bytes)


def _saver(way: str, model: Any, site: Site) -> tuple[Callable[[int], Callable[[], bool]], Callable[[], None]]:
    return _torch_saver(way, model, site) if way.startswith("torch+") else _own_saver(way, model, site)


def _own_saver(way: str, model: Any, site: Site) -> tuple[Callable[[int], Callable[[], bool]], Callable[[], None]]:
    from dcp_fsspec import DistributedCheckpointer

    checkpointer: Any = DistributedCheckpointer(
        site.url,
        storage_options=site.s3fs_options(),
        async_mode=way,  # type: ignore[arg-type]
    )

    def save(number: int) -> Callable[[], bool]:
        checkpointer.save(model, None, None, None, number)
        poll: Callable[[], bool] = checkpointer.poll
        return poll

    return save, checkpointer.finalize


def _torch_saver(way: str, model: Any, site: Site) -> tuple[Callable[[int], Callable[[], bool]], Callable[[], None]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    writer = peers.by_name("torch-fsspec" if way.endswith("+fsspec") else "s3torchconnector").writer

    def save(number: int) -> Callable[[], bool]:
        future: Any = dcp.async_save(
            dict(model.items()),
            storage_writer=writer(site.child(f"iter_{number:09d}")),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

        def is_done() -> bool:
            return bool(future.done()) and future.result() is not None

        return is_done

    return save, lambda: None


def _table(costs: list[Cost]) -> str:
    lines = ["| way | blocked s | x plain copy | upload s | lost s/GB |", "|---|---|---|---|---|"]
    for way in dict.fromkeys(cost.way for cost in costs):
        mine = [cost for cost in costs if cost.way == way]

        def median(value: Callable[[Cost], float], mine: list[Cost] = mine) -> float:
            return statistics.median(map(value, mine))

        lines.append(
            f"| {way} | {median(lambda c: c.blocked_seconds):.3f} "
            f"| {median(lambda c: c.blocked_seconds / c.copy_seconds):.2f} "
            f"| {median(lambda c: c.upload_seconds):.2f} "
            f"| {median(lambda c: c.lost_seconds / c.num_bytes * 1e9):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
