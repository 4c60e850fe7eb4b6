"""ls, show, verify, diff: the same answers on every store and for the checkpoints of everybody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.commands import KINDS, KINDS_ON_STORES, components, model_state, run
from support.faultproxy import FaultProxy
from support.stores import S3Store, Store

on_stores = pytest.mark.parametrize("store", ["file", "moto", "seaweed"], indirect=True)
_NAMES = ["model", "optim", "scheduler", "trainer"]


def _outline(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (one["folder"], one["iteration"], one["committed"], one["has_record"], one["latest"])
        for one in document["iterations"]
    ]


@on_stores
def test_ls_lists_the_iterations_of_everybody(store: Store, place: Any) -> None:
    ours = run(store, "ls", place(store, "ours"), "--json").json
    assert set(ours) == {"url", "kind", "pointer", "iterations"}
    assert (ours["kind"], ours["pointer"]) == ("folder", "iter_000000002")
    assert _outline(ours) == [("iter_000000001", 1, True, True, False), ("iter_000000002", 2, True, True, True)]
    one = ours["iterations"][0]
    assert set(one) == {
        "folder", "iteration", "committed", "has_record", "latest", "components", "num_files", "num_bytes", "modified",
        "last_write",
    }  # fmt: skip
    assert [part["name"] for part in one["components"]] == _NAMES
    assert all(p["complete"] for p in one["components"])
    sizes = {name: size for name, size in store.raw_list().items() if name.startswith("run/iter_000000001/")}
    assert (one["num_files"], one["num_bytes"]) == (len(sizes), sum(sizes.values()))
    assert one["modified"].startswith("20")

    cosmos = run(store, "ls", place(store, "cosmos", "cosmos"), "--json").json
    assert _outline(cosmos) == [("iter_000000001", 1, True, False, False), ("iter_000000002", 2, True, False, True)]
    titan = run(store, "ls", place(store, "torchtitan", "titan"), "--json").json
    assert _outline(titan) == [("step-1", 1, True, False, False), ("step-2", 2, True, False, False)]
    stock = run(store, "ls", place(store, "stock", "stock"), "--json").json
    assert (stock["kind"], _outline(stock)) == ("component", [("", None, True, False, False)])


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_ls_says_what_is_not_committed_and_what_the_pointer_misses(store: Store, place: Any) -> None:
    root = place(store, "ours")
    store.raw_delete("run/iter_000000002/commit.json")
    store.raw_delete("run/iter_000000002/model/.metadata")
    store.raw_write("run/latest_checkpoint.txt", b"iter_000000009\n")
    answer = run(store, "ls", root)
    first, second = answer.out.splitlines()[1:]
    assert "committed" in first
    assert "NOT COMMITTED" in second
    assert "model (incomplete)" in second
    assert "iter_000000009" in answer.line


def test_ls_takes_one_listing_and_the_pointer(proxied_store: S3Store, proxy: FaultProxy, place: Any) -> None:
    run(proxied_store, "ls", place(proxied_store, "ours"))
    requests = [(one.method, one.key) for one in proxy.log]
    assert len(requests) == 2, requests


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_ls_finds_the_checkpoints_folder_of_a_job(store: Store, place: Any) -> None:
    place(store, "ours", "job/checkpoints")
    assert len(run(store, "ls", store.below("job"), "--json").json["iterations"]) == 2


@pytest.mark.parametrize(("kind", "store"), KINDS_ON_STORES, indirect=["store"])
def test_show_describes_every_tensor(store: Store, place: Any, kind: str) -> None:
    document = run(store, "show", place(store, kind), "--json").json
    assert set(document) == {"url", "iteration", "record", "components"}
    wanted = components(2)["model"] if kind != "stock" else components(1)["model"]
    whole = {"ours": _NAMES, "cosmos": _NAMES}.get(kind, [""])
    assert [one["name"] for one in document["components"]] == whole
    part = document["components"][0]
    assert (part["num_tensors"], part["num_values"]) == (len(wanted), 0)
    assert {one["key"]: (one["dtype"], one["shape"], one["num_bytes"]) for one in part["tensors"]} == {
        key: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes)
        for key, tensor in wanted.items()
    }
    files = {chunk["file"] for one in part["tensors"] for chunk in one["chunks"]}
    assert len(files) == part["num_files"]
    assert part["bytes_by_rank"] == {"0": part["num_bytes"]}


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_show_chooses_keys_and_components(store: Store, place: Any) -> None:
    root = place(store, "ours")
    answer = run(store, "show", root, "*.weight", "--component", "model").out
    assert answer.count("float32[96, 512]") == 2
    assert "bias" not in answer
    values = run(store, "show", root, "--component", "optim", "--json").json["components"][0]["values"]
    assert [one["key"] for one in values] == ["param_groups.lr", "param_groups.names"]


@on_stores
def test_verify_finds_nothing_in_good_checkpoints_and_names_what_is_damaged(store: Store, place: Any) -> None:
    for kind in KINDS:
        found = run(store, "verify", place(store, kind, kind), "--json").json
        assert found["ok"]
        assert len(found["checkpoints"]) == 1
        checked = {one["checksums"] for one in found["checkpoints"][0]["components"].values()}
        assert checked == ({"checked"} if kind == "ours" else {"absent"})
    assert len(run(store, "verify", store.below("ours"), "--all", "--json").json["checkpoints"]) == 2

    shown = run(store, "show", store.below("ours"), "net.a.weight", "--component", "model", "--json").json
    chunk = shown["components"][0]["tensors"][0]["chunks"][0]
    store.flip(f"ours/iter_000000002/model/{chunk['file']}", chunk["start"] + chunk["num_bytes"] // 2)
    bad = run(store, "verify", store.below("ours"), "--json", code=1).json
    problems = bad["checkpoints"][0]["components"]["model"]["problems"]
    assert [(one["file"], one["item"]) for one in problems] == [(chunk["file"], "net.a.weight")]
    assert "net.a.weight" in run(store, "verify", store.below("ours"), code=1).out


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_verify_compares_with_the_commit_record(store: Store, place: Any) -> None:
    root = place(store, "ours")
    for name in store.raw_list():
        if name.startswith(("run/iter_000000002/optim/", "run/iter_000000002/trainer/")):
            store.raw_delete(name)
    for name in store.raw_list():
        if name.startswith("run/iter_000000001/optim/"):
            store.raw_write(name.replace("000001", "000002"), store.raw_read(name))
    report = run(store, "verify", root, "--json", code=1).json["checkpoints"][0]
    assert sorted(one["file"] for one in report["problems"]) == ["optim/.metadata", "trainer"]


@on_stores
def test_diff_reads_only_what_checksums_leave_open(store: Store, place: Any) -> None:
    root = place(store, "ours")
    same = run(store, "diff", f"{root}/iter_000000001", f"{root}/iter_000000001", "--json").json
    assert same["equal"]
    assert same["num_by_checksum"] == same["num_equal"] > 0
    report = run(store, "diff", f"{root}/iter_000000001", root, "--json", code=1).json
    kinds = {one["key"]: (one["kind"], one["num_elements"]) for one in report["differences"]}
    assert kinds["scheduler/last_epoch"] == ("value", None)
    assert kinds["model/count"] == ("value", 1)
    assert report["num_by_checksum"] == 2  # lr and names are the same in both.

    others = run(store, "diff", place(store, "stock", "stock"), f"{root}/iter_000000001/model", "--json").json
    assert others["equal"]
    assert others["num_by_checksum"] == 0
    assert others["num_equal"] == len(model_state())


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_diff_tells_keys_shapes_and_dtypes_apart(store: Store, place: Any) -> None:
    root = place(store, "ours")
    one, other = f"{root}/iter_000000001/model", f"{root}/iter_000000001/optim"
    kinds = {d["kind"] for d in run(store, "diff", one, other, "--json", code=1).json["differences"]}
    assert kinds == {"only in first", "only in second"}
    run(store, "export", f"{root}/iter_000000001", store.below("bf16"), "--dtype", "bf16")
    run(store, "import", store.below("bf16"), store.below("bf16dcp"))
    report = run(store, "diff", one, store.below("bf16dcp"), "--no-values", "--json", code=1).json
    assert {d["key"]: d["kind"] for d in report["differences"]} == {
        "net.a.weight": "dtype",
        "net_ema.a.weight": "dtype",
    }
    assert json.dumps(report)
