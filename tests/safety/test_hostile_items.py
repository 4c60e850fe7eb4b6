"""Tensors and Python values of a stranger: nothing runs, nothing large is allocated, whatever they claim to be."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import struct
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec import CorruptCheckpointError, FsspecStorageReader, FsspecStorageWriter, verify
from dcp_fsspec.storage import framing
from dcp_fsspec.storage.archive import check_archive
from dcp_fsspec.storage.byte_items import ByteItems
from support.tensors import all_dtypes, random_tensor, state_of_python_values

MIB = 1 << 20
HUGE = 1 << 40


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Leave 256 MiB beyond what is in use, so that a large allocation fails where it is tried."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 256 * MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(call: Callable[[], object]) -> str:
    """Return what the error of `call` says, which must not be that memory ran out."""
    try:
        with little_memory():
            call()
    except (Exception, CheckpointException) as error:
        text = "".join(traceback.format_exception(error))
        reasons = [error]
        if isinstance(error, CheckpointException):
            reasons = [reason for reason, _ in error.failures.values()]
            text += "".join("".join(traceback.format_exception(reason)) for reason in reasons)
        assert "MemoryError" not in text, text
        assert "allocate" not in text.replace("to allocate", ""), text
        return text
    raise AssertionError("it was accepted")


def archive(program: bytes, *, storages: dict[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive as torch.save makes it, with a pickle of one's own."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        made.writestr("archive/data.pkl", program)
        made.writestr("archive/byteorder", b"little")
        for key, content in (storages or {"0": bytes(16)}).items():
            made.writestr(f"archive/data/{key}", content)
        made.writestr("archive/version", b"3\n")
    return stream.getvalue()


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(numel: int = 4, key: str = "0", kind: str = "FloatStorage") -> bytes:
    text = b"X\7\0\0\0storagectorch\n%b\nX\1\0\0\0%bX\3\0\0\0cpu" % (kind.encode(), key.encode())
    return b"(" + text + number(numel) + b"tQ"


def tensor(size: tuple[int, ...], stride: tuple[int, ...], *, offset: int = 0, numel: int = 4) -> bytes:
    arguments = (
        storage(numel) + number(offset) + numbers(*size) + numbers(*stride) + b"\x89ccollections\nOrderedDict\n)R"
    )
    return b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR."


def quantized(size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    parameters = b"(ctorch\nper_tensor_affine\nG\x3f\xf0\0\0\0\0\0\0K\0t"
    arguments = storage(16, kind="QInt8Storage") + b"K\0" + numbers(*size) + numbers(*stride) + parameters
    return b"\x80\2ctorch._utils\n_rebuild_qtensor\n(" + arguments + b"\x89ccollections\nOrderedDict\n)RtR."


def call(name: str, *arguments: bytes) -> bytes:
    return b"\x80\2c%b\n(%btR." % (name.replace(" ", "\n").encode(), b"".join(arguments))


def repeated(what: bytes, each: bytes) -> bytes:
    """Return a pickle that makes one long value and hands it to 100,000 calls."""
    return b"\x80\2" + what + b"q\1](" + each * 100_000 + b"e."


LONG_TEXT = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000
LONG_LIST = b"](" + b"K\1" * 100_000 + b"e"
LONG_DICT = b"}(" + b"".join(b"X\5\0\0\0%05dN" % n for n in range(50_000)) + b"u"

PROGRAMS = {
    "a storage longer than its record": tensor((1 << 20,), (1,), numel=1 << 20),
    "a gigantic storage": tensor((HUGE,), (1,), numel=HUGE),
    "a storage of another archive": b"\x80\2" + storage(key="7") + b".",
    "a gigantic tensor on a small storage": tensor((1 << 36,), (1,)),
    "a step out of its storage": tensor((2,), (1 << 40,)),
    "a start out of its storage": tensor((1,), (1,), offset=1 << 40),
    "a negative start": tensor((1,), (1,), offset=-8),
    "a negative step": tensor((4,), (-1,), offset=3),
    "a product that overflows": tensor((1 << 32, 1 << 32), (0, 0)),
    "a quantized tensor that is expanded": quantized((1 << 36,), (0,)),
    "a bytearray": call("builtins bytearray", number(10**12)),
    "a bytearray, by the old name": call("__builtin__ bytearray", number(10**12)),
    "a tensor by its size": call("torch Tensor", number(HUGE)),
    "a typed tensor by its size": call("torch FloatTensor", number(HUGE)),
    "a storage by its size": call("torch.storage UntypedStorage", number(HUGE)),
    "a new storage": b"\x80\2ctorch.storage\nUntypedStorage\n" + numbers(HUGE) + b"\x81.",
    "a huge memo": b"\x80\2K\1r\xff\xff\xff\x7f.",
    "a deep key": b"\x80\2})" + b"\x85" * 300_000 + b"K\1s.",
    "a deep key by the memo": b"\x80\2}q\0)" + b"q\1h\1\x85" * 100_000 + b"K\1s.",
    "copies of a bytearray": repeated(b"c_codecs\nencode\n(" + LONG_TEXT + b"tR", b"cbuiltins\nbytearray\nh\1\x85R"),
    "copies of a text": repeated(LONG_TEXT, b"c_codecs\nencode\nh\1\x85R"),
    "copies of a set": repeated(LONG_LIST, b"cbuiltins\nset\nh\1\x85R"),
    "copies of a shape": repeated(LONG_LIST, b"ctorch\nSize\nh\1\x85R"),
    "copies of a dict": repeated(LONG_DICT, b"ccollections\nOrderedDict\nh\1\x85R"),
    "copies of a state": repeated(LONG_DICT, b"ccollections\nOrderedDict\n)Rh\1b"),
    "a codec of one's own": call("_codecs encode", b"X\1\0\0\0aX\4\0\0\0evil"),
    "a method put on a dict": b"\x80\2ccollections\nOrderedDict\n)R}X\x0c\0\0\0__setstate__cos\nsystem\nsb"
    b"X\4\0\0\0trueb.",
    "a huge memo, in the words of long ago": b"\x80\2K\1p2147483647\n.",
    "a class that stays changed": b"\x80\2ccollections\nCounter\nN}X\6\0\0\0updateK\1s\x86b.",
    "a type of storage that stays changed": b"\x80\2ctorch\nFloatStorage\n}X\x08\0\0\0itemsizeK\0sb.",
    "a function that stays changed": b"\x80\2c_codecs\nencode\nN}X\x0c\0\0\0__defaults__Ns\x86b.",
    "a storage on no device": b"\x80\2" + storage().replace(b"X\3\0\0\0cpu", b"}") + b".",
    "a storage on a device that nobody has": b"\x80\2" + storage().replace(b"\3\0\0\0cpu", b"\3\0\0\0xyz") + b".",
    "a call of os.system": call("os system", b"X\4\0\0\0true"),
    "no end": b"\x80\2K\1",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_pickles_are_refused_in_tensors_and_in_values(name: str) -> None:
    data = archive(PROGRAMS[name])
    refused(lambda: framing.load_tensor(data))
    items = ByteItems("s3://b/c", trust_pickle=False)
    text = refused(lambda: items.checked("v", data))
    assert "UnsafeCheckpointError" in text
    assert "trust_pickle" in text


def _patched(data: bytes, mark: bytes, offset: int, layout: str, value: int, nth: int = 0) -> bytes:
    """Return `data` with the number at `offset` from the nth `mark` replaced."""
    at = -1
    for _ in range(nth + 1):
        at = data.index(mark, at + 1)
    changed = bytearray(data)
    struct.pack_into(layout, changed, at + offset, value)
    return bytes(changed)


def _overlapping() -> bytes:
    data = archive(tensor((4,), (1,)), storages={"0": bytes(100_000), "1": b"\1" * 100_000})
    first = data.index(b"PK\3\4", data.index(b"byteorder"))
    return _patched(data, b"PK\1\2", 42, "<L", first, nth=3)


GOOD = archive(tensor((4,), (1,)))
ARCHIVES = {
    "compressed": archive(tensor((4,), (1,)), storages={"0": bytes(64 * MIB)}, method=zipfile.ZIP_DEFLATED),
    "entries that share bytes": _overlapping(),
    "an entry longer than the archive": _patched(
        _patched(GOOD, b"PK\1\2", 20, "<L", 1 << 30), b"PK\1\2", 24, "<L", 1 << 30
    ),
    "an entry beyond the end": _patched(GOOD, b"PK\1\2", 42, "<L", 1 << 30),
    "a list beyond the end": _patched(GOOD, b"PK\5\6", 16, "<L", 1 << 30),
    "millions of entries": _patched(_patched(GOOD, b"PK\5\6", 8, "<H", 65534), b"PK\5\6", 10, "<H", 65534),
    "names that differ in case": GOOD.replace(b"archive/version", b"archive/DATA/0\0"[:15]),
    "something after its end": GOOD + b"x" * 30,
    "another archive before its own": GOOD + GOOD,
    "no pickle": GOOD.replace(b"data.pkl", b"data.pkx"),
    "the format of long ago": pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2),
    "nothing": b"",
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_hostile_archives_are_refused_in_tensors_and_in_values(name: str) -> None:
    refused(lambda: framing.load_tensor(ARCHIVES[name]))
    items = ByteItems("s3://b/c", trust_pickle=False)
    assert "UnsafeCheckpointError" in refused(lambda: items.checked("v", ARCHIVES[name]))


def test_what_torch_writes_passes() -> None:
    assert framing.load_tensor(GOOD).tolist() == [0.0] * 4
    for dtype in all_dtypes():
        whole = random_tensor(4, 6, dtype=dtype)
        for value in (whole, whole.t(), whole[1:3], random_tensor(dtype=dtype), torch.empty(0, 3, dtype=dtype)):
            stream = io.BytesIO()
            torch.save(value, stream)
            check_archive(stream.getvalue())
    for value in (
        state_of_python_values(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(1).expand(1000),
        torch.eye(3).to_sparse(),
        torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        {"set": {1, 2}, "bytes": bytearray(b"x"), "complex": 1j, "device": torch.device("cpu"), "dtype": torch.int8},
        torch.zeros(2, device="meta"),
    ):
        stream = io.BytesIO()
        torch.save(value, stream)
        ByteItems("s3://b/c", trust_pickle=False).checked("v", stream.getvalue())


def save(folder: Path, state: dict[str, Any], **options: Any) -> Metadata:
    dcp.save(state, storage_writer=FsspecStorageWriter(folder, **options))
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def put(folder: Path, found: Metadata) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(found, protocol=4))
    with contextlib.suppress(FileNotFoundError):
        (folder / "checksums.json").unlink()


def load(folder: Path, like: dict[str, Any]) -> None:
    dcp.load(like, storage_reader=FsspecStorageReader(folder))


def test_a_tensor_whose_file_is_far_too_long_for_it(tmp_path: Path) -> None:
    found = save(tmp_path, {"w": torch.ones(3)})
    (info,) = found.storage_data.values()
    info.length = HUGE
    put(tmp_path, found)
    os.truncate(tmp_path / info.relative_path, HUGE)
    assert "CorruptCheckpointError" in refused(lambda: load(tmp_path, {"w": torch.zeros(3)}))
    assert [problem.item for problem in verify(tmp_path).problems] == ["w"]


@pytest.mark.parametrize("length", [2000, HUGE])
def test_a_tensor_said_to_be_gigantic(tmp_path: Path, length: int) -> None:
    found = save(tmp_path, {"w": torch.ones(3)})
    (record,), (info,) = found.state_dict_metadata.values(), found.storage_data.values()
    info.length = length
    record.size = record.chunks[0].sizes = torch.Size([HUGE // 4 - 1000])  # type: ignore[union-attr]
    put(tmp_path, found)
    target = {"w": torch.zeros(1).expand(HUGE // 4 - 1000)}
    assert "CorruptCheckpointError" in refused(lambda: load(tmp_path, target))
    assert not verify(tmp_path).ok


def _packed(content: bytes) -> bytes:
    stream = io.BytesIO()
    packing = ZStandard().transform_to(stream)
    for _ in range(1024):
        packing.write(content)
    packing.flush(1)  # type: ignore[call-arg]
    return stream.getvalue()


@pytest.mark.parametrize(("key", "like"), [("w", torch.zeros(3)), ("v", "")])
def test_a_compressed_item_that_grows_without_end(tmp_path: Path, key: str, like: Any) -> None:
    found = save(tmp_path, {"w": torch.ones(3), "v": "text"}, extensions=[ZStandard()])
    index = next(index for index in found.storage_data if index.fqn == key)
    info = found.storage_data[index]
    bomb = _packed(bytes(MIB))
    assert len(bomb) < MIB
    info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(bomb)
    (tmp_path / "__9_9.distcp").write_bytes(bomb)
    put(tmp_path, found)
    reader = FsspecStorageReader(tmp_path, memory_budget_bytes=16 * MIB)
    text = refused(lambda: dcp.load({key: like}, storage_reader=reader))
    assert "grows to more than" in text


def test_checksums_that_point_elsewhere_give_no_other_rows(tmp_path: Path) -> None:
    state = {"w": torch.arange(200_000.0).reshape(2000, 100)}
    save(tmp_path, state)
    document = json.loads((tmp_path / "checksums.json").read_text())
    (record,) = document["files"].values()
    for item in record["items"]:
        item[3] -= 16
    (tmp_path / "checksums.json").write_text(json.dumps(document))

    class SomeRows(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> dcp.planner.LoadPlan:
            plan = super().create_local_plan()
            return dcp.planner.LoadPlan(
                [
                    dcp.planner.ReadItem(
                        type=dcp.planner.LoadItemType.TENSOR,
                        dest_index=plan.items[0].dest_index,
                        dest_offsets=torch.Size((0, 0)),
                        storage_index=plan.items[0].storage_index,
                        storage_offsets=torch.Size((100, 0)),
                        lengths=torch.Size((10, 100)),
                    )
                ]
            )

    target = {"w": torch.zeros(2000, 100)}
    dcp.load(target, storage_reader=FsspecStorageReader(tmp_path), planner=SomeRows())
    assert torch.equal(target["w"][:10], state["w"][100:110])


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b'{"format_version": 1' + b"0" * 10_000])
def test_hostile_checksums(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, {"w": torch.ones(3)})
    (tmp_path / "checksums.json").write_bytes(content)
    assert "CorruptCheckpointError" in refused(lambda: load(tmp_path, {"w": torch.zeros(3)}))
    with pytest.raises(CorruptCheckpointError):
        verify(tmp_path)
