"""One rank of the demo's training job. `demo.py` has torchrun start it; it isn't meant to be run by hand.

    demo_worker.py train  FOLDER    fine-tune, save to the store with FsspecStorageWriter, go on training
    demo_worker.py resume FOLDER    load with FsspecStorageReader into a fresh model, compare, go on training
    demo_worker.py stock  FOLDER    the same in one process with the reader that comes with PyTorch

How to save and to load is in `save`, `load` and `load_with_stock_torch`; the rest is ordinary FSDP2 training
and the comparison. FOLDER is private to one run of the demo. It holds `job.json` (where the checkpoint goes),
`reference.pt` (what was saved, as `train` had it in memory) and, afterwards, an `Outcome` per process group.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim import AdamW

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from minilm import MiniLM, WordPiece, load_pretrained

ITERATIONS_BEFORE_SAVE = 3
PAIRS_PER_ITERATION = 8
LEARNING_RATE = 5e-5

# What the model is fine-tuned on: two sentences, and how similar they are meant to be. An iteration's number
# of pairs divides by 1, 2 and 4 ranks, so that each world size computes the same loss.
PAIRS = [
    ("The cat sleeps on the sofa.", "A cat is having a nap on the couch.", 0.95),
    ("The cat sleeps on the sofa.", "The central bank raised interest rates.", 0.0),
    ("How do I resume a training run?", "What is the way to continue training after a crash?", 0.9),
    ("How do I resume a training run?", "How do I bake bread without yeast?", 0.1),
    ("Storms are expected along the coast.", "Forecasters warn of heavy wind near the sea.", 0.85),
    ("Storms are expected along the coast.", "The museum opens at nine on weekdays.", 0.05),
    ("The upload failed after two minutes.", "Sending the file broke off after 120 seconds.", 0.9),
    ("The upload failed after two minutes.", "She has played the violin since she was six.", 0.0),
    ("Our train leaves from platform four.", "We depart at track 4.", 0.9),
    ("Our train leaves from platform four.", "We train a network on four machines.", 0.15),
    ("A vaccine protects against measles.", "Being vaccinated keeps people from getting measles.", 0.95),
    ("A vaccine protects against measles.", "The recipe asks for two onions.", 0.0),
    ("The disk is full.", "There is no space left on the device.", 0.9),
    ("The disk is full.", "The moon is full tonight.", 0.2),
    ("He fixed the bug within an hour.", "It took him under an hour to repair the defect.", 0.9),
    ("He fixed the bug within an hour.", "The match was cancelled because of rain.", 0.0),
]


@dataclass(frozen=True)
class Job:
    """Where this run of the demo keeps its things."""

    folder: Path
    url: str
    storage_options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Read what `demo.py` wrote into `folder`."""
        return cls(folder, **json.loads((folder / "job.json").read_text()))

    @property
    def reference(self) -> Path:
        """The saved state as the training job had it in memory."""
        return self.folder / "reference.pt"


@dataclass
class Transfer:
    """One save or load: all ranks together, seconds of the slowest one."""

    num_bytes: int | None
    num_requests: int | None
    seconds: float


@dataclass
class Outcome:
    """What rank 0 tells `demo.py` about its process group."""

    transfer: Transfer
    num_tensors: int
    differences: list[str]
    losses: list[float]


def save(state: dict[str, Any], job: Job) -> Transfer:
    """Save `state` to the store. Called by every rank."""
    writer = FsspecStorageWriter(job.url, storage_options=job.storage_options)
    seconds = timed(lambda: dcp.save(state, storage_writer=writer))
    return summed_up(writer.last_report, seconds)


def load(state: dict[str, Any], job: Job) -> Transfer:
    """Load the checkpoint into `state`, however many ranks wrote it. Called by every rank."""
    reader = FsspecStorageReader(job.url, storage_options=job.storage_options)
    seconds = timed(lambda: dcp.load(state, storage_reader=reader))
    return summed_up(reader.last_report, seconds)


def load_with_stock_torch(state: dict[str, Any], job: Job) -> Transfer:
    """Load the checkpoint with PyTorch's own reader: it is an ordinary DCP checkpoint."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    reader = FsspecReader(job.url, **job.storage_options)
    seconds = timed(lambda: dcp.load(state, storage_reader=reader))
    return Transfer(None, None, seconds)


class Training:
    """The model, sharded over the ranks if there are several, and its optimizer."""

    def __init__(self, *, pretrained: bool) -> None:
        self.model = MiniLM()
        if pretrained:
            load_pretrained(self.model)
        self.tokenizer = WordPiece.pretrained()
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def state(self) -> dict[str, Any]:
        """Return the state to save or to load into; its tensors are the live ones, sharded as they are."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over a state that was loaded."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def iterate(self, iteration: int) -> float:
        """Train on the pairs of `iteration` and return the loss, taken before the update."""
        loss = self._loss(iteration)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean_over_ranks(loss)

    def evaluate(self, iteration: int) -> float:
        """Return the loss on the pairs of `iteration`."""
        with torch.no_grad():
            return mean_over_ranks(self._loss(iteration))

    def _loss(self, iteration: int) -> Tensor:
        """Mean squared error of the similarity, over this rank's share of the pairs."""
        start = iteration * PAIRS_PER_ITERATION % len(PAIRS)
        mine = PAIRS[start : start + PAIRS_PER_ITERATION][dist.get_rank() :: dist.get_world_size()]
        first, second, similarity = zip(*mine, strict=True)
        vectors = self.model(*self.tokenizer.batch([*first, *second]))
        cosine = (vectors[: len(mine)] * vectors[len(mine) :]).sum(-1)
        return functional.mse_loss(cosine, torch.tensor(similarity))


def train(job: Job) -> Outcome:
    """Fine-tune, save, keep the reference, and go on: what a resumed run must reproduce."""
    training = Training(pretrained=True)
    for iteration in range(ITERATIONS_BEFORE_SAVE):
        say(f"iteration {iteration}: loss {training.iterate(iteration):.6f}")
    state = training.state()
    transfer = save(state, job)
    reference = dict(full_values(state))
    if dist.get_rank() == 0:
        torch.save(reference, job.reference)
    num_tensors = sum(isinstance(value, Tensor) for value in reference.values())
    return Outcome(transfer, num_tensors, [], go_on(training))


def resume(job: Job, load_into: Callable[[dict[str, Any], Job], Transfer]) -> Outcome:
    """Load into a model and an optimizer that know nothing yet, compare, and go on."""
    training = Training(pretrained=False)
    state = training.state()
    transfer = load_into(state, job)
    training.set_state(state)
    # Compared is what the model and the optimizer hold now, not the dictionary that was loaded.
    num_tensors, differences = compare(full_values(training.state()), job.reference)
    return Outcome(transfer, num_tensors, differences, go_on(training))


def go_on(training: Training) -> list[float]:
    """Train for one more iteration and return the losses before and after its update.

    The one after it also depends on the optimizer's state.
    """
    losses = [training.iterate(ITERATIONS_BEFORE_SAVE), training.evaluate(ITERATIONS_BEFORE_SAVE)]
    say(f"iteration {ITERATIONS_BEFORE_SAVE}: loss {losses[0]:.6f}, after the update {losses[1]:.6f}")
    return losses


def full_values(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a nested state under its dotted name, sharded tensors put together.

    Called by every rank: putting a tensor together is a collective.
    """
    if isinstance(state, dict) and state:
        for key, value in state.items():
            yield from full_values(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, state.full_tensor() if isinstance(state, DTensor) else state


def compare(values: Iterator[tuple[str, Any]], reference: Path) -> tuple[int, list[str]]:
    """Compare the values on every rank with those of `reference`.

    Returns:
        How many tensors there are, and the names of all values that differ on any rank.
    """
    expected = torch.load(reference, mmap=True, weights_only=True)
    num_tensors = 0
    differences: list[str] = []
    for name, value in values:
        num_tensors += isinstance(value, Tensor)
        if name not in expected or not same_bits(value, expected.pop(name)):
            differences.append(name)
    differences += expected  # what is left there is missing here
    on_every_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(on_every_rank, differences)  # a value that isn't sharded, each rank has its own
    return num_tensors, sorted({name for names in on_every_rank for name in names})


def same_bits(left: Any, right: Any) -> bool:
    """Tell whether two leaves are equal; tensors bit for bit, so that NaN is NaN and 0 isn't -0."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))


def timed(operation: Callable[[], object]) -> float:
    """Run `operation` on all ranks at once and return the seconds until the last one is done."""
    dist.barrier()
    start = time.perf_counter()
    operation()
    dist.barrier()
    return time.perf_counter() - start


def summed_up(report: Any, seconds: float) -> Transfer:
    """Add the ranks' reports of one save or load."""
    counts = torch.tensor([report.num_bytes, report.num_requests], dtype=torch.int64)
    dist.all_reduce(counts)
    num_bytes, num_requests = counts.tolist()
    return Transfer(num_bytes, num_requests, seconds)


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of a scalar that every rank has."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(message: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(f"    {message}", flush=True)


def main() -> None:
    """Do what the command line says and leave the outcome in the folder."""
    command, folder = sys.argv[1:]
    job = Job.read(Path(folder))
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # a group of one needs no torchrun and no port
        dist.init_process_group("gloo", f"file://{job.folder / command}.group", rank=0, world_size=1)
    commands = {
        "train": lambda: train(job),
        "resume": lambda: resume(job, load),
        "stock": lambda: resume(job, load_with_stock_torch),
    }
    outcome = commands[command]()
    if dist.get_rank() == 0:
        (job.folder / f"{command}-{dist.get_world_size()}.json").write_text(json.dumps(asdict(outcome)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
