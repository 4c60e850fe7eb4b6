"""`.metadata` of a stranger: nothing runs, nothing is written, nothing large is allocated."""

import builtins
import contextlib
import os
import pickle
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_fsspec import CorruptCheckpointError, FsspecStorageReader, FsspecStorageWriter, UnsafeCheckpointError
from dcp_fsspec.storage import metadata, pickle_scan

URL = "s3://bucket/ckpt/.metadata"


def good() -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2, 3]), [chunk])
    return Metadata(
        state_dict_metadata={"w": tensor, "b": BytesStorageMetadata()},
        planner_data={"w": ("w",), "b": ("b", 0)},
        storage_data={
            MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("b"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        storage_meta=StorageMeta("x", "id"),
        version="1.0.0",
    )


def data_of(loaded: Metadata) -> bytes:
    return pickle.dumps(loaded, protocol=4)


def test_good_metadata_comes_through_unchanged() -> None:
    assert metadata.decode(data_of(good()), URL) == good()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_of_the_last_years(protocol: int) -> None:
    assert metadata.decode(pickle.dumps(good(), protocol=protocol), URL) == good()


def test_a_path_where_a_str_belongs_is_read_on_every_platform() -> None:
    loaded = good()
    loaded.storage_meta = StorageMeta(Path("/a/b c"), "id")
    data = data_of(loaded)
    # From Python 3.13 on, paths are pickled under this name.
    newer = data.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    for text in (data, _reframed(newer)):
        assert metadata.decode(text, URL).storage_meta == StorageMeta("/a/b c", "id")


def _reframed(data: bytes) -> bytes:
    """Drop the frame opcode, whose length no longer fits."""
    return data[:2] + data[11:]


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


ATTACKS = {
    "os.system": Call(os.system, "touch {mark}"),
    "subprocess": Call(subprocess.call, ["touch", "{mark}"]),
    "eval": Call(builtins.eval, "open({mark!r}, 'w')"),
    "exec": Call(builtins.exec, "open({mark!r}, 'w')"),
    "getattr": Call(getattr, "os", "system"),
    "open": Call(open, "{mark}", "w"),
    "import": Call(builtins.__import__, "antigravity"),
    "torch.load": Call(torch.load, "/etc/passwd"),
    "torch.hub": Call(torch.hub.load, "a/b", "c"),
    "bytearray": Call(bytearray, 1 << 40),
    "numbers": Call(torch.zeros, 1 << 40),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("place", ["alone", "inside"])
def test_calls_are_refused_and_not_made(name: str, place: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    function, arguments = ATTACKS[name].reduced
    aimed = tuple(
        argument.format(mark=str(mark)) if isinstance(argument, str) and "{" in argument else argument
        for argument in arguments
    )
    attack: Any = Call(function, *aimed)
    if place == "inside":
        loaded = good()
        loaded.planner_data = {"w": attack}
        attack = loaded
    with pytest.raises(UnsafeCheckpointError, match="refused"):
        metadata.decode(data_of(attack), URL)
    assert not mark.exists()


def test_a_dotted_name_reaches_nothing() -> None:
    hidden = b"\x80\x04\x8c\x05torch\x8c\x0fSize.__class__.\x93."
    for name in (b"Size.__class__", b"serialization.os.system", b"float32.__class__"):
        text = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name + b"\x93."
        with pytest.raises(UnsafeCheckpointError):
            metadata.decode(text, URL)
    with pytest.raises(UnsafeCheckpointError):
        metadata.decode(hidden, URL)


@pytest.mark.parametrize("padding", [0, 2 << 20])
def test_what_metadata_says_of_memory_formats_cannot_be_changed(padding: int) -> None:
    """Otherwise all that is saved later would say it."""
    member = TensorProperties(torch.float32).__getstate__()[3]  # type: ignore[no-untyped-call]
    before = dict(vars(member))
    text = b"\x80\4ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R"
    text += b"}\x8c\7_value_K\5s\x8c\6_name_\x8c\1xsb" + b"B" + padding.to_bytes(4, "little") + bytes(padding) + b"0."
    with pytest.raises(UnsafeCheckpointError, match="tries to change"):
        metadata.decode(text, URL)
    assert dict(vars(member)) == before


def test_classes_cannot_be_changed() -> None:
    before = dict(vars(Metadata))
    # BUILD with (None, {name: value}) sets attributes on whatever lies on the stack, here a class.
    text = (
        b"\x80\x04\x8c\x26torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93"
        b"N}\x8c\x07version\x8c\x04evil\x73\x86\x62."
    )
    text = text.replace(b"\x8c\x26", b"\x8c" + bytes([len("torch.distributed.checkpoint.metadata")]))
    with pytest.raises(UnsafeCheckpointError, match="tries to change"):
        metadata.decode(text, URL)
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../x", "s3://other/x", "file:///etc/passwd", "", "a\\..\\b", "simplecache::/x"],
)
def test_shard_paths_that_leave_the_folder(path: str) -> None:
    loaded = good()
    loaded.storage_data[MetadataIndex("b")] = _StorageInfo(path, 100, 50)
    with pytest.raises(UnsafeCheckpointError, match="not inside"):
        metadata.decode(data_of(loaded), URL)


def broken(**changes: Any) -> Metadata:
    loaded = good()
    for name, value in changes.items():
        setattr(loaded, name, value)
    return loaded


def with_item(offset: Any, length: Any) -> Metadata:
    loaded = good()
    loaded.storage_data[MetadataIndex("b")] = _StorageInfo("__0_0.distcp", offset, length)
    return loaded


def with_tensor(size: Any, offsets: Any, sizes: Any, dtype: Any = torch.float32) -> Metadata:
    loaded = good()
    chunk = ChunkStorageMetadata(offsets, sizes)
    loaded.state_dict_metadata["w"] = TensorStorageMetadata(TensorProperties(dtype), size, [chunk])
    return loaded


def with_offset(fqn: str, offset: Any) -> MetadataIndex:
    index = MetadataIndex(fqn)
    object.__setattr__(index, "offset", offset)
    return index


NONSENSE = {
    "a dict": {"state_dict_metadata": {}},
    "no state": broken(state_dict_metadata=None),
    "no storage": broken(storage_data=None),
    "a list": broken(storage_data=[]),
    "a key that is no str": broken(state_dict_metadata={3: BytesStorageMetadata()}),
    "a record that is none": broken(state_dict_metadata={"w": 3}),
    "an index that is none": broken(storage_data={"w": _StorageInfo("a", 0, 1)}),
    "negative offset": with_item(-1, 5),
    "absurd length": with_item(100, 1 << 60),
    "length that is no number": with_item(100, "9"),
    "number beyond 64 bits": with_item(1 << 70, 1),
    "length that is a bool": with_item(100, True),
    "a path that is no str": broken(storage_data={MetadataIndex("b"): _StorageInfo(3, 0, 1)}),  # type: ignore[arg-type]
    "overlap": with_item(50, 100),
    "negative size": with_tensor((-2, 3), (0, 0), (2, 3)),
    "gigantic shape": with_tensor((1 << 40, 1 << 40), (0, 0), (2, 3)),
    "chunk outside": with_tensor((2, 3), (1, 0), (2, 3)),
    "chunk of other dimensions": with_tensor((2, 3), (0,), (2,)),
    "chunk of text": with_tensor((2, 3), ("0", "0"), (2, 3)),
    "chunk of bools": with_tensor((2, 3), (False, False), (2, 3)),
    "a negative index": broken(storage_data={MetadataIndex("w", index=-1): _StorageInfo("a", 0, 1)}),
    "an offset of text": broken(storage_data={with_offset("w", ("0",)): _StorageInfo("a", 0, 1)}),
    "a negative offset in a tensor": broken(storage_data={MetadataIndex("w", (-1,)): _StorageInfo("a", 0, 1)}),
    "an index of text": broken(storage_data={MetadataIndex("w", index="x"): _StorageInfo("a", 0, 1)}),  # type: ignore[arg-type]
    "a storage_meta that is none": broken(storage_meta=["x"]),
    "transforms that are none": broken(storage_data={MetadataIndex("b"): _StorageInfo("a", 0, 1, [3])}),  # type: ignore[list-item]
    "no dtype": with_tensor((2, 3), (0, 0), (2, 3), dtype="float32"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_named_as_damage(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        metadata.decode(data_of(NONSENSE[name]), URL)


@pytest.mark.parametrize(
    "put", [pytest.param(b"r\xff\xff\xff\x7f", id="binary"), pytest.param(b"p2147483647\n", id="text")]
)
def test_a_huge_memo_is_not_made(put: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptCheckpointError, match=r"memo|opcode"):
        metadata.decode(b"\x80\x04K\x01" + put + b".", URL)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


COPIES = {
    "a shape": (b"(" + b"K\1" * 50_000 + b"t", b"\x8c\5torch\x8c\4Size\x93h\0\x85R"),
    "a path": (b"X\0\0\1\0" + b"a" * 65536, b"\x8c\7pathlib\x8c\tPosixPath\x93h\0h\0\x86R"),
    "a state": (
        b"}(" + b"".join(b"\x8c\5%05dN" % number for number in range(30_000)) + b"u",
        b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n)\x81h\0b",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_one_value_are_not_made(name: str) -> None:
    what, each = COPIES[name]
    data = b"\x80\4" + what + b"\x94](" + each * 5000 + b"e."
    assert len(data) < pickle_scan.MAX_SCANNED_BYTES
    with pytest.raises(CorruptCheckpointError, match="copies"):
        metadata.decode(data, URL)


@pytest.mark.parametrize("wrap", [b"\x85", b"\x94h\x00\x85"])
def test_deep_nesting_does_not_end_the_process(wrap: bytes) -> None:
    deep = b"\x80\x04})" + b"\x85" * 300_000 + b"K\x01s."
    with pytest.raises(CorruptCheckpointError, match="nests"):
        metadata.decode(deep, URL)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x04", b"not a pickle", b"\x80\x04N.", bytes(1000)])
def test_what_is_no_metadata(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        metadata.decode(data, URL)


@given(st.data())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_damaged_metadata_raises_these_two_errors_or_is_read(data: st.DataObject) -> None:
    text = bytearray(data_of(good()))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "copy"]))
        if kind == "flip":
            text[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del text[at : at + data.draw(st.integers(1, 20))]
        elif kind == "insert":
            text[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        else:
            source = data.draw(st.integers(0, len(text)))
            text[at:at] = text[source : source + data.draw(st.integers(1, 60))]
        if not text:
            break
    with contextlib.suppress(CorruptCheckpointError, UnsafeCheckpointError):
        metadata.decode(bytes(text), URL)


@given(st.binary(max_size=200))
@example(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff")
@settings(max_examples=400)
def test_any_bytes_raise_these_two_errors(data: bytes) -> None:
    with pytest.raises((CorruptCheckpointError, UnsafeCheckpointError)):
        metadata.decode(b"\x80\x04" + data, URL)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["DCP_FSSPEC_TEST_MARK"],))


def test_python_values_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("DCP_FSSPEC_TEST_MARK", str(mark))
    dcp.save({"v": Evil()}, storage_writer=FsspecStorageWriter(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match=r"(?s)UnsafeCheckpointError.*trust_pickle"):
        dcp.load({"v": None}, storage_reader=FsspecStorageReader(tmp_path / "c"))
    assert not mark.exists()


def test_values_of_a_type_that_was_allowed(tmp_path: Path) -> None:
    value = (complex(1, 2), Path("x"))
    before = list(torch.serialization.get_safe_globals())
    dcp.save({"v": value}, storage_writer=FsspecStorageWriter(tmp_path / "c"))
    with pytest.raises(dcp.api.CheckpointException, match="pathlib"):
        dcp.load({"v": None}, storage_reader=FsspecStorageReader(tmp_path / "c"))
    for trust in ([type(Path()), Path], True):
        target: dict[str, Any] = {"v": None}
        dcp.load(target, storage_reader=FsspecStorageReader(tmp_path / "c", trust_pickle=trust))
        assert target["v"] == value
    assert torch.serialization.get_safe_globals() == before
