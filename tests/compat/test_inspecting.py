"""Looking around in a checkpoint, and reading single tensors by the bytes of these alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_fsspec import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    open_checkpoint,
    read_tensor,
)
from dcp_fsspec.storage.inspecting import slabs
from support.checkpoints import save
from support.stores import S3Store, Store
from support.tensors import assert_bits_equal, random_tensor, raw_bytes

STATE: dict[str, Any] = {
    "model": {
        "w": random_tensor(3000, 256, seed=1),
        "row": random_tensor(1, 50_000, seed=2),
        "s": random_tensor(seed=3),
    },
    "none": torch.empty(0, 4),
    "lr": 0.5,
}


@pytest.mark.parametrize("store", ["file", "moto", "seaweed", "obstore"], indirect=True)
def test_a_view_tells_what_there_is_and_reads_it(store: Store) -> None:
    save(STATE, store.below("ckpt"), shard_bytes=512 << 10, **store.arguments)
    view = open_checkpoint(store.below("ckpt"), **store.arguments)
    assert list(view.tensors) == ["model.w", "model.row", "model.s", "none"]
    assert list(view.values) == ["lr"]
    weight = view.tensors["model.w"]
    assert (weight.shape, weight.dtype, weight.num_bytes) == ((3000, 256), torch.float32, 3000 * 1024)
    files = {name.removeprefix("ckpt/"): size for name, size in store.raw_list().items() if name.endswith(".distcp")}
    assert view.bytes_by_file() == files
    assert view.bytes_by_rank() == {0: sum(files.values())}
    for fqn, wanted in STATE["model"].items():
        assert_bits_equal(view.read_tensor(f"model.{fqn}"), wanted)
    assert view.read_tensor("none").shape == (0, 4)
    assert view.read_values(["lr"]) == {"lr": 0.5}
    assert_bits_equal(
        read_tensor(store.below("ckpt"), "model.w", (1499, 1502), **store.arguments), STATE["model"]["w"][1499:1502]
    )


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_rows_cost_the_bytes_of_these_rows(seaweed_store: S3Store, tmp_path: Path, writer: str) -> None:
    if writer == "ours":
        save(STATE, seaweed_store.below("ckpt"), **seaweed_store.arguments)
    else:
        dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(tmp_path))
        for path in tmp_path.iterdir():
            seaweed_store.raw_write(f"ckpt/{path.name}", path.read_bytes())
    view = open_checkpoint(seaweed_store.below("ckpt"), **seaweed_store.arguments)
    for rows in (slice(2990, None), slice(0, 1), slice(100, 300), slice(5, 5)):
        assert_bits_equal(view.read_tensor("model.w", rows), STATE["model"]["w"][rows])
        report = view.last_report
        needed = STATE["model"]["w"][rows].nbytes
        assert report.num_bytes_needed == needed
        assert report.num_bytes <= 1.05 * needed + 4096


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    save(STATE, str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "none")
    view = open_checkpoint(tmp_path)
    for fqn in ("nothing", "lr"):
        with pytest.raises(CheckpointNotFoundError, match=fqn):
            view.read_tensor(fqn)
    for fqn, rows in (("model.w", (0, 3001)), ("model.w", (5, 4)), ("model.s", (0, 1)), ("model.w", slice(0, 9, 2))):
        with pytest.raises(ConfigurationError):
            view.read_tensor(fqn, rows)
    with pytest.raises(CheckpointNotFoundError):
        view.read_values(["model.w"])


def test_damage_is_found_when_a_tensor_is_read_whole(tmp_path: Path) -> None:
    save({"w": STATE["model"]["w"]}, str(tmp_path))
    file = next(tmp_path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        read_tensor(tmp_path, "w")


@pytest.mark.parametrize("slab_bytes", [20_000, 100_000, 10 << 20])
def test_slabs_make_up_all_tensors_in_order_and_are_verified_where_they_can_be(tmp_path: Path, slab_bytes: int) -> None:
    save(STATE, str(tmp_path), shard_bytes=64 << 10)
    view = open_checkpoint(tmp_path)
    parts: dict[str, list[bytes]] = {}
    unverified = 0
    for group in slabs(view, list(view.tensors), slab_bytes):
        for box, tensor in zip(group, view.read_boxes(group), strict=True):
            parts.setdefault(box.fqn, []).append(raw_bytes(tensor))
        unverified += view.last_report.num_unverified
    assert {fqn: b"".join(found) for fqn, found in parts.items()} == {
        **{f"model.{fqn}": raw_bytes(tensor) for fqn, tensor in STATE["model"].items()},
        "none": b"",
    }
    assert unverified == 0 or slab_bytes < 64 << 10
