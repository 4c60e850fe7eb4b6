"""A load that is refused leaves the job as it was: model, optimizer, scheduler and scaler, fresh or trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DcpFsspecError,
    DistributedCheckpointer,
    IncompatibleStateError,
    StorageReadError,
    UncommittedCheckpointError,
)
from support.ranks import RankPool, values
from support.stores import FolderStore
from support.tensors import assert_bits_equal
from support.training import Job, Net, assert_same, make_job

FOLDER = "job/iter_000000005"


class Other(Net):
    """Has a weight more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


def _in_groups(seed: int, num_steps: int) -> Job:
    """A job whose optimizer and scheduler have more parameter groups, with the same names of parameters."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW([{"params": [one]} for one in model.parameters()], lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return Job(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=4.0)).train(num_steps)


def _with(make_model: Callable[[], torch.nn.Module]) -> Callable[[int, int], Job]:
    def make(seed: int, num_steps: int) -> Job:
        torch.manual_seed(seed)
        return make_job(seed, num_steps, lr=0.3, model=make_model())

    return make


_plain = _with(Net)


def _keep(store: FolderStore) -> None:
    """The checkpoint is as it should be."""


REASONS: dict[str, tuple[Callable[[int, int], Job], Callable[[FolderStore], None], type[DcpFsspecError]]] = {
    "a key is missing": (_with(Other), _keep, IncompatibleStateError),
    "another shape": (_with(lambda: Net(5)), _keep, IncompatibleStateError),
    "parameter groups of the scheduler": (_in_groups, _keep, IncompatibleStateError),
    "no trainer": (_plain, lambda store: store.raw_delete(f"{FOLDER}/trainer/.metadata"), CheckpointNotFoundError),
    "damaged metadata of the last component": (
        _plain,
        lambda store: store.flip(f"{FOLDER}/trainer/.metadata", 40),
        CorruptCheckpointError,
    ),
    "not committed": (_plain, lambda store: store.raw_delete(f"{FOLDER}/commit.json"), UncommittedCheckpointError),
}


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("reason", REASONS)
def test_a_refused_load_leaves_everything_as_it_was(tmp_path: Path, reason: str, num_steps: int) -> None:
    make, damage, error = REASONS[reason]
    store = FolderStore(tmp_path, str(tmp_path))
    DistributedCheckpointer(store.below("job")).save(*make_job(num_steps=2).parts, 5)
    damage(store)
    job = make(1, num_steps)
    before, undisturbed = job.state(), make(1, num_steps)
    with pytest.raises(error):
        DistributedCheckpointer(store.below("job")).load(*job.parts, iteration=5)
    assert_same(job, before)
    assert all(parameter.grad is None for parameter in job.model.parameters()) or num_steps
    assert_same(job.train(2), undisturbed.train(2).state())


@pytest.mark.parametrize("component", ["model", "scheduler"])
def test_a_fresh_optimizer_stays_fresh_when_reading_fails_before_its_turn(tmp_path: Path, component: str) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job(num_steps=2).parts, 5)
    job = make_job(1)
    (shard,) = (tmp_path / "iter_000000005" / component).glob("*.distcp")
    shard.unlink()
    with pytest.raises((StorageReadError, CheckpointNotFoundError, CorruptCheckpointError)):
        DistributedCheckpointer(str(tmp_path)).load(*job.parts)
    assert not job.optimizer.state


def test_h36_a_missing_optimizer_or_scheduler_is_refused_before_the_fresh_optimizer_is_touched(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job(num_steps=2).parts, 5)
    job = make_job(1)
    before = job.state()
    with pytest.raises(ConfigurationError, match="scheduler would be loaded"):
        DistributedCheckpointer(str(tmp_path)).load(job.model, job.optimizer, None, job.grad_scaler)
    assert_same(job, before)


def _load_with_one_rank_of_another_model(rank: int, url: str) -> None:
    job = make_job(1, model=Other() if rank == 1 else Net())
    before = job.state()
    with pytest.raises(IncompatibleStateError, match="rank 1"):
        DistributedCheckpointer(url).load(*job.parts)
    assert_bits_equal(job.state(), before)


@pytest.mark.distributed
def test_what_one_rank_refuses_changes_nothing_on_any(two_ranks: RankPool, tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job(num_steps=2).parts, 5)
    values(two_ranks.run(_load_with_one_rank_of_another_model, str(tmp_path)))


def test_an_optimizer_that_did_not_take_its_state_is_refused_by_a_message_that_says_what_was_loaded(
    tmp_path: Path,
) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job(num_steps=2).parts, 5)

    class Stubborn(torch.optim.AdamW):
        def load_state_dict(self, state_dict: Any) -> None:
            raise ValueError("no")

    job = make_job(1)
    job.optimizer = Stubborn(job.model.parameters(), lr=0.1)
    with pytest.raises(IncompatibleStateError, match=r"did not take the stored state: no; .*model.* loaded already"):
        DistributedCheckpointer(str(tmp_path)).load(*job.parts)
