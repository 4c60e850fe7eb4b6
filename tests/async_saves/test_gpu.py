"""Snapshots of GPU tensors: pinned memory, a stream of their own that first waits for the training's, overlap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_fsspec.checkpointer.snapshot import Snapshot, flat_state
from dcp_fsspec.checkpointer.staging import Stager
from support.jobs import BACKGROUND, Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch finds no CUDA device here")


@pytest.fixture
def stager() -> Iterator[Stager]:
    made = Stager(shared=True)
    yield made
    made.close()


def _staged(stager: Stager, tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy `tensor`; return where the copy will be."""
    staged = stager.stage(Snapshot(1, {"model": flat_state({"x": tensor}, "model")}))
    copy: torch.Tensor = staged.components["model"].values["x"].tensors[0]
    return copy


def test_the_memory_is_pinned_and_used_again(stager: Stager) -> None:
    x = torch.ones(1000, device="cuda")
    first = _staged(stager, x)
    stager.synchronize()
    assert first.is_pinned()
    second = _staged(stager, x * 2)
    stager.synchronize()
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, torch.full((1000,), 2.0))


def test_h05_the_copy_waits_for_what_the_training_has_queued(stager: Stager) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    x += 1  # Queued behind the sleep; a copy that does not wait sees zeros.
    copy = _staged(stager, x)
    assert not stager.is_ready()
    stager.synchronize()
    assert bool((copy == 1).all())


def test_the_copy_runs_beside_the_training(stager: Stager) -> None:
    """The training's stream is not held up by the copy, nor the calling thread."""
    x = torch.ones(1 << 28, device="cuda")
    torch.cuda.synchronize()
    _staged(stager, x)
    torch.cuda.synchronize()
    copied, stepped = torch.cuda.Event(), torch.cuda.Event()
    _staged(stager, x)
    copied.record(next(iter(stager._streams.values())))
    torch.ones(10, device="cuda").add_(1)
    stepped.record()
    stepped.synchronize()
    assert not copied.query()
    stager.synchronize()


def test_memory_freed_while_it_is_copied_is_not_given_to_others(stager: Stager) -> None:
    torch.cuda._sleep(100_000_000)
    copy = _staged(stager, torch.ones(1 << 20, device="cuda"))
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
    stager.synchronize()
    assert bool((copy == 1).all())
    assert len(others) == 4


def test_h06_a_tensor_without_dimensions_is_copied(stager: Stager) -> None:
    x = torch.tensor(3.0, device="cuda")
    copy = _staged(stager, x)
    stager.synchronize()
    x.zero_()
    assert copy.item() == 3.0
    assert copy.device.type == "cpu"


@pytest.mark.parametrize("mode", BACKGROUND)
@pytest.mark.parametrize("wait", [True, False])
def test_a_save_from_a_gpu_is_what_was_there_and_its_process_has_no_context(
    mode: str, wait: bool, tmp_path: Path
) -> None:
    job = Job(str(tmp_path / "run"), async_mode=mode, width=2048)
    job.model.cuda()
    wanted = {key: value.clone() for key, value in job.model.state_dict().items()}
    job.save(1, wait_for_staging=wait)
    job.checkpointer.maybe_wait_for_staging()
    with torch.no_grad():
        job.model.weight.zero_()
    if mode == "async_with_pinned_mem":
        assert not any("nvidia" in each.path for each in job.worker.memory_maps() if "uvm" in each.path)
    job.checkpointer.finalize()
    fresh = Job(str(tmp_path / "run"), width=2048)
    fresh.load()
    assert all(torch.equal(fresh.model.state_dict()[key], value.cpu()) for key, value in wanted.items())
