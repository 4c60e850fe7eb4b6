"""Broken checkpoints: every command answers in a line and with the right code, and none makes it worse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.commands import run
from support.stores import Store

_FOLDER = "run/iter_000000002"
_METADATA, _RECORD, _POINTER = f"{_FOLDER}/model/.metadata", f"{_FOLDER}/commit.json", "run/latest_checkpoint.txt"


def _lose_shard(store: Store) -> None:
    folder = f"{_FOLDER}/model/"
    store.raw_delete(min(name for name in store.raw_list() if name.startswith(folder) and name.endswith(".distcp")))


DAMAGES: dict[str, Callable[[Store], None]] = {
    "cut": lambda store: store.raw_write(_METADATA, store.raw_read(_METADATA)[:100]),
    "hostile": lambda store: store.raw_write(_METADATA, b"cposix\nsystem\n(S'touch hacked'\ntR."),
    "shard": _lose_shard,
    "record": lambda store: store.raw_write(_RECORD, b"\x00garbage{"),
    "pointer": lambda store: store.raw_write(_POINTER, b"\xff\x00garbage" * 1000),
}
"""What happens to the latest of two iterations."""

COMMANDS = {
    "ls": ("ROOT",),
    "show": ("ROOT",),
    "verify": ("ROOT",),
    "diff": ("ROOT", "ROOT/iter_000000001"),
    "cp": ("ROOT", "OUT/copy"),
    "export": ("ROOT", "OUT/export"),
    "import": ("ROOT", "OUT/import"),
    "latest": ("ROOT",),
    "prune": ("ROOT", "--keep-latest", "2", "--yes"),
    "sweep": ("ROOT", "--older-than", "0", "--yes"),
}
"""Bench reads nothing that stands there."""

_UNREADABLE = {"show": 5, "verify": 1, "diff": 5, "cp": 5, "export": 5}
_CODES = {
    "cut": _UNREADABLE,
    "hostile": _UNREADABLE,
    "shard": {**_UNREADABLE, "show": 0},
    # Then the iteration before is the latest, or the newest one is.
    "record": {"diff": 0, "cp": 5},
    "pointer": {"diff": 1},
}
_NAMED = {"cut": ".metadata", "hostile": "system", "shard": ".distcp", "record": "commit.json", "pointer": "pointer"}
_NOTED = {"record": ("show", "verify", "diff", "export", "latest"), "pointer": ("ls",)}


@pytest.mark.parametrize(
    ("damage", "store"),
    [*((damage, "file") for damage in DAMAGES), *((damage, "seaweed") for damage in ("hostile", "shard", "record"))],
    indirect=["store"],
)
def test_every_command_says_what_is_broken_and_changes_nothing(
    store: Store, place: Any, damage: str, tmp_path: Path
) -> None:
    root = place(store, "ours")
    DAMAGES[damage](store)
    before = store.raw_list()
    for command, arguments in COMMANDS.items():
        words = [word.replace("ROOT", root).replace("OUT", str(tmp_path)) for word in arguments]
        code = 3 if command == "import" else _CODES[damage].get(command, 0)  # No file that it knows.
        answer = run(store, command, *words, code=code)
        assert "Traceback" not in answer.out + answer.err
        if code >= 2:
            assert command == "import" or _NAMED[damage] in answer.line
        elif code == 1 and command == "verify":
            assert _NAMED[damage] in answer.out
        elif command in _NOTED.get(damage, ()):
            assert _NAMED[damage] in answer.err
    assert store.raw_list() == before


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_bench_works_beside_what_is_broken(store: Store, place: Any) -> None:
    root = place(store, "ours")
    for damage in DAMAGES.values():
        damage(store)
    before = store.raw_list()
    run(store, "bench", root, "--size", "1MiB", "--json")
    assert store.raw_list() == before


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_verify_names_a_commit_record_that_is_not_one_or_not_of_this_iteration(store: Store, place: Any) -> None:
    root = place(store, "ours")
    first = store.raw_read("run/iter_000000001/commit.json")
    for record, word in ((b"garbage", "cannot be read"), (first, "that of iteration 1")):
        store.raw_write(_RECORD, record)
        for words in ((f"{root}/iter_000000002",), (root, "--all")):
            report = run(store, "verify", *words, "--json", code=1).json["checkpoints"][-1]
            assert report["problems"][0]["file"] == "commit.json"
            assert word in report["problems"][0]["reason"]


@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_what_was_committed_is_no_leftover_because_its_record_is_damaged(store: Store, place: Any, caplog: Any) -> None:
    root = place(store, "ours")
    store.raw_write("run/iter_000000001/commit.json", b'{"format_version": 99, "components": {}}')
    before = store.raw_list()
    assert run(store, "sweep", root, "--older-than", "0", "--yes", "--json").json["iterations"] == {}
    assert store.raw_list() == before
    assert "iter_000000001 stays" in caplog.text
    store.raw_delete("run/iter_000000001/commit.json")
    assert set(run(store, "sweep", root, "--older-than", "0", "--yes", "--json").json["iterations"]) == {"1"}


@pytest.mark.parametrize("damage", ["cut", "hostile", "shard"])
@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_what_is_broken_in_the_target_is_replaced_only_when_both_words_are_said(
    store: Store, place: Any, damage: str
) -> None:
    root = place(store, "ours")
    source, target = f"{root}/iter_000000001", f"{root}/iter_000000002"
    run(store, "export", source, store.below("x.safetensors"))
    imported = (store.below("x.safetensors"), f"{target}/model")
    DAMAGES[damage](store)
    for command, words in (("cp", (source, target)), ("import", imported)):
        assert "stands at" in run(store, command, *words, code=2).line
        run(store, command, *words, "--overwrite", "--yes")
        assert run(store, "verify", words[1] if command == "import" else f"{target}/model", "--json").json["ok"]
        DAMAGES[damage](store)


@pytest.mark.parametrize("kind", ["stock", "cosmos", "torchtitan"])
@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_commands_that_keep_leave_checkpoints_of_others_alone(store: Store, place: Any, kind: str) -> None:
    root = place(store, kind)
    before = store.raw_list()
    cosmos = kind == "cosmos"
    latest = run(store, "latest", root, "--json", code=0 if cosmos else 3)
    assert not cosmos or (latest.json["iteration"], latest.json["record"]) == (2, None)
    pruned = run(store, "prune", root, "--keep-latest", "1", "--json").json
    assert pruned == {"url": pruned["url"], "dry_run": True, "iterations": [1] if cosmos else []}
    swept = run(store, "sweep", root, "--older-than", "0", "--yes", "--json").json
    assert (swept["iterations"], swept["files"], swept["uploads"], swept["too_young"]) == ({}, [], [], [])
    assert store.raw_list() == before
