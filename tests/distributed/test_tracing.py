"""Traces of saves and loads: whole files that viewers take, one row a thread and rank; none unless asked for."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_fsspec import DistributedCheckpointer
from dcp_fsspec.storage import tracing
from support.checkpoints import assert_loads, load, save
from support.ranks import RankPool, values
from support.tensors import random_tensor


def _state() -> dict[str, Any]:
    return {f"layer{number}": random_tensor(700, 1024, seed=number) for number in range(4)} | {"step": 7}


def _read(folder: Path, verb: str) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.iterdir() if f"-{verb}-" in path.name]
    return sorted(found, key=lambda document: document["otherData"]["rank"])


def _spans(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def _names(document: dict[str, Any]) -> set[str]:
    return {span["name"] for span in _spans(document)}


def _assert_nested(document: dict[str, Any]) -> None:
    """Two spans of one row lie apart, or one lies within the other."""
    for row in {span["tid"] for span in _spans(document)}:
        open_until: list[int] = []
        own = [span for span in _spans(document) if span["tid"] == row]
        assert all(span["dur"] >= 0 for span in own)
        for span in sorted(own, key=lambda one: (one["ts"], -one["dur"])):
            while open_until and open_until[-1] <= span["ts"]:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1], span
            open_until.append(span["ts"] + span["dur"])


def _save_and_load(rank: int, url: str, folder: str) -> None:
    save(_state(), url, trace=folder)
    load(_state(), url, trace=folder)


def test_what_runs_between_our_spans_is_the_callers(tmp_path: Path) -> None:
    trace = tracing.begin("save", "somewhere", tmp_path)
    trace.until_next("plan")
    trace.until_next("collective")
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.01:
        pass
    with trace.span("write"):
        pass
    trace.write()
    (document,) = _read(tmp_path, "save")
    plan, collective, write = _spans(document)
    assert [one["name"] for one in (plan, collective, write)] == ["plan", "collective", "write"]
    assert collective["dur"] >= 10_000
    assert plan["ts"] + plan["dur"] <= collective["ts"]
    assert collective["ts"] + collective["dur"] <= write["ts"]


@pytest.mark.distributed
def test_each_rank_leaves_one_whole_file_for_each_operation(two_ranks: RankPool, tmp_path: Path) -> None:
    values(two_ranks.run(_save_and_load, str(tmp_path / "ckpt"), str(tmp_path / "traces")))
    saves, loads = _read(tmp_path / "traces", "save"), _read(tmp_path / "traces", "load")
    assert [document["otherData"]["rank"] for document in saves] == [0, 1]
    assert [document["otherData"]["rank"] for document in loads] == [0, 1]
    assert not [path for path in (tmp_path / "traces").iterdir() if path.suffix != ".json"]
    for document in [*saves, *loads]:
        _assert_nested(document)
        rows = {event["tid"] for event in document["traceEvents"] if event["name"] == "thread_name"}
        assert {span["tid"] for span in _spans(document)} == rows
        assert len({event["pid"] for event in document["traceEvents"]}) == 1
    for document in saves:
        assert {"plan", "collective", "write", "frame", "checksum", "PUT"} <= _names(document)
    assert "commit" in _names(saves[0])
    for document in loads:
        assert {"plan", "collective", "read", "GET", "copy", "checksum"} <= _names(document)
    assert not {row["tid"] for row in _spans(saves[0])} & {row["tid"] for row in _spans(saves[1])}


def test_waiting_for_the_budget_is_seen(tmp_path: Path) -> None:
    state = {f"t{number}": random_tensor(1024, 512, seed=number).t() for number in range(6)}
    save(state, str(tmp_path / "ckpt"), trace=tmp_path / "traces", memory_budget_bytes=1 << 20, max_concurrency=4)
    (document,) = _read(tmp_path / "traces", "save")
    assert "wait for budget" in _names(document)


def test_no_trace_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DCP_FSSPEC_TRACE", raising=False)
    save(_state(), str(tmp_path / "ckpt"))
    load(_state(), str(tmp_path / "ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_the_environment_asks_for_traces_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_FSSPEC_TRACE", str(tmp_path / "traces"))
    save(_state(), str(tmp_path / "ckpt"))
    load(_state(), str(tmp_path / "ckpt"))
    assert len(_read(tmp_path / "traces", "save")) == len(_read(tmp_path / "traces", "load")) == 1


@pytest.mark.parametrize("folder", ["{tmp}/a-file", "no-such-protocol://x/y"])
def test_a_trace_that_cannot_be_written_is_logged_and_fails_nothing(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a-file").touch()
    folder = folder.format(tmp=tmp_path)
    with caplog.at_level(logging.WARNING):
        save(_state(), str(tmp_path / "ckpt"), trace=folder)
        assert_loads(_state(), str(tmp_path / "ckpt"), trace=folder)
    assert "the trace of a save" in caplog.text
    assert "the trace of a load" in caplog.text


def test_staging_and_the_upload_in_the_background_are_traced(tmp_path: Path) -> None:
    checkpointer = DistributedCheckpointer(
        tmp_path / "job", async_mode="async", writer_settings={"trace": tmp_path / "traces"}
    )
    checkpointer.save(torch.nn.Linear(8, 8), None, None, None, 3)
    checkpointer.finalize()
    (staged,) = _read(tmp_path / "traces", "stage")
    assert {"stage", "wait for copies"} <= _names(staged)
    assert _read(tmp_path / "traces", "save")


def _save_and_load_in_turn(rank: int, url: str, folder: str) -> None:
    save(_state(), url, trace=folder, stagger_seconds=0.2, max_concurrency_per_host=4, spread_keys=True)
    assert_loads(_state(), url)
    load(_state(), url, trace=folder, stagger_seconds=0.2, max_concurrency_per_host=4)


def test_the_ranks_begin_in_turn(four_ranks: RankPool, tmp_path: Path) -> None:
    values(four_ranks.run(_save_and_load_in_turn, str(tmp_path / "ckpt"), str(tmp_path / "traces")))
    for verb, begins in (("save", "PUT"), ("load", "GET")):
        for rank, document in enumerate(_read(tmp_path / "traces", verb)):
            (turn,) = (span for span in _spans(document) if span["name"] == "wait for the turn")
            assert turn["args"]["seconds"] == pytest.approx(0.05 * rank)
            files = [one for one in _spans(document) if one["name"] == begins and ".distcp" in str(one["args"])]
            assert files
            assert all(one["ts"] >= turn["ts"] + turn["dur"] for one in files)
