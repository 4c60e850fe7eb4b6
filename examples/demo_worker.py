"""One process of the demo's job: `train.py`, and after it a look at what the model and the optimizer hold.

    demo_worker.py train OUTCOME    train, or go on with the training, to its end
    demo_worker.py load OUTCOME     load the latest checkpoint into a model that knows nothing
    demo_worker.py stock OUTCOME    the same with the reader that comes with PyTorch

`demo.py` starts it, under torchrun if there are several ranks, with the settings of the job in the environment.
Rank 0 leaves an `Outcome` in the file OUTCOME.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import train

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Outcome:
    """What rank 0 tells `demo.py`.

    Attributes:
        num_bytes: moved by all ranks in the last save, or in the load; None where it was not counted.
        num_requests: the same.
        seconds: of it.
        digests: of each value that the model, the optimizer and the schedule hold now, by name.
    """

    num_bytes: int | None
    num_requests: int | None
    seconds: float
    digests: dict[str, str]


def run_training(settings: train.Settings) -> Outcome:
    """Train to the end."""
    job = train.train(settings)
    saved = job.checkpointer.last_outcome
    assert saved is not None
    return Outcome(saved.num_bytes, saved.num_requests, saved.seconds, digests(job))


def load(settings: train.Settings) -> Outcome:
    """Load with the checkpointer, on as many ranks as there are."""
    job = blank_job(settings)
    start = time.perf_counter()
    job.load()
    seconds = time.perf_counter() - start
    report = job.checkpointer.last_load_report
    counts = torch.tensor([[one.num_bytes, one.num_requests] for one in report.components.values()]).sum(0)
    if dist.is_initialized():
        dist.all_reduce(counts)
    num_bytes, num_requests = counts.tolist()
    return Outcome(num_bytes, num_requests, seconds, digests(job))


def load_with_stock_torch(settings: train.Settings) -> Outcome:
    """Load with PyTorch's own reader, in one process."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
    job = blank_job(settings)
    folder = f"{settings.url}/iter_{settings.iterations:09d}"
    start = time.perf_counter()
    model = get_model_state_dict(job.model)
    dcp.load(model, storage_reader=FsspecReader(f"{folder}/model", **settings.storage_options))
    optimizer = get_optimizer_state_dict(job.model, job.optimizer, options=FLAT)
    dcp.load(optimizer, storage_reader=FsspecReader(f"{folder}/optim", **settings.storage_options))
    set_optimizer_state_dict(job.model, job.optimizer, optimizer, options=FLAT)
    schedule = job.scheduler.state_dict()
    dcp.load(schedule, storage_reader=FsspecReader(f"{folder}/scheduler", **settings.storage_options))
    job.scheduler.load_state_dict(schedule)
    return Outcome(None, None, time.perf_counter() - start, digests(job))


def blank_job(settings: train.Settings) -> train.Job:
    """Return a job whose weights are all NaN: what is right afterwards was loaded."""
    job = train.Job(settings)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(torch.nan)
    return job


def digests(job: train.Job) -> dict[str, str]:
    """Return a digest of each value, sharded tensors put together. Collective."""
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optim": optimizer, "scheduler": job.scheduler.state_dict()}
    return {name: digest(value) for name, value in leaves(state)}


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nested state under its dotted name."""
    if isinstance(state, dict) and state:
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state.full_tensor() if isinstance(state, DTensor) else state


def digest(value: Any) -> str:
    """Return what is the same for two values only if they are equal, tensors bit for bit."""
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{value.dtype} {tuple(value.shape)} {hashlib.blake2b(content, digest_size=16).hexdigest()}"


def main() -> None:
    """Do what the command line says."""
    command, outcome_file = sys.argv[1:]
    settings = train.Settings.read([])
    train.set_up()
    commands = {"train": run_training, "load": load, "stock": load_with_stock_torch}
    outcome = commands[command](settings)
    if train.is_first_rank():
        Path(outcome_file).write_text(json.dumps(asdict(outcome)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
