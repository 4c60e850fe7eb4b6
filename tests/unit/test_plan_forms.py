"""A save plans afresh exactly when something that its plan depends on has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_fsspec.checkpointer.plan_cache import PlanCache
from dcp_fsspec.checkpointer.snapshot import FlatState, PickledValue, SnapshotPlanner, StagedShards


def _values() -> dict[str, Any]:
    return {"w": torch.zeros(3, 2), "lr": PickledValue(b"1", False), "none": StagedShards((), ())}


def _plans_again(cache: PlanCache, values: dict[str, Any]) -> bool:
    planner = SnapshotPlanner(FlatState(values, {key: (key,) for key in values}), cache, num_ranks=1)
    planner.set_up_planner({}, is_coordinator=True)
    local = planner.create_local_plan()
    (final,), _ = planner.create_global_plan([local])
    planner.finish_plan(final)
    return local.usable


CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"w": torch.zeros(2, 3)},
    "dtype": {"w": torch.zeros(3, 2, dtype=torch.bfloat16)},
    "gradients": {"w": torch.zeros(3, 2, requires_grad=True)},
    "kind": {"w": PickledValue(b"1", False)},
    "more": {"v": torch.zeros(1)},
    "no part any more": {"lr": StagedShards((), ())},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_once(change: str) -> None:
    cache = PlanCache()
    assert _plans_again(cache, _values())
    assert not _plans_again(cache, _values())
    assert _plans_again(cache, _values() | CHANGES[change])
    assert not _plans_again(cache, _values() | CHANGES[change])


def test_other_values_of_the_same_form_are_no_change() -> None:
    cache = PlanCache()
    assert _plans_again(cache, _values())
    assert not _plans_again(cache, _values() | {"w": torch.ones(3, 2), "lr": PickledValue(b"longer", True)})


def test_other_keys_of_the_same_forms_are_a_change() -> None:
    cache = PlanCache()
    assert _plans_again(cache, _values())
    assert _plans_again(cache, {f"{key}2": value for key, value in _values().items()})
