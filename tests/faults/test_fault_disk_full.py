"""A disk that is really full, at whatever moment of a save: an error on all ranks, and nothing is lost or left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from support.fulldisk import run_on_small_disk, why_not

pytestmark = pytest.mark.distributed

NUM_RANKS = 4


def test_full_disk_is_an_error_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)

    reports = run_on_small_disk(tmp_path, NUM_RANKS)

    *failed, last = reports
    for report in failed:
        room = report["room_bytes"]
        assert all(report["failures"]), f"with {room} bytes of room, some rank did not learn of it"
        for text in report["failures"]:
            assert f"{tmp_path}/c/" in text
            assert os.strerror(errno.ENOSPC) in text
        assert {tuple(cause) for cause in report["causes"]} == {("StorageWriteError", errno.ENOSPC)}, room
        assert report["stands"] == 1, room
        # Ranks that had room do not learn of the others' failure before it is over: what they wrote, whole, stays.
        sound = tuple(f"__{rank}_" for rank in range(NUM_RANKS) if rank not in report["ranks"])
        small_file = f"/c/__{report['ranks'][0]}_" not in report["failures"][0]
        assert [name for name in report["left"] if small_file or not name.startswith(sound)] == [], room
    assert not any(last["failures"])
    assert last["stands"] == 2
    texts = "".join(text for report in failed for text in report["failures"])
    for name in ("__", "checksums", ".metadata"):
        assert f"{tmp_path}/c/{name}" in texts, "it was full at each kind of file"
