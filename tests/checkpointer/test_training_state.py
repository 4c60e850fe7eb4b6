"""Schedulers, scalers and Python state of every form come back as they were."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import (
    ConfigurationError,
    DistributedCheckpointer,
    IncompatibleStateError,
    PerRank,
    RandomState,
    ResumeConfig,
)
from support.tensors import assert_bits_equal
from support.training import assert_same, make_job


class Values:
    """A component of any state."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def _round_trip(tmp_path: Path, saved: Values, current: Values) -> dict[str, Any]:
    job = make_job()
    DistributedCheckpointer(str(tmp_path), components={"values": saved}).save(*job.parts, 1)
    DistributedCheckpointer(str(tmp_path), components={"values": current}).load(*job.parts)
    return current.values


def test_b20_python_values_come_back_with_their_types(tmp_path: Path) -> None:
    values = {
        "s": "x",
        "none": None,
        "big": 2**70,
        "float": 0.1,
        "int": 3,
        "flag": True,
        "bytes": b"\0",
        "inf": math.inf,
    }
    current = Values(s="", none=5, big=0, float=0, int=0.0, flag=0, bytes=None, inf=0)
    _round_trip(tmp_path, Values(nan=math.nan, **values), current)
    assert math.isnan(current.values.pop("nan"))
    assert_bits_equal(current.values, values)


def test_b20_iteration_and_learning_rate_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    job = make_job(num_steps=3, lr=0.25)
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 1234)
    fresh = make_job(1, lr=9.0)
    assert DistributedCheckpointer(str(tmp_path)).load(*fresh.parts) == 1234
    assert fresh.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"] == 0.125
    assert_same(fresh, job.state())


@pytest.mark.parametrize(
    "value",
    [
        [{"k": 1}, {"k": 2}],
        {"data": {"a": "b"}},
        (1, (2, [3])),
        collections.OrderedDict(b=1, a=torch.ones(2)),
        collections.Counter({5: 2, 10: 1}),
        {5: "int key", (1, 2): "tuple key", None: "none", 1.5: torch.ones(1)},
        {"empty": {}, "list": [], "tuple": ()},
        [[], [[]], {"x": []}],
        {"z": 1, "a": 2, "m": {"9": 1, "10": 2}},
        list(range(12)),
        [torch.ones(1) * number for number in range(12)],
        {"with.dots": {"and.more": 1}},
        {1, 2},
        collections.defaultdict(list, a=[1]),
    ],
    ids=repr,
)
def test_b21_containers_come_back_whatever_is_there_now(tmp_path: Path, value: Any) -> None:
    for number, current in enumerate((Values(), Values(c=[]), Values(c={}), Values(c=5))):
        loaded = _round_trip(tmp_path / str(number), Values(c=value, after=1), current)
        assert list(loaded) == ["c", "after"]
        assert_bits_equal(loaded["c"], value)


@pytest.mark.parametrize("state", [{"a": {"b": 1}, "a.b": 2}, {1: "x", "1": "y"}, {"c": {1: "x", "1": "y"}}])
def test_b21_names_that_collide_are_refused_at_save(tmp_path: Path, state: dict[Any, Any]) -> None:
    values = Values()
    values.values = state
    checkpointer = DistributedCheckpointer(str(tmp_path), components={"values": values})
    with pytest.raises(IncompatibleStateError, match="stored under one name"):
        checkpointer.save(*make_job().parts, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer(str(tmp_path), components={"x": Values(deep={"bad": lambda: 0})})
    with pytest.raises(IncompatibleStateError, match=r"x: 'deep\.bad' is a function that cannot be pickled"):
        checkpointer.save(*make_job().parts, 1)
    assert list(tmp_path.iterdir()) == []


SCHEDULERS = {
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)],
        [2],
    ),
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 10]),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_exactly(tmp_path: Path, kind: str) -> None:
    def rates(job: Any, num_steps: int) -> list[float]:
        found = []
        for number in range(num_steps):
            job.optimizer.step()
            job.scheduler.step(*[1.0 + number] if kind == "plateau" else [])
            found.append(job.optimizer.param_groups[0]["lr"])
        return found

    job = make_job()
    job.scheduler = SCHEDULERS[kind](job.optimizer)
    rates(job, 3)
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 3)
    fresh = make_job(lr=9.0)
    fresh.scheduler = SCHEDULERS[kind](fresh.optimizer)
    DistributedCheckpointer(str(tmp_path)).load(*fresh.parts)
    assert_bits_equal(fresh.scheduler.state_dict(), job.scheduler.state_dict())
    assert rates(fresh, 5) == rates(job, 5)


def test_h44_another_number_of_parameter_groups_is_refused(tmp_path: Path) -> None:
    job = make_job()
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 1)
    model = job.model
    groups = [{"params": [one]} for one in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(IncompatibleStateError, match=r"1 parameter groups \(base_lrs \[0\.1\]\), this one 4"):
        DistributedCheckpointer(str(tmp_path)).load(model, optimizer, scheduler)


def test_h44_a_changed_learning_rate_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job(lr=0.1).parts, 1)
    DistributedCheckpointer(str(tmp_path)).load(*make_job(lr=0.5).parts)
    assert "goes on with the checkpoint's base_lrs [0.1], not with the configured [0.5]" in caplog.text


def test_h44_a_scheduler_without_its_optimizer_sets_the_learning_rate(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path / "source")).save(*make_job(num_steps=4).parts, 4)
    fresh = make_job(1)
    config = ResumeConfig(str(tmp_path / "source"), only_load_scheduler_state=True)
    assert DistributedCheckpointer(str(tmp_path / "job"), resume=config).load(*fresh.parts) == 0
    assert fresh.scheduler.last_epoch == 4
    assert fresh.optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("now", [True, False, None])
def test_h45_a_scaler_that_was_off_or_is_off_is_said(
    tmp_path: Path, saved: bool, now: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    def scaler(enabled: bool, scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)

    job, fresh = make_job(), make_job()
    job.grad_scaler = scaler(saved, 4.0)
    fresh.grad_scaler = scaler(now, 64.0) if now is not None else None
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 1)
    assert DistributedCheckpointer(str(tmp_path)).load(*fresh.parts) == 1
    if now:
        assert fresh.grad_scaler.get_scale() == (4.0 if saved else 64.0)
    assert ("the scaler starts with its initial scale" in caplog.text) == (now is True and not saved)
    assert ("the job has none; it is left out" in caplog.text) == (now is None and saved)


def test_h34_an_iteration_that_is_not_stored_is_taken_from_the_folder_and_said(tmp_path: Path) -> None:
    from support.training import save_by_cosmos_rules, stock_save

    job = make_job()
    save_by_cosmos_rules(tmp_path, 70, job, without="trainer")
    stock_save({"grad_scaler": job.grad_scaler.state_dict()}, tmp_path / "iter_000000070" / "trainer")
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert checkpointer.load(*make_job(1).parts) == 70
    assert any("has no iteration; its folder says 70" in note for note in checkpointer.last_load_report.notes)


@pytest.mark.parametrize("absent", ["optimizer", "scheduler"])
def test_h36_a_missing_object_is_named_before_anything_is_loaded(tmp_path: Path, absent: str) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job().parts, 1)
    fresh = make_job(1)
    before = fresh.state()
    setattr(fresh, absent, None)
    name = {"optimizer": "optim"}.get(absent, absent)
    with pytest.raises(ConfigurationError, match=f"{name} would be loaded from .*iter_000000001"):
        DistributedCheckpointer(str(tmp_path)).load(*fresh.parts)
    assert_bits_equal(dict(fresh.model.state_dict()), before["model"])


def test_h36_a_missing_scaler_is_said_and_the_iteration_is_loaded_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, fresh = make_job(num_steps=2), make_job(1)
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 7)
    assert DistributedCheckpointer(str(tmp_path)).load(fresh.model, fresh.optimizer, fresh.scheduler, None) == 7
    assert "the job has none; it is left out" in caplog.text
    fresh.grad_scaler = job.grad_scaler
    assert_same(fresh, job.state())


class MasterSGD(torch.optim.SGD):
    """Keeps weights of full precision beside its state, where no state dict finds them."""

    def __init__(self, parameters: Any, lr: float, has_state: bool) -> None:
        super().__init__(parameters, lr=lr)
        self.has_state = has_state
        self.master = [one.detach().float().clone() for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for parameter, master in zip(parameters, self.master, strict=True):
            if self.has_state:
                self.state[parameter]["num_steps"] = self.state[parameter].get("num_steps", torch.tensor(0.0)) + 1
            master -= self.param_groups[0]["lr"] * parameter.grad.float()
            parameter.copy_(master)


class Master:
    """A component of what `MasterSGD` keeps beside."""

    def __init__(self, optimizer: MasterSGD) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {str(number): master for number, master in enumerate(self.optimizer.master)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, master in enumerate(self.optimizer.master):
            master.copy_(state[str(number)])


@pytest.mark.parametrize("has_state", [True, False])
def test_h30_master_weights_beside_an_optimizers_state_come_back_as_a_component(
    tmp_path: Path, has_state: bool
) -> None:
    def job(seed: int) -> tuple[torch.nn.Linear, MasterSGD, dict[str, Any]]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3).bfloat16()
        optimizer = MasterSGD(model.parameters(), 1e-4, has_state)
        return model, optimizer, {"components": {"master": Master(optimizer)}}

    def train(model: torch.nn.Linear, optimizer: MasterSGD) -> None:
        for step in range(20):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step), dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()

    model, optimizer, components = job(0)
    train(model, optimizer)
    DistributedCheckpointer(str(tmp_path), **components).save(model, optimizer, None, None, 20)
    fresh, fresh_optimizer, components = job(1)
    assert DistributedCheckpointer(str(tmp_path), **components).load(fresh, fresh_optimizer) == 20
    assert_bits_equal(fresh_optimizer.master, optimizer.master)
    for one in ((model, optimizer), (fresh, fresh_optimizer)):
        train(*one)
    assert_bits_equal(fresh_optimizer.master, optimizer.master)
    assert_bits_equal(dict(fresh.state_dict()), dict(model.state_dict()))


def test_a_job_without_optimizer_and_scheduler_resumes_without_them(tmp_path: Path) -> None:
    job = make_job()
    DistributedCheckpointer(str(tmp_path)).save(job.model, None, None, None, 8)
    fresh = make_job(1)
    assert DistributedCheckpointer(str(tmp_path)).load(fresh.model) == 8
    assert_bits_equal(dict(fresh.model.state_dict()), dict(job.model.state_dict()))


def test_h41_a_component_that_the_checkpoint_lacks_is_an_error_or_a_note(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path)).save(*make_job().parts, 8)
    values = Values(a=1)
    checkpointer = DistributedCheckpointer(str(tmp_path), components={"values": values})
    from dcp_fsspec import CheckpointNotFoundError

    with pytest.raises(CheckpointNotFoundError, match=r"iter_000000008 has no values\. Leave it out by"):
        checkpointer.load(*make_job().parts)
    lenient = DistributedCheckpointer(
        str(tmp_path), components={"values": values}, resume=ResumeConfig(strict_resume=False)
    )
    assert lenient.load(*make_job().parts) == 8
    assert values.values == {"a": 1}
    assert any("has no values, which keeps its state" in note for note in lenient.last_load_report.notes)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[Any]:
        return [random.random(), float(np.random.rand()), torch.rand(3).tolist()]

    job = make_job()
    components = {"rng": PerRank(RandomState())}
    DistributedCheckpointer(str(tmp_path), components=components).save(*job.parts, 1)
    wanted = draw()
    draw()
    DistributedCheckpointer(str(tmp_path), components=components).load(*job.parts)
    assert draw() == wanted


@pytest.mark.parametrize(
    "name", ["model", "a/b", "", ".hidden", "commit.json", "latest_checkpoint.txt", "x" * 101, "a b"]
)
def test_names_that_no_component_can_have_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a component"):
        DistributedCheckpointer(str(tmp_path), components={name: Values()})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path, kind: Any) -> None:
    def job(seed: int) -> Any:
        made = make_job(seed)
        made.optimizer = kind(made.model.parameters(), lr=0.1)
        made.scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 2)
        return made

    one, undisturbed, resumed = job(0), job(0), job(1)
    DistributedCheckpointer(str(tmp_path)).save(*one.parts, 0)
    DistributedCheckpointer(str(tmp_path)).load(*resumed.parts)
    wanted = undisturbed.train(3).state()
    assert_same(one.train(3), wanted)
    assert_same(resumed.train(3), wanted)
