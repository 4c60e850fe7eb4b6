"""Checkpoints that older versions of torch wrote; what they hold is said in `tests/data/README.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

from dcp_fsspec import FsspecStorageReader
from support.tensors import assert_bits_equal, blank_like

DATA = Path(__file__).parent.parent / "data"
COMPONENTS = ("model", "optim", "scheduler", "trainer")

pytestmark = pytest.mark.parametrize("version", ["torch-2.2.2", "torch-2.4.1"])


def _expected(version: str) -> dict[str, dict[str, Any]]:
    parts = torch.load(DATA / version / "expected.pt", weights_only=False)["parts"]
    return {name: dict(part) for name, part in parts.items()}


def _reader(version: str, component: str, **options: Any) -> FsspecStorageReader:
    return FsspecStorageReader(DATA / version / "checkpoints" / "iter_000000005" / component, **options)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_value_of_an_old_checkpoint_is_loaded(version: str, component: str) -> None:
    """B35: nested keys were another kind before torch 2.4."""
    wanted = _expected(version)[component]
    loaded = blank_like(wanted)
    reader = _reader(version, component)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)
    report = reader.last_report
    assert (report.checksums, report.num_verified, report.num_unverified) == ("absent", 0, report.num_items)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_partial_load_of_an_old_checkpoint_leaves_alone_what_it_does_not_hold(version: str, component: str) -> None:
    """B35: the old keys are found in this mode as well."""
    wanted = _expected(version)[component]
    loaded = {**blank_like(wanted), "added_later": torch.full((3,), 7.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(loaded, storage_reader=_reader(version, component), planner=planner)
    assert_bits_equal(loaded, {**wanted, "added_later": torch.full((3,), 7.0)})


def test_one_weight_of_an_old_model_is_loaded_alone(version: str) -> None:
    wanted = {"0.weight": _expected(version)["model"]["0.weight"]}
    loaded = blank_like(wanted)
    reader = _reader(version, "model", verify="full")
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)
    assert reader.last_report.num_items == 1


def test_torch_is_left_in_no_old_mode(version: str) -> None:
    """B35: the planner switches torch's global key format for a moment."""
    from torch.distributed.checkpoint import _version

    loaded = blank_like(_expected(version)["optim"])
    dcp.load(loaded, storage_reader=_reader(version, "optim"))
    assert _version._derived_version is None
