"""What of a checkpoint is loaded: missing, unexpected and mismatched keys, dtypes, reports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import DistributedCheckpointer, IncompatibleStateError, ResumeConfig
from support.tensors import assert_bits_equal
from support.training import Net, assert_same, make_job, stock_save


class Holder(torch.nn.Module):
    """A model of the buffers given to it."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def _warm(tmp_path: Path, saved: dict[str, Any], model: torch.nn.Module, **config: Any) -> DistributedCheckpointer:
    """Save `saved` as the model component of another job and load it into `model`."""
    stock_save(saved, tmp_path / "source" / "model")
    resume = ResumeConfig(str(tmp_path / "source"), **config)
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=resume)
    checkpointer.load(model)
    return checkpointer


def test_b11_keys_without_a_match_are_an_error_in_strict_mode_and_nothing_is_touched(tmp_path: Path) -> None:
    model = Holder(a=torch.full((2,), 7.0), b=torch.full((2,), 7.0))
    with pytest.raises(IncompatibleStateError, match="'b' is missing in the checkpoint") as caught:
        _warm(tmp_path, {"a": torch.ones(2), "c": torch.ones(2)}, model)
    assert "'c' is in the checkpoint only" in str(caught.value)
    assert f"{tmp_path}/source" in str(caught.value)
    assert_bits_equal(dict(model.state_dict()), {"a": torch.full((2,), 7.0), "b": torch.full((2,), 7.0)})


@pytest.mark.parametrize("strict", [True, False])
def test_b11_zero_matching_keys_are_an_error_also_when_not_strict(tmp_path: Path, strict: bool) -> None:
    with pytest.raises(IncompatibleStateError, match="not one key is the same; here 'net_a'") as caught:
        _warm(tmp_path, {"a": torch.ones(2)}, Holder(net_a=torch.zeros(2)), strict_resume=strict)
    assert "in the checkpoint 'a'" in str(caught.value)


def test_h33_a_partial_load_says_what_was_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Holder(a=torch.zeros(2), b=torch.full((2,), 7.0))
    saved = {"a": torch.ones(2), "c": torch.ones(2)}
    with caplog.at_level(logging.INFO):
        report = _warm(tmp_path, saved, model, strict_resume=False).last_load_report
    one = report.components["model"]
    assert (one.loaded, one.missing, one.unexpected) == (["a"], ["b"], ["c"])
    assert not report.is_complete
    assert_bits_equal(dict(model.state_dict()), {"a": torch.ones(2), "b": torch.full((2,), 7.0)})
    [record] = [record for record in caplog.records if "warm start from" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "1 missing in the checkpoint, kept as they are: b" in record.getMessage()
    assert "1 in the checkpoint only: c" in record.getMessage()


SHAPES = [((4,), (3,)), ((), (1,)), ((8, 4), (8, 6))]


@pytest.mark.parametrize(("saved", "here"), SHAPES)
@pytest.mark.parametrize("strict", [True, False])
def test_b12_another_shape_is_an_error_that_names_both_and_loads_nothing(
    tmp_path: Path, saved: tuple[int, ...], here: tuple[int, ...], strict: bool
) -> None:
    model = Holder(good=torch.zeros(2), w=torch.zeros(here))
    with pytest.raises(IncompatibleStateError) as caught:
        _warm(tmp_path, {"good": torch.ones(2), "w": torch.ones(saved)}, model, strict_resume=strict)
    assert f"'w' is {saved} in the checkpoint, {here} here" in str(caught.value)
    assert not model.good.any()


@pytest.mark.parametrize(("saved", "here"), SHAPES)
def test_b12_another_shape_can_be_skipped(tmp_path: Path, saved: tuple[int, ...], here: tuple[int, ...]) -> None:
    model = Holder(good=torch.zeros(2), w=torch.full(here, 7.0))
    loaded = _warm(tmp_path, {"good": torch.ones(2), "w": torch.ones(saved)}, model, mismatched="skip")
    assert loaded.last_load_report.components["model"].mismatched == {"w": f"{saved} in the checkpoint, {here} here"}
    assert_bits_equal(dict(model.state_dict()), {"good": torch.ones(2), "w": torch.full(here, 7.0)})


@pytest.mark.parametrize(("saved", "here"), [((8, 4), (8, 6)), ((4,), (3,)), ((3, 4), (5, 2)), ((2, 3, 4), (1, 5, 2))])
def test_b12_what_overlaps_is_loaded_where_that_was_asked_for(
    tmp_path: Path, saved: tuple[int, ...], here: tuple[int, ...]
) -> None:
    source = torch.arange(float(torch.Size(saved).numel())).reshape(saved) + 1
    model = Holder(good=torch.zeros(2), w=torch.full(here, -7.0))
    loaded = _warm(tmp_path, {"good": torch.ones(2), "w": source}, model, overlap_keys=["w"])
    region = tuple(slice(0, min(one, other)) for one, other in zip(saved, here, strict=True))
    wanted = torch.full(here, -7.0)
    wanted[region] = source[region]
    assert_bits_equal(dict(model.state_dict()), {"good": torch.ones(2), "w": wanted})
    assert list(loaded.last_load_report.components["model"].mismatched) == ["w"]


@pytest.mark.parametrize("config", [{"overlap_keys": ["w"]}, {"overlap_keys": ["w"], "mismatched": "skip"}])
def test_h52_other_dimensions_never_overlap(tmp_path: Path, config: dict[str, Any]) -> None:
    model = Holder(w=torch.zeros(4, 1), other=torch.zeros(1))
    with pytest.raises(IncompatibleStateError, match="shapes of other dimensions do not overlap"):
        _warm(tmp_path, {"w": torch.ones(4), "other": torch.ones(1)}, model, **config)


def test_an_overlap_is_for_the_named_keys_only(tmp_path: Path) -> None:
    model = Holder(w=torch.zeros(2), v=torch.zeros(2))
    with pytest.raises(IncompatibleStateError, match="'v' is") as caught:
        _warm(tmp_path, {"w": torch.ones(3), "v": torch.ones(3)}, model, overlap_keys=["w"])
    assert "'w' is" not in str(caught.value)


def test_what_is_forgiven_for_a_warm_start_is_not_for_the_jobs_own(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path)).save(Holder(w=torch.ones(3), v=torch.ones(1)), None, None, None, 5)
    model = Holder(w=torch.zeros(2), v=torch.zeros(1))
    for config in (ResumeConfig(mismatched="skip"), ResumeConfig(overlap_keys=["w"])):
        with pytest.raises(IncompatibleStateError, match="'w' is"):
            DistributedCheckpointer(str(tmp_path), resume=config).load(model)


@pytest.mark.parametrize(
    ("saved", "current"),
    [
        (torch.zeros(2322, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        (b"abc", None),
        (None, torch.zeros(4, dtype=torch.uint8)),
    ],
)
def test_b15_extra_state_of_another_form_is_left_out_and_said(tmp_path: Path, saved: Any, current: Any) -> None:
    class WithExtra(Net):
        def get_extra_state(self) -> Any:
            return current

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("nothing to set")

    source, model = make_job(1).model, make_job(2, model=WithExtra()).model
    state = {**source.state_dict(), "net.0._extra_state": saved, "_extra_state": saved}
    report = _warm(tmp_path, state, model).last_load_report
    assert_bits_equal({key: model.state_dict()[key] for key in source.state_dict()}, dict(source.state_dict()))
    assert set(report.components["model"].skipped) == {"_extra_state", "net.0._extra_state"}
    assert report.is_complete


def test_b22_narrowing_is_named_and_widening_is_exact_and_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = torch.tensor([1.23456789])
    model = Holder(narrow=torch.zeros(1, dtype=torch.bfloat16), wide=torch.zeros(1, dtype=torch.float64))
    report = _warm(tmp_path, {"narrow": value, "wide": value}, model).last_load_report
    assert report.components["model"].cast == {"narrow": "float32 in the checkpoint, bfloat16 here"}
    assert caplog.text.count("narrow (float32 in the checkpoint, bfloat16 here)") == 1
    assert_bits_equal(dict(model.state_dict()), {"narrow": value.bfloat16(), "wide": value.double()})


@pytest.mark.parametrize(
    ("saved", "here"),
    [(torch.tensor([1.9, -1.9, 3e9]), torch.int32), (torch.tensor([1 + 2j]), torch.float32)],
)
def test_b22_a_cast_that_changes_the_meaning_is_an_error_unless_asked_for(
    tmp_path: Path, saved: torch.Tensor, here: torch.dtype
) -> None:
    model = Holder(w=torch.zeros(saved.shape, dtype=here))
    with pytest.raises(IncompatibleStateError, match=r"'w' is .* pass allow_lossy_casts=True"):
        _warm(tmp_path, {"w": saved}, model)
    report = _warm(tmp_path, {"w": saved}, model, allow_lossy_casts=True).last_load_report
    assert list(report.components["model"].cast) == ["w"]


def test_b14_a_parameter_that_never_had_a_gradient_begins_afresh(tmp_path: Path) -> None:
    def job(seed: int) -> tuple[torch.nn.ModuleDict, torch.optim.AdamW]:
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.3 if seed == 1 else 9.0)

    model, optimizer = job(1)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    DistributedCheckpointer(str(tmp_path)).save(model, optimizer, None, None, 1)

    fresh, restored = job(2)
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert checkpointer.load(fresh, restored) == 1
    assert restored.param_groups[0]["lr"] == 0.3
    for name in ("weight", "bias"):
        state = restored.state[getattr(fresh["used"], name)]
        assert_bits_equal(dict(state), dict(optimizer.state[getattr(model["used"], name)]))
        assert getattr(fresh["unused"], name) not in restored.state
    assert "state.unused.weight.exp_avg" in checkpointer.last_load_report.components["optim"].missing
    sum(one(torch.ones(1, 2)).sum() for one in fresh.values()).backward()
    restored.step()


def test_b14_a_hyperparameter_that_the_checkpoint_does_not_know_keeps_its_default(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from support.training import FLAT

    job = make_job(num_steps=2, lr=0.3)
    optim = get_optimizer_state_dict(job.model, job.optimizer, options=FLAT)
    stock_save(dict(job.model.state_dict()), tmp_path / "source" / "model")
    stock_save(
        {key: value for key, value in optim.items() if "decoupled_weight_decay" not in key},
        tmp_path / "source" / "optim",
    )
    fresh = make_job(1, lr=9.0)
    left_out = ["scheduler", "trainer"]
    config = ResumeConfig(str(tmp_path / "source"), load_training_state=True, keys_not_to_resume=left_out)
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=config)
    checkpointer.load(*fresh.parts)
    assert_bits_equal(fresh.state()["optim"], job.state()["optim"])
    missing = checkpointer.last_load_report.components["optim"].missing
    assert missing
    assert all("decoupled_weight_decay" in key for key in missing)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_b14_plain_sgd_has_no_state_to_invent(tmp_path: Path, momentum: float) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    DistributedCheckpointer(str(tmp_path)).save(model, optimizer, None, None, 1)
    fresh = Net()
    restored = torch.optim.SGD(fresh.parameters(), lr=9.0, momentum=momentum)
    DistributedCheckpointer(str(tmp_path)).load(fresh, restored)
    assert restored.param_groups[0]["lr"] == 0.3
    assert all(restored.state[one] == {} for one in fresh.parameters()) or momentum
    fresh(torch.ones(1, 4)).sum().backward()
    restored.step()


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, strict: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    DistributedCheckpointer(str(tmp_path)).save(model, optimizer, None, None, 1)
    config = ResumeConfig(keys_not_to_resume=["scheduler"], filter_auto_resume=True, strict_resume=strict)
    with pytest.raises(IncompatibleStateError, match="optim: "):
        DistributedCheckpointer(str(tmp_path), resume=config).load(*make_job().parts)


def test_the_report_counts_what_was_read(tmp_path: Path) -> None:
    job = make_job(num_steps=1)
    DistributedCheckpointer(str(tmp_path)).save(*job.parts, 5)
    fresh = make_job(1)
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert str(checkpointer.last_load_report) == "nothing loaded"
    checkpointer.load(*fresh.parts)
    assert_same(fresh, job.state())
    report = checkpointer.last_load_report
    assert (report.url, report.iteration, report.is_auto_resume) == (f"{tmp_path}/iter_000000005", 5, True)
    assert list(report.components) == ["model", "optim", "scheduler", "trainer"]
    assert report.is_complete
    for one in report.components.values():
        assert one.loaded
        assert one.num_bytes > 0
        assert one.num_requests > 0
    assert f"resumed from {tmp_path}/iter_000000005 at iteration 5" in str(report)
