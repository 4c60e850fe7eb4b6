"""cp: whole or not at all, checked, continued where it was interrupted."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from dcp_fsspec import Catalog, CorruptCheckpointError, UnsafeCheckpointError
from dcp_fsspec.storage.filesystem import Store as PackageStore
from dcp_fsspec.tools.copying import CopyOptions, copy_checkpoint
from support.checkpoints import assert_loads, folder_files
from support.commands import KINDS_ON_STORES, components, flags, run, run_process
from support.faultproxy import FaultProxy
from support.stores import FolderStore, S3Store, Store

on_stores = pytest.mark.parametrize("store", ["file", "moto", "seaweed"], indirect=True)

_DIES_HALFWAY = """
import json, os, signal, sys
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.tools.copying import CopyOptions, copy_checkpoint
source, target, options = sys.argv[1:]
def tell(progress):
    if progress.done_bytes > progress.total_bytes / 2:
        os.kill(os.getpid(), signal.SIGKILL)
copy_checkpoint(Store(source), Store(target, json.loads(options)), CopyOptions(max_concurrency=1, progress=tell))
"""


def _same(store: Store, one: str, other: str) -> bool:
    return folder_files(store, one) == folder_files(store, other)


@pytest.mark.parametrize(("kind", "store"), KINDS_ON_STORES, indirect=["store"])
def test_a_copy_within_a_store_is_byte_for_byte_and_not_made_twice(store: Store, place: Any, kind: str) -> None:
    report = run(store, "cp", place(store, kind), store.below("copy"), "--json").json
    assert set(report) == {
        "copied", "skipped", "pointer", "num_files", "num_bytes", "num_files_found", "num_bytes_found",
        "num_files_within_store", "num_files_checked", "seconds",
    }  # fmt: skip
    assert _same(store, "run", "copy")
    assert len(report["copied"]) == (1 if kind == "stock" else 2)
    assert (report["num_files_within_store"] > 0) == (not isinstance(store, FolderStore))
    again = run(store, "cp", store.below("run"), store.below("copy"), "--json").json
    assert (again["num_files"], again["num_files_found"]) == (0, report["num_files"])


def test_between_stores_everything_is_checked_on_its_way(
    seaweed_store: S3Store, moto_server: Any, moto_client: Any, place: Any, tmp_path: Any
) -> None:
    local = FolderStore(tmp_path, str(tmp_path))
    moto = S3Store(moto_client, moto_server.bucket, moto_server.storage_options())
    root = place(local, "ours")
    there, back = flags(seaweed_store, "--target-option"), flags(seaweed_store, "--source-option")
    up = run(None, "cp", root, seaweed_store.below("up"), "--verify", "--json", *there).json
    assert up["num_files_checked"] > 0
    assert up["num_files_within_store"] == 0
    run(None, "cp", seaweed_store.below("up"), moto.below("up"), *back, *flags(moto, "--target-option"))
    assert folder_files(moto, "up") == folder_files(local, "run")
    state = components(2)["model"]
    assert_loads(state, f"{moto.below('up')}/iter_000000002/model", **moto.arguments)
    assert Catalog(moto.below("up"), **moto.arguments).pointee() == 2
    moto.close()


@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_a_killed_copy_is_no_checkpoint_and_goes_on_when_it_is_run_again(
    store: Store, place: Any, tmp_path: Any
) -> None:
    local = FolderStore(tmp_path / "local", str(tmp_path / "local"))
    source = f"{place(local, 'ours')}/iter_000000002"
    target = store.below("iter_000000002")
    died = run_process(source, target, json.dumps(store.storage_options), python=("-c", _DIES_HALFWAY))
    assert died.code == -signal.SIGKILL, died.err
    left = set(folder_files(store, "iter_000000002"))
    finished = {name for name in left if ".tmp-" not in name}
    assert finished
    assert not any(name.endswith((".metadata", "commit.json")) for name in left)
    run(store, "verify", target, code=5)

    report = run(store, "cp", source, target, "--json").json
    assert report["num_files_found"] == len(finished)
    assert report["num_files"] == len(folder_files(local, "run/iter_000000002")) - len(finished)
    assert run(store, "verify", target, "--json").json["ok"]


def test_no_mark_is_written_before_every_file_is_there(
    proxied_store: S3Store, proxy: FaultProxy, place: Any, tmp_path: Any
) -> None:
    local = FolderStore(tmp_path, str(tmp_path))
    run(proxied_store, "cp", place(local, "ours"), proxied_store.below("copy"))
    puts = [one.key for one in proxy.log if one.method == "PUT" and "iter_000000001" in one.key]
    marks = [number for number, key in enumerate(puts) if key.endswith((".metadata", "commit.json"))]
    assert marks == list(range(len(puts) - 5, len(puts)))
    assert puts[-1].endswith("commit.json")
    assert [one.key for one in proxy.log if one.method == "PUT"][-1].endswith("latest_checkpoint.txt")


@on_stores
def test_damage_in_the_source_is_not_copied(store: Store, place: Any, tmp_path: Any) -> None:
    root = place(store, "ours")
    name = next(name for name in sorted(store.raw_list()) if "000002/model" in name and name.endswith(".distcp"))
    store.flip(name, 3000)
    target = tmp_path / "target"
    answer = run(store, "cp", f"{root}/iter_000000002", str(target), code=5)
    assert name.removeprefix("run/") in answer.line
    assert not [path for path in target.rglob("*") if path.name in (".metadata", "commit.json")]
    if not isinstance(store, FolderStore):
        # What the store copies by itself is looked at when it is asked for.
        run(store, "cp", f"{root}/iter_000000002", store.below("copy"), "--verify", code=4)
        assert "copy/commit.json" not in store.raw_list()


def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_copied(
    moto_server: Any, moto_client: Any, place: Any, tmp_path: Any
) -> None:
    moto = S3Store(moto_client, moto_server.bucket, moto_server.storage_options())
    root = place(moto, "ours")
    moto.raw_write("run/iter_000000002/../../../evil", b"evil")
    with pytest.raises(UnsafeCheckpointError, match=r"\.\./evil"):
        copy_checkpoint(PackageStore(root, moto.storage_options), PackageStore(str(tmp_path / "a" / "b" / "c")))
    assert not (tmp_path / "a" / "evil").exists()


@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_only_what_is_committed_is_copied(store: Store, place: Any) -> None:
    root = place(store, "ours")
    store.raw_delete("run/iter_000000002/commit.json")
    store.raw_delete("run/iter_000000002/optim/.metadata")
    store.raw_write("run/latest_checkpoint.txt", b"iter_000000001\n")
    store.raw_write("run/iter_000000001/model/__9_9.distcp", b"nothing refers to this")
    report = run(store, "cp", root, store.below("copy"), "--json").json
    assert report["skipped"] == ["iter_000000002"]
    assert report["pointer"] == "iter_000000001"
    assert not [name for name in store.raw_list() if name.startswith("copy/") and ("000002" in name or "__9_9" in name)]
    run(store, "cp", f"{root}/iter_000000002", store.below("other"), code=5)
    assert not folder_files(store, "other")


@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_another_checkpoint_in_the_target_stays_until_both_words_are_said(store: Store, place: Any) -> None:
    root = place(store, "ours")
    one, other = f"{root}/iter_000000001", f"{root}/iter_000000002"
    before = folder_files(store, "run/iter_000000002")
    assert "another checkpoint" in run(store, "cp", one, other, code=2).line
    assert "--yes" in run(store, "cp", one, other, "--overwrite", code=2).err
    assert folder_files(store, "run/iter_000000002") == before
    run(store, "cp", one, other, "--overwrite", "--yes")
    assert _same(store, "run/iter_000000001", "run/iter_000000002")
    assert "same folder" in run(store, "cp", one, one, code=2).line


@pytest.mark.parametrize("store", ["seaweed", "obstore", "memory", "webdav", "file"], indirect=True)
def test_large_files_pass_through_in_parts(store: Store, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_fsspec.storage.streaming.PART_BYTES", 5 << 20)
    data = bytes(range(256)) * (50_000)
    parts = [data[start : start + 700_001] for start in range(0, len(data), 700_001)]
    target = PackageStore(store.url, store.storage_options, store.filesystem)
    target.prepare()
    target.publish_stream("large", iter(parts), len(data))
    assert store.raw_read("large") == data
    assert set(store.raw_list()) == {"large"}


@pytest.mark.parametrize("store", ["seaweed", "moto", "obstore", "memory", "webdav", "file"], indirect=True)
def test_a_stream_that_fails_publishes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_fsspec.storage.streaming.PART_BYTES", 5 << 20)
    target = PackageStore(store.url, store.storage_options, store.filesystem)
    target.prepare()

    def broken() -> Any:
        yield bytes(6 << 20)
        raise CorruptCheckpointError("in the middle")

    with pytest.raises(CorruptCheckpointError, match="in the middle"):
        target.publish_stream("large", broken(), 20 << 20)
    assert store.raw_list() == {}
    assert target.open_uploads() == []


def test_progress_is_told_from_nothing_to_all(place: Any, tmp_path: Any) -> None:
    local = FolderStore(tmp_path, str(tmp_path))
    told = []
    source = PackageStore(f"{place(local, 'ours')}/iter_000000001")
    copy_checkpoint(source, PackageStore(local.below("copy")), CopyOptions(progress=told.append))
    assert (told[0].done_bytes, told[-1].done_bytes) == (0, told[-1].total_bytes)
    assert [one.done_bytes for one in told] == sorted(one.done_bytes for one in told)
