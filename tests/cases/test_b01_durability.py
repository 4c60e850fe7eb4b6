"""B01: a save makes its own files durable and leaves the rest of the machine alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.checkpoints import assert_loads, save
from support.stores import FolderStore, Store
from support.tensors import random_tensor


class Witness:
    """Notes what is synced, renamed, and in which order; everything really happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_syncs = 0
        self.steps: list[tuple[str, str]] = []
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "sync", self._count_host_sync)
        monkeypatch.setattr(os, "fsync", self._note_fsync)
        monkeypatch.setattr(os, "replace", self._note_replace)

    def _count_host_sync(self) -> None:
        self.host_syncs += 1

    def _note_fsync(self, descriptor: int) -> None:
        self.steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        self._fsync(descriptor)

    def _note_replace(self, source: str, target: str) -> None:
        self.steps.append(("fsync of", str(source)))  # must have been synced under its temporary name
        self.steps.append(("replace", str(target)))
        self._replace(source, target)


@pytest.mark.parametrize("store", ["memory", "moto"], indirect=True)
def test_b01_no_sync_of_the_host_for_a_remote_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """B01."""
    witness = Witness(monkeypatch)
    state = {"a": random_tensor(10), "b": random_tensor(3, 4, seed=1)}
    save(state, store.below("ckpt"), **store.arguments)
    assert witness.host_syncs == 0
    assert [path for _, path in witness.steps if "ckpt" in path] == []
    assert sorted(store.raw_list()) == ["ckpt/.metadata", "ckpt/__0_0.distcp", "ckpt/checksums.json"]
    assert_loads(state, store.below("ckpt"), **store.arguments)


@pytest.mark.parametrize("store", ["path", "file"], indirect=True)
def test_b01_local_files_are_synced_before_they_get_their_names(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B01: shard, checksums and metadata are each on disk before they are visible; so is the folder after them."""
    witness = Witness(monkeypatch)
    state = {"a": random_tensor(10), "b": random_tensor(3, 4, seed=1)}
    save(state, store.below("ckpt"), **store.arguments)
    folder = str(store.folder / "ckpt")
    steps = [(what, path) for what, path in witness.steps if path.startswith(folder)]

    replaced = [os.path.basename(path) for what, path in steps if what == "replace"]
    assert replaced == ["__0_0.distcp", "checksums.json", ".metadata"]
    for number, (what, temporary) in enumerate(steps):
        if what == "fsync of":
            assert ("fsync", temporary) in steps[:number]
    names_are_durable = [number for number, step in enumerate(steps) if step == ("fsync", folder)]
    assert names_are_durable
    commit = steps.index(("replace", f"{folder}/.metadata"))
    shards_named = steps.index(("replace", f"{folder}/__0_0.distcp"))
    assert any(shards_named < number < commit for number in names_are_durable)
    assert commit < names_are_durable[-1]
    assert witness.host_syncs == 0
    assert_loads(state, store.below("ckpt"), **store.arguments)


def test_b01_a_new_folder_is_itself_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B01: a folder made for the checkpoint is a name in its parent, which a crash must not take back either."""
    witness = Witness(monkeypatch)
    save({"a": random_tensor(10)}, str(tmp_path / "run" / "iteration"))
    synced = {path for what, path in witness.steps if what == "fsync"}
    assert {str(tmp_path / "run"), str(tmp_path)} <= synced
