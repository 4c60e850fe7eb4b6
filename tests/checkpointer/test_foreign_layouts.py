"""Checkpoints of other software load here, and those of this package load there, by stock torch alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from dcp_fsspec import Catalog, CheckpointNotFoundError, DistributedCheckpointer, IncompatibleStateError, ResumeConfig
from dcp_fsspec.storage import metadata
from support.stores import S3Store
from support.tensors import assert_bits_equal, blank_like, random_tensor
from support.training import FLAT, Job, Net, assert_same, make_job, save_by_cosmos_rules, stock_load, stock_save


def test_a_job_goes_on_from_what_cosmos_wrote(tmp_path: Path) -> None:
    for iteration in (5, 10):
        save_by_cosmos_rules(tmp_path, iteration, make_job(num_steps=iteration))
    fresh = make_job(seed=1, lr=9.0)
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert checkpointer.load(*fresh.parts) == 10
    assert_same(fresh, make_job(num_steps=10).state())
    checkpointer.save(*fresh.train(1).parts, 11)
    checkpointer.finalize()
    assert (tmp_path / "latest_checkpoint.txt").read_bytes() == b"iter_000000011\n"
    assert Catalog(str(tmp_path)).iterations() == [5, 10, 11]


def test_what_cosmos_wrote_without_a_pointer_counts_if_all_components_are_complete(tmp_path: Path) -> None:
    save_by_cosmos_rules(tmp_path, 10, make_job(num_steps=1))
    save_by_cosmos_rules(tmp_path, 20, make_job(num_steps=2), without="optim")
    (tmp_path / "latest_checkpoint.txt").unlink()
    found = Catalog(str(tmp_path)).latest()
    assert found is not None
    assert (found.iteration, found.record) == (10, None)
    assert any("iter_000000020" in note and "optim/.metadata is missing" in note for note in found.notes)


def test_further_components_and_files_of_others_do_no_harm(tmp_path: Path) -> None:
    extra = {"llm": {"w": torch.ones(3)}, "vision_encoder": {"w": torch.ones(2)}}
    save_by_cosmos_rules(tmp_path, 10, make_job(num_steps=1), extra=extra)
    (tmp_path / "iter_000000010" / "dataloader").mkdir()
    (tmp_path / "iter_000000010" / "dataloader" / "rank_0.pkl").write_bytes(b"a pickle that nobody opens")
    assert DistributedCheckpointer(str(tmp_path)).load(*make_job(seed=1).parts) == 10


def test_an_iteration_of_others_without_trainer_takes_its_number_from_the_folder(tmp_path: Path) -> None:
    save_by_cosmos_rules(tmp_path, 10, make_job(num_steps=1), without="trainer")
    fresh = make_job(seed=1)
    checkpointer = DistributedCheckpointer(str(tmp_path))
    assert checkpointer.load(*fresh.parts) == 10
    assert_bits_equal(fresh.state()["model"], make_job(num_steps=1).state()["model"])
    assert any("has no trainer" in note for note in checkpointer.last_load_report.notes)


def _flat_states(job: Job) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(job.model),
        "optim": get_optimizer_state_dict(job.model, job.optimizer, options=FLAT),
    }


@pytest.mark.parametrize("slash", ["", "/"])
def test_flat_layout_of_reason1_as_a_warm_start(tmp_path: Path, slash: str) -> None:
    source = make_job(num_steps=3)
    stock_save({"model": _flat_states(source)["model"]}, tmp_path / "rl")
    fresh = make_job(seed=1)
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=ResumeConfig(f"{tmp_path}/rl{slash}"))
    assert checkpointer.load(*fresh.parts) == 0
    assert_bits_equal(fresh.state()["model"], source.state()["model"])


def test_flat_layout_that_the_jobs_own_pointer_names(tmp_path: Path) -> None:
    source = make_job(num_steps=3)
    stock_save(_flat_states(source), tmp_path / "iter_000000030")
    (tmp_path / "latest_checkpoint.txt").write_text("iter_000000030")
    fresh = make_job(seed=1)
    config = ResumeConfig(keys_not_to_resume=["scheduler", "trainer"], filter_auto_resume=True)
    DistributedCheckpointer(str(tmp_path), resume=config).load(*fresh.parts)
    assert_bits_equal(fresh.state()["model"], source.state()["model"])
    assert_bits_equal(fresh.state()["optim"], source.state()["optim"])
    with pytest.raises(IncompatibleStateError, match="no keys for scheduler"):
        DistributedCheckpointer(str(tmp_path)).load(*fresh.parts)


def test_h54_flat_layout_on_s3(seaweed_store: S3Store, tmp_path: Path) -> None:
    source = make_job(num_steps=3)
    stock_save({"model": _flat_states(source)["model"]}, tmp_path)
    for path in tmp_path.iterdir():
        seaweed_store.raw_write(f"rl/{path.name}", path.read_bytes())
    fresh = make_job(seed=1)
    url, options = seaweed_store.below("job"), seaweed_store.storage_options
    config = ResumeConfig(seaweed_store.below("rl"))
    assert DistributedCheckpointer(url, storage_options=options, resume=config).load(*fresh.parts) == 0
    assert_bits_equal(fresh.state()["model"], source.state()["model"])


def _torchtitan(folder: Path, job: Job, step: int) -> None:
    state: dict[str, Any] = {
        **get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer, options=FLAT),
        "lr_scheduler": {"last_epoch": job.scheduler.last_epoch},
        "train_state": {"step": torch.tensor(step), "ntokens_seen": torch.tensor(step * 100)},
        "dataloader": {"dp_rank_0": b"state of a data loader"},
    }
    stock_save(state, folder / f"step-{step}")


def test_torchtitan_checkpoint_as_a_warm_start_of_the_weights(tmp_path: Path) -> None:
    source = make_job(num_steps=3)
    _torchtitan(tmp_path, source, 30)
    fresh = make_job(seed=1)
    checkpointer = DistributedCheckpointer(str(tmp_path / "job"), resume=ResumeConfig(f"{tmp_path}/step-30"))
    assert checkpointer.load(*fresh.parts) == 0
    assert_bits_equal(fresh.state()["model"], source.state()["model"])
    assert checkpointer.last_load_report.components["model"].unexpected == []


def test_torchtitan_checkpoint_with_its_training_state(tmp_path: Path) -> None:
    source = make_job(num_steps=3)
    _torchtitan(tmp_path, source, 30)
    fresh = make_job(seed=1)
    config = ResumeConfig(f"{tmp_path}/step-30", load_training_state=True)
    assert DistributedCheckpointer(str(tmp_path / "job"), resume=config).load(*fresh.parts) == 30
    assert_bits_equal(fresh.state()["model"], source.state()["model"])
    assert_bits_equal(fresh.state()["optim"], source.state()["optim"])
    assert fresh.scheduler.last_epoch == 3


def test_a_flat_model_whose_own_keys_begin_with_model_is_not_taken_apart(tmp_path: Path) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 2)
            self.head = torch.nn.Linear(2, 2)

    torch.manual_seed(3)
    source = Wrapped()
    stock_save(dict(source.state_dict()), tmp_path / "step-1")
    torch.manual_seed(4)
    fresh = Wrapped()
    DistributedCheckpointer(str(tmp_path / "job"), resume=ResumeConfig(f"{tmp_path}/step-1")).load(fresh)
    assert_bits_equal(dict(fresh.state_dict()), dict(source.state_dict()))


def test_a_flat_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    source = make_job()
    stock_save({"net.0.weight": source.model.state_dict()["net.0.weight"]}, tmp_path / "step-1")
    with pytest.raises(IncompatibleStateError, match=r"'net\.0\.bias' is missing"):
        DistributedCheckpointer(str(tmp_path / "job"), resume=ResumeConfig(f"{tmp_path}/step-1")).load(source.model)


# The other way: by the rules of Cosmos, with nothing but stock torch. -----------------------------------------


def test_what_is_written_here_loads_by_the_rules_of_cosmos(tmp_path: Path) -> None:
    job = make_job(num_steps=3)
    checkpointer = DistributedCheckpointer(f"{tmp_path}/checkpoints")
    checkpointer.save(*job.parts, 7)
    checkpointer.finalize()

    root = tmp_path / "checkpoints"
    name = (root / "latest_checkpoint.txt").read_text()
    assert name == "iter_000000007\n"
    folder = root / name.strip()
    fresh = make_job(seed=1)
    like = {
        "model": get_model_state_dict(fresh.model),
        "optim": get_optimizer_state_dict(fresh.model, fresh.optimizer, options=FLAT),
        "scheduler": fresh.scheduler.state_dict(),
        "trainer": {"grad_scaler": fresh.grad_scaler.state_dict(), "iteration": 0},
    }
    got = {component: stock_load(state, folder / component) for component, state in like.items()}
    assert_bits_equal(got["model"], get_model_state_dict(job.model))
    assert_bits_equal(got["optim"], get_optimizer_state_dict(job.model, job.optimizer, options=FLAT))
    assert_bits_equal(got["scheduler"], job.scheduler.state_dict())
    assert got["trainer"] == {"grad_scaler": job.grad_scaler.state_dict(), "iteration": 7}
    for component in like:
        stored = metadata.decode((folder / component / ".metadata").read_bytes(), component)
        assert all(getattr(one, "transform_descriptors", None) is None for one in stored.storage_data.values())
        assert type(stored.storage_meta.checkpoint_id) is str


def test_averaged_weights_keep_their_names(tmp_path: Path) -> None:
    class WithEma(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.net_ema = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    model = WithEma()
    DistributedCheckpointer(str(tmp_path)).save(model, None, None, None, 1)
    like = blank_like(dict(model.state_dict()))
    assert set(like) == {"net.weight", "net.bias", "net_ema.weight", "net_ema.bias"}
    assert_bits_equal(stock_load(like, tmp_path / "iter_000000001" / "model"), dict(model.state_dict()))


def test_weights_of_layers_wrapped_for_lora_are_stored_under_the_names_of_before(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"q": torch.nn.Module()})
    model["q"].base_layer = torch.nn.Linear(2, 2)
    model["q"].lora_A = torch.nn.Linear(2, 1, bias=False)
    DistributedCheckpointer(str(tmp_path)).save(model, None, None, None, 1)
    stored = dcp.FileSystemReader(str(tmp_path / "iter_000000001" / "model")).read_metadata().state_dict_metadata
    assert set(stored) == {"q.weight", "q.bias", "q.lora_A.weight"}


def test_a_component_alone_can_be_moved_and_read_elsewhere(tmp_path: Path) -> None:
    job = make_job(num_steps=1)
    DistributedCheckpointer(str(tmp_path / "a")).save(*job.parts, 1)
    shutil.copytree(tmp_path / "a" / "iter_000000001" / "model", tmp_path / "b" / "model")
    fresh = make_job(seed=1)
    config = ResumeConfig(str(tmp_path / "b"))
    DistributedCheckpointer(str(tmp_path / "c"), resume=config).load(fresh.model)
    assert_bits_equal(fresh.state()["model"], job.state()["model"])
    typo = DistributedCheckpointer(str(tmp_path / "c"), resume=ResumeConfig(str(tmp_path / "b" / "nothing")))
    with pytest.raises(CheckpointNotFoundError, match="neither a checkpoint"):
        typo.load(fresh.model)


class Values:
    """A component of any state."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def _save_by_torch_2_3(root: Path, job: Job, values: dict[str, Any]) -> None:
    """Up to then, a dict without tensors was one entry."""
    _version._derived_version = "2_3"
    try:
        save_by_cosmos_rules(root, 5, job, extra={"values": values})
    finally:
        _version._derived_version = None


@pytest.mark.parametrize("strict", [True, False])
def test_b35_keys_of_torch_before_2_4_load_and_are_saved_by_the_rules_of_now(tmp_path: Path, strict: bool) -> None:
    job, resume = make_job(num_steps=2), ResumeConfig(strict_resume=strict)
    values = {"ep": {"n": 4, "deep": {"x": [1, 2]}}, "t": {"w": random_tensor(3)}}
    _save_by_torch_2_3(tmp_path / "job", job, values)
    fresh, loaded = make_job(seed=1, lr=9.0), Values()
    url = str(tmp_path / "job")
    checkpointer = DistributedCheckpointer(url, components={"values": loaded}, resume=resume)
    assert checkpointer.load(*fresh.parts) == 5
    assert_same(fresh, job.state())
    assert fresh.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
    assert_bits_equal(loaded.values, values)
    checkpointer.save(*fresh.parts, 6)
    stored = dcp.FileSystemReader(f"{url}/iter_000000006/values").read_metadata().state_dict_metadata
    assert {"ep.n", "t.w"} <= set(stored)


def test_h51_torchs_rules_of_flattening_are_those_of_now_after_a_load_of_old_keys_that_was_refused(
    tmp_path: Path,
) -> None:
    _save_by_torch_2_3(tmp_path, make_job(num_steps=2), {"ep": {"n": 4}})
    with pytest.raises(IncompatibleStateError):
        DistributedCheckpointer(str(tmp_path)).load(*make_job(model=Net(width=5)).parts)
    assert _version._derived_version is None
