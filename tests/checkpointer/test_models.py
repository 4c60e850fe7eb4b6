"""Names of keys: lists of models and optimizers, averaged weights, LoRA, mappings of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from dcp_fsspec import ConfigurationError, DistributedCheckpointer, IncompatibleStateError, ResumeConfig
from dcp_fsspec.checkpointer.mapping import prefixes
from support.tensors import assert_bits_equal
from support.training import Net, make_job, stock_load, stock_save


def _stages(seed: int) -> list[torch.nn.Module]:
    torch.manual_seed(seed)
    return [torch.nn.ModuleDict({f"stage{number}": torch.nn.Linear(2, 2)}) for number in range(2)]


def _optimizers(stages: list[torch.nn.Module], lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(stage.parameters(), lr=lr * (number + 1)) for number, stage in enumerate(stages)]


def _step(stages: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for stage, optimizer in zip(stages, optimizers, strict=True):
        sum(one.square().sum() for one in stage.parameters()).backward()
        optimizer.step()


def test_lists_of_models_and_optimizers_are_one_checkpoint_of_all(tmp_path: Path) -> None:
    stages = _stages(1)
    optimizers = _optimizers(stages, 0.1)
    _step(stages, optimizers)
    DistributedCheckpointer(str(tmp_path)).save(stages, optimizers, None, None, 1)
    fresh = _stages(2)
    restored = _optimizers(fresh, 9.0)
    DistributedCheckpointer(str(tmp_path)).load(fresh, restored)
    for one, other in zip([*fresh, *restored], [*stages, *optimizers], strict=True):
        assert_bits_equal(dict(one.state_dict()), dict(other.state_dict()))
    # One model of the same keys takes it as well.
    whole = torch.nn.ModuleDict({f"stage{number}": torch.nn.Linear(2, 2) for number in range(2)})
    config = ResumeConfig(str(tmp_path / "iter_000000001"))
    DistributedCheckpointer(str(tmp_path / "other"), resume=config).load(whole)
    assert_bits_equal(dict(whole.state_dict()), {**stages[0].state_dict(), **stages[1].state_dict()})


def test_several_optimizers_of_one_model(tmp_path: Path) -> None:
    def job(seed: int, lr: float) -> tuple[Net, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = Net()
        return model, [
            torch.optim.AdamW(model.net[0].parameters(), lr=lr),
            torch.optim.SGD(model.net[2].parameters(), lr=2 * lr, momentum=0.9),
        ]

    model, optimizers = job(1, 0.1)
    model(torch.ones(1, 4)).sum().backward()
    for one in optimizers:
        one.step()
    DistributedCheckpointer(str(tmp_path)).save(model, optimizers, None, None, 1)
    fresh, restored = job(2, 9.0)
    DistributedCheckpointer(str(tmp_path)).load(fresh, restored)
    for one, other in zip(restored, optimizers, strict=True):
        assert_bits_equal(one.state_dict()["state"], other.state_dict()["state"])
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_h53_models_with_a_key_in_common_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"two of the models have the key 'net\.0\.weight' and 3 more"):
        DistributedCheckpointer(str(tmp_path)).save([Net(), Net()], None, None, None, 1)
    assert list(tmp_path.iterdir()) == []


def test_lists_of_other_lengths_are_refused(tmp_path: Path) -> None:
    stages = _stages(1)
    with pytest.raises(ConfigurationError, match="2 models need as many optimizers, got 1"):
        DistributedCheckpointer(str(tmp_path)).save(stages, _optimizers(stages, 0.1)[:1], None, None, 1)


class Ema(torch.nn.Module):
    """Regular and averaged weights, with an inner part that is called ``net`` too."""

    def __init__(self, seed: int, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in names:
            setattr(self, name, torch.nn.ModuleDict({"subnet": torch.nn.Linear(2, 2), "net": torch.nn.Linear(2, 2)}))


def _ema_source(tmp_path: Path) -> Ema:
    source = Ema(1, ("net", "net_ema"))
    DistributedCheckpointer(str(tmp_path / "source")).save(source, None, None, None, 1)
    return source


def test_h47_averaged_weights_are_found_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    source, model = _ema_source(tmp_path), Ema(2, ("net",))
    config = ResumeConfig(str(tmp_path / "source"), load_ema_to_reg=True)
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=config)
    assert checkpointer.load(model) == 0
    assert_bits_equal(dict(model.net.state_dict()), dict(source.net_ema.state_dict()))
    report = checkpointer.last_load_report.components["model"]
    assert report.unexpected == []
    assert "net.subnet.weight" in report.skipped


def test_h50_averaged_weights_are_for_a_warm_start_only(tmp_path: Path) -> None:
    _ema_source(tmp_path)
    own = Ema(3, ("net",))
    config = ResumeConfig(str(tmp_path / "source"), load_ema_to_reg=True)
    DistributedCheckpointer(str(tmp_path / "job"), resume=config).save(own, None, None, None, 4)
    stored = stock_load(
        {key: torch.zeros_like(value) for key, value in own.state_dict().items()},
        tmp_path / "job" / "iter_000000004" / "model",
    )
    assert_bits_equal(stored, dict(own.state_dict()))
    model = Ema(2, ("net",))
    assert DistributedCheckpointer(str(tmp_path / "job"), resume=config).load(model) == 4
    assert_bits_equal(dict(model.state_dict()), dict(own.state_dict()))
    with pytest.raises(ConfigurationError, match="load_ema_to_reg"):
        ResumeConfig("x", load_ema_to_reg=True, load_training_state=True)


def test_averaged_weights_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    DistributedCheckpointer(str(tmp_path / "source")).save(Ema(1, ("net",)), None, None, None, 1)
    config = ResumeConfig(str(tmp_path / "source"), load_ema_to_reg=True)
    with pytest.raises(IncompatibleStateError, match=r"'net\.net\.bias' is missing"):
        DistributedCheckpointer(str(tmp_path / "job"), resume=config).load(Ema(2, ("net",)))


class Lora(torch.nn.Module):
    """A wrapped layer, and another module that only happens to be called ``base_layer``."""

    def __init__(self, seed: int, *, wrapped: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        q = torch.nn.Linear(2, 2)
        self.net = torch.nn.ModuleDict({"plain": torch.nn.ModuleDict({"base_layer": torch.nn.Linear(2, 2)})})
        if not wrapped:
            self.net["q"] = q
            return
        self.net["q"] = torch.nn.ModuleDict(
            {"base_layer": q, "lora_A": torch.nn.Linear(2, 1, bias=False), "lora_B": torch.nn.Linear(1, 2, bias=False)}
        )


def _lora_job(seed: int) -> tuple[Lora, torch.optim.Optimizer]:
    model = Lora(seed, wrapped=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(one.square().sum() for one in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


def test_h49_lora_weights_come_back_with_their_optimizer(tmp_path: Path) -> None:
    model, optimizer = _lora_job(1)
    DistributedCheckpointer(str(tmp_path)).save(model, optimizer, None, None, 1)
    fresh, restored = _lora_job(2)
    DistributedCheckpointer(str(tmp_path)).load(fresh, restored)
    assert_bits_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert_bits_equal(restored.state_dict(), optimizer.state_dict())


def test_h49_weights_of_before_load_into_the_wrapped_layers_and_back(tmp_path: Path) -> None:
    plain = Lora(1, wrapped=False)
    DistributedCheckpointer(str(tmp_path / "a")).save(plain, None, None, None, 1)
    wrapped = Lora(2, wrapped=True)
    config = ResumeConfig(str(tmp_path / "a"), strict_resume=False)
    checkpointer = DistributedCheckpointer(str(tmp_path / "b"), resume=config)
    checkpointer.load(wrapped)
    assert_bits_equal(dict(wrapped.net["q"]["base_layer"].state_dict()), dict(plain.net["q"].state_dict()))
    assert_bits_equal(dict(wrapped.net["plain"].state_dict()), dict(plain.net["plain"].state_dict()))
    missing = checkpointer.last_load_report.components["model"].missing
    assert sorted(missing) == ["net.q.lora_A.weight", "net.q.lora_B.weight"]

    checkpointer.save(wrapped, None, None, None, 1)
    again = Lora(3, wrapped=False)
    back = ResumeConfig(str(tmp_path / "b"), strict_resume=False)
    DistributedCheckpointer(str(tmp_path / "c"), resume=back).load(again)
    assert_bits_equal(dict(again.state_dict()), dict(plain.state_dict()))


def test_h48_names_are_mapped_both_ways(tmp_path: Path) -> None:
    mapping = prefixes({"net.": "student.", "net.2.": "head."})
    job = make_job(num_steps=2)
    DistributedCheckpointer(str(tmp_path), key_mapping=mapping).save(*job.parts, 1)
    names = {"net.0.weight": "student.0.weight", "net.2.bias": "head.bias"}
    like = {stored: torch.zeros_like(job.model.state_dict()[name]) for name, stored in names.items()}
    stock_load(like, tmp_path / "iter_000000001" / "model")
    assert_bits_equal(like, {stored: job.model.state_dict()[name] for name, stored in names.items()})
    fresh = make_job(1)
    DistributedCheckpointer(str(tmp_path), key_mapping=mapping).load(*fresh.parts)
    assert_bits_equal(fresh.state(), job.state())
    warm = make_job(2)
    config = ResumeConfig(str(tmp_path), key_mapping=mapping)
    DistributedCheckpointer(str(tmp_path / "other"), resume=config).load(*warm.parts)
    assert_bits_equal(warm.state()["model"], job.state()["model"])


def test_a_mapping_of_two_keys_to_one_name_is_refused(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    checkpointer = DistributedCheckpointer(str(tmp_path), key_mapping=prefixes({"a.": "b."}))
    with pytest.raises(ConfigurationError, match=r"'a\.\w+' and 'b\.\w+' would both be 'b\."):
        checkpointer.save(model, None, None, None, 1)


def test_wrappers_leave_no_trace_in_the_names(tmp_path: Path) -> None:
    source = Net()
    stock_save(dict(source.state_dict()), tmp_path / "source" / "model")
    wrapped = torch.compile(Net(), backend="eager")
    config = ResumeConfig(str(tmp_path / "source"))
    DistributedCheckpointer(str(tmp_path / "job"), resume=config).load(wrapped)
    assert_bits_equal(dict(get_model_state_dict(wrapped)), dict(source.state_dict()))


def test_importing_the_package_says_nothing_and_a_model_needs_no_config(capfd: pytest.CaptureFixture[str]) -> None:
    import subprocess
    import sys

    result = subprocess.run([sys.executable, "-c", "import dcp_fsspec"], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
