"""Torch's stream transforms, such as its zstd, in both directions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension, ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_fsspec import DcpFsspecError, FsspecStorageReader, FsspecStorageWriter
from support.stores import Store
from support.tensors import assert_bits_equal, blank_like, random_tensor, state_of_everything

SHARD_BYTES = 64 << 10


class _InvertedWriter(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._output.write(bytes(byte ^ 0xFF for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes

    def close(self) -> None:
        super().close()
        self._output.close()


class Inverted(StreamTransformExtension):
    """Stores every byte inverted; stands for encryption."""

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _InvertedWriter(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(byte ^ 0xFF for byte in input.read()))


def _registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Inverted)
    return registry


def _assert_loads(reader: Any, wanted: dict[str, Any]) -> None:
    loaded = blank_like(wanted)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)


@pytest.mark.parametrize("store", ["path", "memory"], indirect=True)
def test_what_we_compressed_stock_torch_and_we_read(store: Store) -> None:
    state = state_of_everything(large_bytes=512 << 10)
    state["zeros"] = torch.zeros(1000, 1000)
    writer = FsspecStorageWriter(store.url, shard_bytes=SHARD_BYTES, extensions=[ZStandard()], **store.arguments)
    dcp.save(state, storage_writer=writer)
    _assert_loads(FileSystemReader(store.url) if store.url.startswith("/") else FsspecReader(store.url), state)
    reader = FsspecStorageReader(store.url, **store.arguments)
    _assert_loads(reader, state)
    assert (reader.last_report.num_verified, reader.last_report.num_unverified) == (reader.last_report.num_items, 0)
    written = sum(size for name, size in store.raw_list().items() if name.endswith(".distcp"))
    assert written < 4 << 20, "the zeros were not compressed"


def _small_state() -> dict[str, Any]:
    return {"w": random_tensor(300, 101), "zeros": torch.zeros(5000), "epoch": 3, "empty": torch.zeros(0)}


def test_a_transform_of_users_is_exchanged_with_stock_torch(tmp_path: Path) -> None:
    state = _small_state()
    ours = FsspecStorageWriter(tmp_path / "ours", shard_bytes=SHARD_BYTES, extensions=[Inverted()])
    stock = FileSystemWriter(tmp_path / "stock", _extensions=[Inverted()])
    for name, writer in {"ours": ours, "stock": stock}.items():
        dcp.save(state, storage_writer=writer)
        _assert_loads(FileSystemReader(tmp_path / name, _extension_registry=_registry()), state)
        _assert_loads(FsspecStorageReader(tmp_path / name, extension_registry=_registry()), state)


@pytest.mark.parametrize("extensions", [[Inverted(), ZStandard()], [ZStandard(), Inverted()]])
def test_two_transforms_are_listed_in_the_order_in_which_readers_undo_them(
    extensions: list[StreamTransformExtension], tmp_path: Path
) -> None:
    """Stock torch's own writer lists them so that no reader can undo them (torch 2.13)."""
    state = _small_state()
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES, extensions=extensions))
    _assert_loads(FsspecStorageReader(tmp_path, extension_registry=_registry()), state)
    _assert_loads(FileSystemReader(tmp_path, _extension_registry=_registry()), state)


def test_an_unknown_transform_is_named(tmp_path: Path) -> None:
    dcp.save(_small_state(), storage_writer=FsspecStorageWriter(tmp_path, extensions=[Inverted()]))
    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank_like(_small_state()), storage_reader=FsspecStorageReader(tmp_path))
    error = raised.value.failures[0][0]
    assert isinstance(error, DcpFsspecError)
    assert "stream.inverted" in str(error)


def test_damage_in_compressed_items_of_others_is_an_error(tmp_path: Path) -> None:
    """B46: no checksums there, but a decoder that fails must not fail as something else."""
    dcp.save(_small_state(), storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    path = next(tmp_path.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    path.write_bytes(data)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(blank_like(_small_state()), storage_reader=FsspecStorageReader(tmp_path))
    assert isinstance(raised.value.failures[0][0], DcpFsspecError)
