"""CRC32C, alone and joined, and the file that keeps it."""

import json
import re

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dcp_fsspec import CorruptCheckpointError
from dcp_fsspec.storage import checksums
from dcp_fsspec.storage.checksums import FileChecksums, ItemRecord

SAVE = checksums.new_save_id(fresh=False)


def test_the_checksum_is_the_castagnoli_one() -> None:
    # The check value of RFC 3720, appendix B.4: 32 bytes of zeros.
    assert checksums.crc_of([bytes(32)]) == 0x8A9136AA


@given(st.binary(max_size=300), st.binary(max_size=5000))
def test_joined_checksums(first: bytes, second: bytes) -> None:
    assert checksums.combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
    assert checksums.crc_of([first, memoryview(second)]) == crc32c(first + second)


def test_a_file_has_the_checksum_of_its_items_in_order() -> None:
    texts = [b"abc", b"", b"defgh" * 1000]
    items, offset = {}, 0
    for text in texts:
        items[offset, len(text)] = ItemRecord(crc32c(text))
        offset += len(text)
    record = FileChecksums.of_items(dict(reversed(items.items())))
    assert (record.num_bytes, record.crc) == (offset, crc32c(b"".join(texts)))


def test_round_trip() -> None:
    section = {"__0_0.distcp": FileChecksums.of_items({(0, 3): ItemRecord(crc32c(b"abc"), 2)})}
    data = checksums.encode(section, SAVE, 7)
    assert checksums.decode(data, SAVE, "url") == section
    assert json.loads(data)["algorithm"] == "crc32c"


def test_checksums_of_another_save_are_refused() -> None:
    data = checksums.encode({}, SAVE, 7)
    with pytest.raises(CorruptCheckpointError, match="another job"):
        checksums.decode(data, checksums.new_save_id(fresh=False), "s3://b/c/checksums.json")


def test_each_save_that_may_meet_another_has_a_file_of_its_own() -> None:
    one, other = checksums.new_save_id(fresh=True), checksums.new_save_id(fresh=True)
    assert checksums.file_name(checksums.new_save_id(fresh=False)) == "checksums.json"
    assert checksums.file_name(one) == f"checksums{checksums.name_suffix(one)}.json"
    assert checksums.file_name(one) != checksums.file_name(other)


def test_saves_of_others_have_none() -> None:
    assert checksums.file_name(None) is None
    assert checksums.file_name("0d9c0000-aaaa-bbbb-cccc-0123456789ab") is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format_version":1}',
        b'{"format_version":2,"save_id":"x","files":{}}',
        b'{"format_version":1,"save_id":"x","files":[]}',
        b'{"format_version":1,"save_id":"x","files":{"f":3}}',
        b'{"format_version":1,"save_id":"x","files":{"f":{"bytes":"x","crc32c":1,"items":[]}}}',
        b'{"format_version":1,"save_id":"x","files":{"f":{"bytes":1,"crc32c":1,"items":[[1]]}}}',
        b"[" * 100_000,
    ],
)
def test_damage_is_named(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=re.escape("s3://b/checksums.json")):
        checksums.decode(data, SAVE, "s3://b/checksums.json")


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [-1, 1 << 60, 1.0, True, "1", None, float("inf")])
def test_a_number_that_is_none_is_refused(place: int, value: object) -> None:
    section = {"a": FileChecksums.of_items({(0, 3): ItemRecord(5, 2)})}
    document = json.loads(checksums.encode(section, SAVE, 7))
    document["files"]["a"]["items"][0][place] = value
    with pytest.raises(CorruptCheckpointError, match="not readable"):
        checksums.decode(json.dumps(document).encode(), SAVE, "url")
