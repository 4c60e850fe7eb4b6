"""The pickle of ``.metadata`` that is written as tables of opcodes makes the objects that were given."""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsspec.storage import metadata_pickle
from dcp_fsspec.storage.checksums import FileChecksums, ItemRecord
from dcp_fsspec.storage.metadata import decode
from dcp_fsspec.storage.pickle_scan import scan
from dcp_fsspec.storage.results import FileResult, GatheredResults, Results, Written, by_file
from dcp_fsspec.storage.torch_internals import StorageInfo

_COUNTS = st.sampled_from([0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**40])
_NAMES = st.sampled_from(["w", "size", "fqn", "", "weiß", "a" * 300]) | st.text(max_size=5)


def _metadata(names: list[str], shape: tuple[int, ...], counts: list[int], transforms: list[str] | None) -> Metadata:
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, StorageInfo] = {}
    for number, name in enumerate(names):
        if number % 3 == 2:
            state[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = StorageInfo(f"__{number}_0.distcp", counts[0], counts[1])
            continue
        offsets = torch.Size(number for _ in shape)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shape))
        properties = TensorProperties(dtype=torch.bfloat16)
        state[name] = TensorStorageMetadata(properties, torch.Size(size + number for size in shape), [chunk])
        info = StorageInfo("__0_0.distcp", counts[0], counts[-1], transforms)
        places[MetadataIndex(name, offsets, counts[-1])] = info
    meta = StorageMeta(checkpoint_id="memory://x", save_id="y")
    return Metadata(state, planner_data={name: (name, 3) for name in names}, storage_data=places, storage_meta=meta)


def _files(metadata: Metadata) -> list[FileResult]:
    """Return what is written there, as ranks report it."""
    file = FileChecksums(0, 0)
    return by_file(
        WriteResult(index, info.length, Written(info, ItemRecord(0), file))
        for index, info in metadata.storage_data.items()
    )


def _dumps(metadata: Metadata) -> bytes:
    return metadata_pickle.dumps(metadata, _files(metadata))


def _texts(entries: dict[Any, Any]) -> list[str]:
    return sorted(map(repr, entries.items()))


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(_NAMES, unique=True, max_size=6),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    counts=st.lists(_COUNTS, min_size=2, max_size=3),
    transforms=st.sampled_from([None, ["zstd"], ["zstd", "other"]]),
)
def test_what_is_written_is_what_pickle_reads(
    names: list[str], shape: tuple[int, ...], counts: list[int], transforms: list[str] | None
) -> None:
    metadata = _metadata(names, shape, counts, transforms)
    data = _dumps(metadata)
    in_python: Any = pickle._loads  # type: ignore[attr-defined]
    for loaded in (pickle.loads(data), in_python(data)):
        assert loaded == metadata
        assert list(loaded.state_dict_metadata) == list(metadata.state_dict_metadata)
        assert _texts(loaded.storage_data) == _texts(metadata.storage_data)
    scan(data)


def test_more_than_a_batch_of_items_is_read_back() -> None:
    metadata = _metadata([f"w{number}" for number in range(12_001)], (4, 2), [0, 0], None)
    for number, info in enumerate(metadata.storage_data.values()):
        info.offset, info.length = 1000 * number, 1000
    data = _dumps(metadata)
    assert decode(data, "here") == pickle.loads(data) == metadata


def test_an_item_that_two_ranks_have_written_is_where_the_later_one_says() -> None:
    metadata = _metadata(["w"], (4,), [0, 10], None)
    first, second = _files(metadata), _files(metadata)
    second = [dataclasses.replace(file, name="later") for file in second]
    loaded = decode(metadata_pickle.dumps(metadata, [*first, *second]), "here")
    assert loaded.storage_data == {MetadataIndex("w", (0,)): StorageInfo("later", 0, 10)}


def test_what_is_not_as_it_always_is_is_kept() -> None:
    metadata = _metadata(["w", "v", "b", "u"], (4,), [0, 1], None)
    record, other = (metadata.state_dict_metadata[name] for name in ("w", "v"))
    vars(record)["more"] = "kept"
    vars(other)["chunks"] = [_Chunk(*vars(chunk).values()) for chunk in vars(other)["chunks"]]
    loaded = pickle.loads(_dumps(metadata))
    assert loaded == metadata
    assert loaded.state_dict_metadata["w"].more == "kept"
    assert type(loaded.state_dict_metadata["v"].chunks[0]) is _Chunk


class _Chunk(ChunkStorageMetadata):
    """A record of another kind."""


def test_a_reader_that_cannot_look_ahead_reads_large_blocks() -> None:
    metadata = _metadata([f"w{number}" for number in range(2500)], (4, 2), [0, 0], None)
    file = _Counting(_dumps(metadata))
    assert pickle.load(file) == metadata
    assert file.num_reads < 100


class _Counting:
    """A file without `peek`, as fsspec's are."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.num_reads = 0

    def read(self, size: int) -> bytes:
        self.num_reads += 1
        return self._file.read(size)

    def readline(self) -> bytes:
        self.num_reads += 1
        return self._file.readline()


@pytest.mark.parametrize("transforms", [None, ["zstd"]])
def test_results_arrive_as_they_were(transforms: list[str] | None) -> None:
    files = [FileChecksums(300, 7), FileChecksums(50, 8)]
    indices = [MetadataIndex("w", (0, 0)), MetadataIndex("w", (4, 0), 3), MetadataIndex("b")]
    sent = Results(
        WriteResult(index, 100, Written(StorageInfo(f"f{number % 2}", 100 * number, 100, transforms), record, file))
        for number, (index, record, file) in enumerate(
            zip(indices, (ItemRecord(1, 640), ItemRecord(2**32 - 1), ItemRecord(0)), (*files, files[0]), strict=True)
        )
    )
    arrived = pickle.loads(pickle.dumps(sent))
    assert isinstance(arrived, GatheredResults)
    assert len(arrived) == 3
    assert by_file(arrived) == by_file(sent)
    assert sorted(map(repr, arrived)) == sorted(map(repr, sent))
    assert sorted(map(repr, arrived[:])) == sorted(map(repr, sent))
