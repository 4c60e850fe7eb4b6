"""Stock torch loads what we wrote, we load what stock torch wrote, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.stores import FolderStore, Store
from support.tensors import assert_bits_equal, blank_like, random_tensor, state_of_everything

SHARD_BYTES = 64 << 10
"""Small, so that the large tensors of a state are cut into many pieces."""

EVERYWHERE = pytest.mark.parametrize(
    "store", ["path", "file", "moto", pytest.param("seaweed", marks=pytest.mark.server)], indirect=True
)

STOCK_WRITERS: dict[str, dict[str, Any]] = {
    "one_file": {},
    "four_threads": {"thread_count": 4},
    "a_file_per_item": {"single_file_per_rank": False},
    "compressed": {"_extensions": [ZStandard()]},
}


def _state() -> dict[str, Any]:
    return state_of_everything(large_bytes=512 << 10)


def _stock_reader(store: Store) -> FileSystemReader:
    if store.url.startswith("/"):
        return FileSystemReader(store.url)
    return FsspecReader(store.url, **(store.storage_options or {}))


def _stock_writer(store: Store, **options: Any) -> Any:
    if store.url.startswith("/"):
        return FileSystemWriter(store.url, sync_files=False, **options)
    return FsspecWriter(store.url, sync_files=False, **options, **(store.storage_options or {}))


def _assert_loads(reader: Any, wanted: dict[str, Any]) -> None:
    loaded = blank_like(wanted)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, wanted)


@EVERYWHERE
def test_stock_torch_loads_everything_that_we_wrote(store: Store) -> None:
    state = _state()
    dcp.save(state, storage_writer=FsspecStorageWriter(store.url, shard_bytes=SHARD_BYTES, **store.arguments))
    _assert_loads(_stock_reader(store), state)


@EVERYWHERE
def test_we_load_everything_that_stock_torch_wrote(store: Store) -> None:
    state = _state()
    dcp.save(state, storage_writer=_stock_writer(store))
    _assert_loads(FsspecStorageReader(store.url, **store.arguments), state)


def _odd_views() -> dict[str, Any]:
    """Return views that a frame cannot hold as they are, and tensors of other kinds."""
    numbers = random_tensor(40, 30, dtype=torch.complex64, seed=1)
    weights = torch.nn.Parameter(random_tensor(40, 30, seed=2))
    return {
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "conjugate_rows": numbers.conj()[3:7, ::2],
        "with_a_graph": weights * 2,
        "reversed_dims": random_tensor(3, 4, 5, 6, seed=3).permute(3, 2, 1, 0),
        "overlapping": random_tensor(100, seed=4).as_strided((10, 10), (3, 1)),
        "buffer": torch.nn.Buffer(random_tensor(7, seed=5)),
    }


def test_views_of_every_kind_are_stored_as_what_they_show(tmp_path: Path) -> None:
    """B37."""
    state = _odd_views()
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "ours"))
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    for reader in (
        FileSystemReader(tmp_path / "ours"),
        FsspecStorageReader(tmp_path / "ours"),
        FsspecStorageReader(tmp_path / "stock"),
    ):
        _assert_loads(reader, state)


def test_targets_of_every_kind_are_filled(tmp_path: Path) -> None:
    """B37: transposed, strided, narrow and with a gradient, also where an item comes in pieces."""
    full = random_tensor(400, 300)
    dcp.save({"w": full}, storage_writer=FsspecStorageWriter(tmp_path / "ours", shard_bytes=SHARD_BYTES))
    dcp.save({"w": full}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    for folder in ("ours", "stock"):
        around = torch.zeros(402, 302)
        targets = {
            "transposed": torch.zeros(300, 400).t(),
            "strided": torch.zeros(800, 600)[::2, 1::2],
            "inside": around[1:-1, 1:-1],
            "parameter": torch.nn.Parameter(torch.zeros(400, 300)),
        }
        for name, target in targets.items():
            dcp.load({"w": target}, storage_reader=FsspecStorageReader(tmp_path / folder))
            assert_bits_equal(target, full, f"{folder}, {name}")
        assert not around[0].any()
        assert not around[:, -1].any()


def test_a_slice_takes_the_room_of_the_slice_alone(tmp_path: Path) -> None:
    """B37."""
    base = random_tensor(1000, 1000)
    dcp.save({"rows": base[:2], "tied": base[:2]}, storage_writer=FsspecStorageWriter(tmp_path))
    written = sum(size for name, size in FolderStore(tmp_path, "").raw_list().items() if name.endswith(".distcp"))
    assert written < 2 * (8000 + 4096)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_are_exchanged_as_stock_torch_does(tmp_path: Path) -> None:
    """B38."""

    def quantized(values: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(values, 0.1, 2, torch.qint8)

    wanted = quantized(torch.arange(-5, 5, dtype=torch.float32))
    dcp.save({"q": wanted}, storage_writer=FsspecStorageWriter(tmp_path / "ours"))
    dcp.save({"q": wanted}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    for reader in (
        FileSystemReader(tmp_path / "ours"),
        FsspecStorageReader(tmp_path / "ours"),
        FsspecStorageReader(tmp_path / "stock"),
    ):
        loaded = {"q": quantized(torch.zeros(10))}
        dcp.load(loaded, storage_reader=reader)
        assert torch.equal(loaded["q"].int_repr(), wanted.int_repr())


@pytest.mark.parametrize("options", STOCK_WRITERS.values(), ids=STOCK_WRITERS)
@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_we_load_what_stock_torch_wrote_in_every_arrangement_of_files(store: Store, options: dict[str, Any]) -> None:
    state = _state()
    dcp.save(state, storage_writer=_stock_writer(store, **options))
    for verify in ("read", "full", "off"):
        _assert_loads(FsspecStorageReader(store.url, verify=verify), state)


@pytest.mark.parametrize("options", [{}, {"_extensions": [ZStandard()]}], ids=["plain", "compressed"])
@pytest.mark.parametrize("store", ["path"], indirect=True)
def test_chosen_keys_of_what_stock_torch_wrote_are_right(store: Store, options: dict[str, Any]) -> None:
    """Keys chosen from the middle, into a state of the keys wanted alone."""
    state = _state()
    dcp.save(state, storage_writer=_stock_writer(store, **options))
    for group, names in {"large": ["half", "flat"], "dtypes": ["complex64", "bool"], "shapes": ["strided"]}.items():
        part = {group: {name: state[group][name] for name in names}}
        _assert_loads(FsspecStorageReader(store.url), part)


def test_dcp_to_torch_save_makes_the_same_state_of_our_checkpoint(tmp_path: Path) -> None:
    state = _state()
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "ours", shard_bytes=SHARD_BYTES))
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "state.pt")
    converted = torch.load(tmp_path / "state.pt", weights_only=False)
    del state["values"]["nested"]["empty"]  # DCP knows the leaves alone
    assert_bits_equal(_sorted(converted), _sorted(state))


def _sorted(value: Any) -> Any:
    """Bring the keys of dicts in one order: DCP writes values before tensors."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(one) for one in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_chosen_keys_are_loaded_without_a_state(tmp_path: Path) -> None:
    """Torch makes the state itself, from what the reader's metadata say."""
    state = _state()
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES))
    loaded = _load_state_dict_from_keys({"large", "values.text"}, storage_reader=FsspecStorageReader(tmp_path))
    wanted = {"large": state["large"], "values": {"text": state["values"]["text"]}}
    assert_bits_equal(_sorted(loaded), _sorted(wanted))


def test_our_metadata_say_what_stock_torchs_say(tmp_path: Path) -> None:
    state = {name: _state()[name] for name in ("dtypes", "shapes", "values")}
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "ours"))
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"))
    ours, stock = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "stock"))
    for field in ("state_dict_metadata", "planner_data", "version"):
        assert getattr(ours, field) == getattr(stock, field)
    assert ours.storage_data.keys() == stock.storage_data.keys()
    lengths = {index: info.length for index, info in stock.storage_data.items()}
    assert {index: info.length for index, info in ours.storage_data.items()} == lengths
    assert ours.storage_meta is not None
    assert type(ours.storage_meta.checkpoint_id) is str


def test_we_load_the_output_of_torch_save_to_dcp(tmp_path: Path) -> None:
    state = _state()
    torch.save(state, tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "converted")
    _assert_loads(FsspecStorageReader(tmp_path / "converted"), state)


def test_saving_what_stock_torch_loaded_from_us_gives_the_same_items_again(tmp_path: Path) -> None:
    """Both ways in turn: no writer depends on what only the other one leaves behind."""
    state = _state()
    dcp.save(state, storage_writer=FsspecStorageWriter(tmp_path / "a", shard_bytes=SHARD_BYTES))
    loaded = blank_like(state)
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / "a"))
    dcp.save(loaded, storage_writer=FileSystemWriter(tmp_path / "b"))
    again = blank_like(state)
    dcp.load(again, storage_reader=FsspecStorageReader(tmp_path / "b"))
    dcp.save(again, storage_writer=FsspecStorageWriter(tmp_path / "c", shard_bytes=SHARD_BYTES))
    first, last = (FolderStore(tmp_path / name, "") for name in ("a", "c"))
    shards = [name for name in first.raw_list() if name.endswith(".distcp")]
    assert shards
    assert all(first.raw_read(name) == last.raw_read(name) for name in shards)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_stock_torch_overwrites_our_checkpoint_and_we_overwrite_stock_torchs(tmp_path: Path) -> None:
    versions = [{"w": random_tensor(300, 101, seed=seed), "version": seed} for seed in range(4)]
    writers = [
        FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES),
        FileSystemWriter(tmp_path),
        FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES),
        FsspecStorageWriter(tmp_path, shard_bytes=SHARD_BYTES),
    ]
    for state, writer in zip(versions, writers, strict=True):
        dcp.save(state, storage_writer=writer)
        _assert_loads(FsspecStorageReader(tmp_path, verify="full"), state)
        _assert_loads(FileSystemReader(tmp_path), state)
