"""What a host's ranks share, and when each rank begins."""

from __future__ import annotations

import threading

import pytest

from dcp_fsspec import ConfigurationError, FsspecStorageReader, FsspecStorageWriter
from dcp_fsspec.storage.pace import Pace, ranks_here, share, turn
from dcp_fsspec.storage.tracing import OFF


def test_the_ranks_of_a_host_share_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Pace(max_per_host=64).threads(32) == 8
    assert Pace(max_per_host=4).threads(32) == 1, "a rank that could do nothing would never end"
    assert Pace(max_per_host=1000).threads(32) == 32, "the limit of the rank holds as well"
    assert Pace().threads(32) == 32


@pytest.mark.parametrize("said", ["", "0", " ", "many", None])
def test_a_launcher_that_says_nothing_means_one_rank(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert ranks_here() == 1
    assert share(5, 1) == 5


def test_turns_are_spread_evenly_and_the_first_is_at_once() -> None:
    turns = [turn(10.0, rank, 1000) for rank in range(1000)]
    assert turns[0] == 0
    assert turns == sorted(set(turns))
    assert turns[-1] < 10.0


def test_without_other_ranks_nobody_waits() -> None:
    Pace(stagger_seconds=1e6).wait(threading.Event(), OFF)


@pytest.mark.parametrize("cls", [FsspecStorageReader, FsspecStorageWriter])
@pytest.mark.parametrize(
    "settings", [{"max_concurrency_per_host": 0}, {"stagger_seconds": -1.0}, {"stagger_seconds": float("nan")}]
)
def test_limits_that_cannot_work_are_refused(cls: type, settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        cls("memory://x", **settings)
