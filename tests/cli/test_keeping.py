"""latest, prune, sweep, bench: nothing is destroyed without a word, and a save under way is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec.checkpointer import layout
from support.checkpoints import open_uploads
from support.commands import run, write_ours
from support.stores import S3Store, Store

on_stores = pytest.mark.parametrize("store", ["file", "moto", "seaweed"], indirect=True)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    write_ours(str(folder), (1, 2, 3, 4))
    return folder


@pytest.fixture
def root(store: Store, four: Path) -> str:
    from support.commands import upload

    upload(four, store, "run")
    return store.below("run")


def _iterations(store: Store) -> list[int]:
    # By the files: some servers list an emptied folder for a while.
    names = (name.split("/")[1] for name in store.raw_list() if name.startswith("run/iter_"))
    return sorted({iteration for name in names if (iteration := layout.iteration_of(name)) is not None})


@on_stores
def test_latest_tells_and_moves_the_pointer(store: Store, root: str) -> None:
    document = run(store, "latest", root, "--json").json
    assert set(document) == {"iteration", "url", "notes", "record"}
    assert document["iteration"] == 4
    assert run(store, "latest", root).out.strip().endswith("iter_000000004")
    assert "--yes" in run(store, "latest", root, "--set", "2", code=2).err
    assert run(store, "latest", root, "--set", "2", "--yes", "--json").json["iteration"] == 2
    assert run(store, "latest", root, "--set", "3", "--json").json["iteration"] == 3
    assert "iter_000000009" in run(store, "latest", root, "--set", "9", code=3).line
    assert store.raw_read("run/latest_checkpoint.txt") == b"iter_000000003\n"


@on_stores
def test_prune_says_first_what_would_go(store: Store, root: str) -> None:
    before = store.raw_list()
    rules = ("--keep-latest", "1", "--keep-every", "2", "--json")
    for words in ((), ("--dry-run",), ("--dry-run", "--yes")):
        found = run(store, "prune", root, *rules, *words).json
        assert found == {"url": found["url"], "dry_run": True, "iterations": [1, 3]}
    assert store.raw_list() == before
    assert run(store, "prune", root, *rules, "--yes").json["dry_run"] is False
    assert _iterations(store) == [2, 4]


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_prune_keeps_the_best(store: Store, root: str) -> None:
    gone = run(store, "prune", root, "--keep-best", "loss:max:2", "--json").json["iterations"]
    assert gone == [3]  # 4 is what the pointer names.
    for wrong in ("", "loss:most", "loss:max:2:3", "loss:0"):
        run(store, "prune", root, "--keep-best", wrong, code=2)
    assert "say what to keep" in run(store, "prune", root, code=2).err


@on_stores
def test_sweep_takes_leftovers_that_are_old_enough(store: Store, root: str) -> None:
    store.raw_write("run/iter_000000005/model/__0_0.distcp", bytes(1000))
    if isinstance(store, S3Store):
        store.client.create_multipart_upload(Bucket=store.bucket, Key=f"{store.prefix}/run/iter_000000005/model/big")
    young = run(store, "sweep", root, "--yes", "--json").json
    assert (young["iterations"], young["too_young"]) == ({}, [5])
    dated_by_server = not isinstance(store, S3Store) or "moto" not in store.bucket  # Moto dates all of them 2010.
    assert young["uploads"] == [] or not dated_by_server
    found = run(store, "sweep", root, "--older-than", "0", "--json").json
    assert set(found) == {"url", "dry_run", "iterations", "files", "uploads", "too_young"}
    assert found["iterations"] == {"5": 1000}
    assert found["dry_run"]
    assert _iterations(store) == [1, 2, 3, 4, 5]
    swept = run(store, "sweep", root, "--older-than", "0", "--yes", "--json").json
    assert len(young["uploads"] + swept["uploads"]) == isinstance(store, S3Store)
    assert not [name for name in store.raw_list() if "000005" in name]
    if isinstance(store, S3Store):
        assert open_uploads(store) == []


@on_stores
def test_bench_leaves_nothing_behind(store: Store, root: str) -> None:
    before = store.raw_list()
    report = run(store, "bench", root, "--size", "2MiB", "--json").json
    assert set(report) == {"url", "filesystem", "num_bytes", "latency_seconds", "rounds", "advice"}
    assert len(report["rounds"]) == 3
    assert report["advice"]
    assert store.raw_list() == before
    assert "save MB/s" in run(store, "bench", root, "--size", "1MiB").out


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_bench_refuses_a_size_that_shows_nothing(store: Store, root: Any) -> None:
    run(store, "bench", root, "--size", "10", code=2)
    run(store, "bench", root, "--size", "much", code=2)
