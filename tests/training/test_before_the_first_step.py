"""A save before the first step of the optimizer."""

from __future__ import annotations

from pathlib import Path

import torch

from dcp_fsspec import DistributedCheckpointer
from support.tensors import assert_bits_equal


class _Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2)

    def train(self) -> dict[str, torch.Tensor]:
        for iteration in range(3):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(iteration))
            self.model(inputs).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self.model.state_dict()


def test_a_save_at_iteration_0_changes_nothing_and_resuming_from_it_neither(tmp_path: Path) -> None:
    wanted = _Job().train()
    url = str(tmp_path / "job")

    saving = _Job()
    DistributedCheckpointer(url).save(saving.model, saving.optimizer, saving.scheduler, None, 0)
    assert not saving.optimizer.state
    assert_bits_equal(saving.train(), wanted)

    resuming = _Job()
    with torch.no_grad():
        resuming.model.weight.zero_()
    assert DistributedCheckpointer(url).load(resuming.model, resuming.optimizer, resuming.scheduler) == 0
    assert not resuming.optimizer.state
    assert_bits_equal(resuming.train(), wanted)
