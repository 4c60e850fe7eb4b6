"""B38: every kind of tensor arrives as it was, or is refused by name."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.utils._pytree import tree_map

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter, IncompatibleStateError
from support.checkpoints import assert_loads, fails, load, save
from support.stores import FolderStore, MemoryStore
from support.tensors import (
    assert_bits_equal,
    blank_like,
    random_tensor,
    raw_bytes,
    state_of_all_dtypes,
    state_of_all_shapes,
)


def _save(state: dict[str, Any], url: str, mode: str) -> None:
    writer = FsspecStorageWriter(url)
    if mode == "sync":
        dcp.save(state, storage_writer=writer)
        return
    saving = dcp.async_save(state, storage_writer=writer)
    assert isinstance(saving, Future)
    saving.result(60)


@pytest.fixture(params=["memory", "path"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder of the test's own: in memory, where buffers are joined, or on disk, where they are gathered."""
    return str(tmp_path / "ckpt") if request.param == "path" else MemoryStore().below("ckpt")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_b38_every_dtype_and_shape(url: str, mode: str) -> None:
    """B38."""
    state = {**state_of_all_dtypes(), **state_of_all_shapes()}
    _save(state, url, mode)
    assert_loads(state, url)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_b38_every_dtype_between_stock_and_us(url: str, mode: str) -> None:
    """B38: both ways."""
    state = state_of_all_dtypes()
    _save(state, url, mode)
    loaded = blank_like(state)
    dcp.load(loaded, storage_reader=FsspecReader(url))
    assert_bits_equal(loaded, state)
    dcp.save(state, storage_writer=FsspecWriter(f"{url}-stock"))
    assert_bits_equal(load(state, f"{url}-stock"), state)


def _quantized(tensor: torch.Tensor, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.5, 1, dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
@pytest.mark.parametrize("writer", [FsspecStorageWriter, FsspecWriter])
@pytest.mark.parametrize("reader", [FsspecStorageReader, FsspecReader])
def test_b38_quantized_tensors(url: str, dtype: torch.dtype, writer: Any, reader: Any) -> None:
    """B38: between stock and us, all four ways."""
    stored = _quantized(torch.arange(-6.0, 6.0).reshape(3, 4), dtype)
    dcp.save({"q": stored, "w": torch.ones(2)}, storage_writer=writer(url))
    target = {"q": _quantized(torch.zeros(3, 4), dtype), "w": torch.zeros(2)}
    dcp.load(target, storage_reader=reader(url))
    assert torch.equal(target["q"].int_repr(), stored.int_repr())
    assert (target["q"].q_scale(), target["q"].q_zero_point()) == (0.5, 1)
    assert torch.equal(target["w"], torch.ones(2))


class _Doubled(torch.Tensor):
    """A wrapper: no storage of its own, an inner tensor, and it can say what it shows."""

    hidden: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Doubled:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.hidden = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def shown(value: Any) -> Any:
            return value.hidden.float() * 2 if isinstance(value, _Doubled) else value

        return func(*tree_map(shown, args), **tree_map(shown, kwargs or {}))


class _Opaque(torch.Tensor):
    """A subclass with memory of its own, which a reader that runs no foreign code cannot make again."""


class _Shell(torch.Tensor):
    """A wrapper that lets nobody look inside."""

    hidden: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Shell:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.hidden = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"{func} on a shell")


def _odd_ones() -> dict[str, torch.Tensor]:
    return {
        "_Opaque": torch.arange(6.0).as_subclass(_Opaque),
        "_Shell": _Shell(torch.arange(6, dtype=torch.int8)),
        "sparse_coo": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
    }


def test_b38_a_wrapper_arrives_with_the_values_that_it_shows() -> None:
    """B38: never with those of memory that it does not have."""
    store = MemoryStore()
    save({"w": _Doubled(torch.arange(6, dtype=torch.int8))}, store.below("ckpt"))
    target = {"w": torch.full((6,), -1.0)}
    dcp.load(target, storage_reader=FsspecStorageReader(store.below("ckpt")))
    assert torch.equal(target["w"], torch.arange(6.0) * 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["_Opaque", "_Shell", "sparse_coo", "sparse_csr", "meta"])
def test_b38_what_could_not_be_loaded_again_is_refused_at_the_save(tmp_path: Path, kind: str) -> None:
    """B38: with its key and its class or layout, before anything can be taken for a checkpoint."""
    store = FolderStore(tmp_path / "root", str(tmp_path / "root"))
    old = {"layer.weight": torch.ones(2), "good": torch.ones(3)}
    save(old, store.below("ckpt"))
    before = store.raw_list()
    with fails() as failure:
        save({"layer.weight": _odd_ones()[kind], "good": torch.ones(3)}, store.below("ckpt"))
    failure.names("layer.weight", kind)
    assert store.raw_list() == before
    assert_loads(old, store.below("ckpt"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(8,), (0,)])
def test_b38_an_element_type_that_files_have_no_word_for_is_refused(url: str, shape: tuple[int, ...]) -> None:
    with fails() as failure:
        save({"deep.w": torch.empty(shape, dtype=torch.int4)}, url)
    assert isinstance(failure.causes[0], IncompatibleStateError)
    failure.names("deep.w", "torch.int4", "torch.uint8")


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_b38_a_sparse_target_is_refused_rather_than_left_empty(url: str, layout: str) -> None:
    """B38: a dense tensor is stored, the target is sparse."""
    save({"w": torch.eye(3)}, url)
    with fails() as failure:
        dcp.load({"w": _odd_ones()[layout] * 0}, storage_reader=FsspecStorageReader(url))
    assert isinstance(failure.causes[0], IncompatibleStateError)
    failure.names("w:", layout)


def test_b38_a_subclass_that_torch_was_told_of_is_kept(url: str) -> None:
    """B38: as stock writers and readers do with `torch.serialization.add_safe_globals`."""
    stored = random_tensor(5).as_subclass(_Opaque)
    with torch.serialization.safe_globals([_Opaque]):
        save({"w": stored}, url)
        target = {"w": torch.zeros(5)}
        dcp.load(target, storage_reader=FsspecStorageReader(url))
    assert raw_bytes(target["w"]) == raw_bytes(stored.as_subclass(torch.Tensor))
