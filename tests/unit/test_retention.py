"""Policies: what each keeps."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_fsspec import AnyOf, ConfigurationError, KeepBest, KeepEvery, KeepLatest
from dcp_fsspec.checkpointer.retention import Committed

NAN = float("nan")
LOSSES = {10: 3.0, 20: 1.0, 30: NAN, 40: 1.0, 50: 2.0}
ALL = [Committed(iteration, {"loss": loss}) for iteration, loss in LOSSES.items()]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepLatest(1), {50}),
        (KeepLatest(2), {40, 50}),
        (KeepLatest(99), {10, 20, 30, 40, 50}),
        (KeepEvery(20), {20, 40}),
        (KeepEvery(7), set()),
        (KeepBest(1, "loss"), {40}),  # of equals the newer one
        (KeepBest(3, "loss"), {20, 40, 50}),
        (KeepBest(4, "loss"), {10, 20, 40, 50}),
        (KeepBest(5, "loss"), {10, 20, 30, 40, 50}),
        (KeepBest(1, "loss", mode="max"), {10}),
        (KeepBest(4, "loss", mode="max"), {10, 20, 40, 50}),
        (KeepBest(2, "accuracy"), set()),
        (AnyOf(KeepLatest(1), KeepEvery(20), KeepBest(1, "loss")), {20, 40, 50}),
    ],
    ids=repr,
)
def test_policy(policy: Any, kept: set[int]) -> None:
    assert policy.keep(ALL) == kept
    assert policy.keep([]) == set()


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None])
@pytest.mark.parametrize("policy", [KeepLatest, KeepEvery, lambda count: KeepBest(count, "loss")])
def test_b25_a_count_below_one_is_refused_and_says_how_to_keep_all(policy: Any, count: Any) -> None:
    with pytest.raises(ConfigurationError, match="without a policy all is kept"):
        policy(count)


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        KeepBest(1, "loss", mode="least")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        AnyOf()
