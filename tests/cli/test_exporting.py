"""export and import: what others load, from any store to any other, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from dcp_fsspec import ConfigurationError, CorruptCheckpointError
from dcp_fsspec.storage.filesystem import Store as PackageStore
from dcp_fsspec.tools import safetensors_files
from dcp_fsspec.tools.exporting import ExportOptions, export_checkpoint
from dcp_fsspec.tools.importing import import_files
from support.checkpoints import assert_loads, save
from support.commands import KINDS_ON_STORES, components, run
from support.stores import Store
from support.tensors import (
    assert_bits_equal,
    random_tensor,
    state_of_all_dtypes,
    state_of_all_shapes,
    state_of_everything,
)

on_stores = pytest.mark.parametrize("store", ["file", "moto", "seaweed"], indirect=True)


def _exported(store: Store, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return what the library loads of an export, its index followed."""
    files = [file for file in store.raw_list() if file.startswith(f"{name}/") and file.endswith(".safetensors")]
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        path = folder / file.replace("/", "_")
        path.write_bytes(store.raw_read(file))
        own = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        loaded |= own
        if len(files) > 1:
            index = json.loads(store.raw_read(f"{name}/model.safetensors.index.json"))
            assert {key for key, at in index["weight_map"].items() if f"{name}/{at}" == file} == set(own)
            assert index["metadata"]["total_size"] > 0
    return loaded


def _assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert_bits_equal(dict(sorted(got.items())), dict(sorted(wanted.items())))


@pytest.mark.parametrize(("kind", "store"), KINDS_ON_STORES, indirect=["store"])
def test_the_library_loads_an_export_of_every_kind_of_checkpoint(
    store: Store, place: Any, kind: str, tmp_path: Path
) -> None:
    report = run(store, "export", place(store, kind), store.below("out"), "--json").json
    assert set(report) == {"files", "num_tensors", "num_bytes", "left_out", "num_unverified", "seconds"}
    wanted = components(1 if kind == "stock" else 2)["model"]
    _assert_same(_exported(store, "out", tmp_path), wanted)
    assert (report["num_tensors"], report["left_out"], len(report["files"])) == (len(wanted), [], 1)
    assert (report["num_unverified"] == 0) == (kind == "ours")


@on_stores
def test_files_of_a_chosen_size_get_an_index(store: Store, place: Any, tmp_path: Path) -> None:
    place(store, "ours")
    files = run(store, "export", store.below("run"), store.below("out"), "--shard-size", "200kB", "--json").json[
        "files"
    ]
    assert [file.rpartition("/")[2] for file in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    _assert_same(_exported(store, "out", tmp_path), components(2)["model"])
    assert "exists already" in run(store, "export", store.below("run"), store.below("out"), code=2).line
    run(store, "export", store.below("run"), store.below("out"), "--overwrite", "--yes")
    assert "out/model.safetensors.index.json" not in store.raw_list()


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_averaged_weights_come_out_under_the_names_of_the_regular_ones(
    store: Store, place: Any, tmp_path: Path
) -> None:
    arguments = ("--ema", "--strip-prefix", "net.", "--dtype", "float16")
    run(store, "export", place(store, "ours"), store.below("ema.safetensors"), *arguments)
    model = components(2)["model"]
    wanted = {"a.weight": model["net_ema.a.weight"].half(), "b.bias": model["net_ema.b.bias"].half()}
    _assert_same(safetensors.torch.load(store.raw_read("ema.safetensors")), wanted)
    only = ("--only", "net.*", "--component", "model")
    run(store, "export", store.below("run"), store.below("some.safetensors"), *only)
    assert set(safetensors.torch.load(store.raw_read("some.safetensors"))) == {"net.a.weight", "net.b.bias"}
    assert "none is taken" in run(store, "export", store.below("run"), store.below("x"), "--only", "z", code=2).line


@on_stores
def test_a_torch_file_is_what_torch_save_would_have_made(store: Store, place: Any, tmp_path: Path) -> None:
    arguments = ("--format", "torch", "--component", "optim")
    run(store, "export", place(store, "ours"), store.below("optim.pt"), *arguments)
    path = tmp_path / "optim.pt"
    path.write_bytes(store.raw_read("optim.pt"))
    assert_bits_equal(torch.load(path, weights_only=True), components(2)["optim"])
    assert_bits_equal(torch.load(path, weights_only=True, mmap=True), components(2)["optim"])


@pytest.mark.parametrize("slab_bytes", [1 << 10, 1 << 20])
def test_every_shape_and_dtype_comes_out_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab_bytes: int
) -> None:
    monkeypatch.setattr("dcp_fsspec.tools.exporting._SLAB_BYTES", slab_bytes)
    known = {key: tensor for key, tensor in state_of_all_dtypes().items() if key in safetensors_files._NAMES}
    wanted = {**{f"dtypes.{key}": tensor for key, tensor in known.items()}, "row": random_tensor(1, 3000)}
    wanted |= {f"shapes.{key}": tensor for key, tensor in state_of_all_shapes().items()}
    save(dict(wanted), str(tmp_path / "ckpt"), shard_bytes=64 << 10)
    source = PackageStore(str(tmp_path / "ckpt"))
    export_checkpoint(source, PackageStore(str(tmp_path / "all.safetensors")))
    plain = {key: tensor.detach().contiguous() for key, tensor in wanted.items()}
    _assert_same(safetensors.torch.load_file(tmp_path / "all.safetensors"), plain)
    import_files(PackageStore(str(tmp_path / "all.safetensors")), PackageStore(str(tmp_path / "again")))
    assert_loads(plain, str(tmp_path / "again"))


def test_a_torch_file_holds_everything_that_a_state_can_hold(tmp_path: Path) -> None:
    wanted = state_of_everything(large_bytes=1 << 20)
    save(wanted, str(tmp_path / "ckpt"), shard_bytes=256 << 10)
    options = ExportOptions(format="torch")
    export_checkpoint(PackageStore(str(tmp_path / "ckpt")), PackageStore(str(tmp_path / "all.pt")), options)
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert list(loaded) == list(wanted)
    assert_bits_equal(loaded["dtypes"], wanted["dtypes"])
    assert_bits_equal(loaded["large"], wanted["large"])
    assert loaded["values"]["text"] == wanted["values"]["text"]


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save({"odd": random_tensor(3, dtype=torch.complex128)}, str(tmp_path / "ckpt"))
    with pytest.raises(ConfigurationError, match="odd"):
        export_checkpoint(PackageStore(str(tmp_path / "ckpt")), PackageStore(str(tmp_path / "out")))
    assert not list((tmp_path / "out").glob("*"))


@on_stores
def test_damage_is_not_exported(store: Store, place: Any) -> None:
    root = place(store, "ours")
    name = next(name for name in sorted(store.raw_list()) if "000002/model" in name and name.endswith(".distcp"))
    store.flip(name, store.raw_list()[name] // 2)
    assert "not those that were written" in run(store, "export", root, store.below("out"), code=5).line
    assert not [name for name in store.raw_list() if name.startswith("out")]


@on_stores
def test_files_of_others_become_a_checkpoint(store: Store, tmp_path: Path) -> None:
    one, two = {"a.w": random_tensor(30, 40)}, {"b.w": random_tensor(5, dtype=torch.bfloat16), "c": torch.empty(0, 2)}
    for name, state in (("model-1.safetensors", one), ("model-2.safetensors", two)):
        store.raw_write(f"hf/{name}", safetensors.torch.save(state))
    report = run(store, "import", store.below("hf"), store.below("ckpt"), "--add-prefix", "net.", "--json").json
    assert set(report) == {"files", "num_keys", "num_bytes", "seconds"}
    assert report["num_keys"] == 3
    assert_loads(
        {f"net.{key}": tensor for key, tensor in {**one, **two}.items()}, store.below("ckpt"), **store.arguments
    )
    assert "stands at" in run(store, "import", store.below("hf"), store.below("ckpt"), code=2).line

    nested = {"model": one, "lr": 0.1, "steps": [1, 2]}
    torch.save(nested, tmp_path / "state.pt")
    store.raw_write("state.pt", (tmp_path / "state.pt").read_bytes())
    run(store, "import", store.below("state.pt"), store.below("ckpt"), "--overwrite", "--yes")
    assert_loads(nested, store.below("ckpt"), **store.arguments)


class _Hostile:
    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize("store", ["file", "seaweed"], indirect=True)
def test_damaged_and_hostile_files_are_refused(store: Store, tmp_path: Path) -> None:
    torch.save({"a": _Hostile()}, tmp_path / "bad.pt")
    store.raw_write("bad.pt", (tmp_path / "bad.pt").read_bytes())
    assert "plain values" in run(store, "import", store.below("bad.pt"), store.below("x"), code=5).line
    good = safetensors.torch.save({"a": torch.ones(100)})
    store.raw_write("cut.safetensors", good[:-8])
    assert "cut short" in run(store, "import", store.below("cut.safetensors"), store.below("x"), code=5).line
    store.raw_write("odd.safetensors", b"\xff" * 64)
    run(store, "import", store.below("odd.safetensors"), store.below("x"), code=5)
    run(store, "import", store.below("none.safetensors"), store.below("x"), code=3)
    run(store, "import", store.below("none"), store.below("x"), code=3)
    assert not [name for name in store.raw_list() if name.startswith("x/")]


def test_an_index_cannot_lead_out_of_its_folder() -> None:
    with pytest.raises(CorruptCheckpointError):
        safetensors_files.files_in_index(b'{"weight_map": {"a": "../../secret.safetensors"}}', "here")


def test_a_header_that_contradicts_itself_is_refused() -> None:
    for header in (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        b"[]",
    ):
        with pytest.raises(CorruptCheckpointError):
            safetensors_files.parse_header(header, "here")
