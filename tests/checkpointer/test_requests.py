"""How many requests it takes to find the latest of a thousand iterations."""

from __future__ import annotations

import pytest

from dcp_fsspec import Catalog, KeepBest
from support.faultproxy import FaultProxy
from support.stores import S3Store
from support.training import checkpointer_at, make_job, write_iteration

pytestmark = pytest.mark.server


def test_the_latest_of_a_thousand_takes_three_requests_and_a_listing_more_without_a_good_pointer(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    record = b""
    for iteration in range(1, 1_001):
        folder = f"job/iter_{iteration:09d}"
        if not record:
            write_iteration(proxied_store, folder)
            record = proxied_store.raw_read(f"{folder}/commit.json")
        else:
            content = record.replace(b'"iteration": 1,', f'"iteration": {iteration},'.encode())
            proxied_store.raw_write(f"{folder}/commit.json", content)
    catalog = Catalog(proxied_store.below("job"), storage_options=proxied_store.storage_options)

    def requests() -> list[str]:
        proxy.clear()
        latest = catalog.latest()
        assert latest is not None
        assert latest.iteration == 1_000
        return [one.operation for one in proxy.log]

    proxied_store.raw_write("job/latest_checkpoint.txt", b"iter_000001000\n")
    good = requests()
    assert len(good) <= 3
    assert "LIST" not in good
    for odd in (b"", b"garbage"):
        proxied_store.raw_write("job/latest_checkpoint.txt", odd)
        # A listing of a thousand folders and a file is longer than one page of S3.
        assert [one for one in requests() if one != "LIST"] == good
        assert len(requests()) <= 3 + 2
    proxied_store.raw_delete("job/latest_checkpoint.txt")
    assert sorted(set(requests())) == ["GET", "LIST"]
    names = [{"Key": f"{proxied_store.prefix}/{name}"} for name in proxied_store.raw_list()]
    for begin in range(0, len(names), 1_000):
        objects = {"Objects": names[begin : begin + 1_000]}
        proxied_store.client.delete_objects(Bucket=proxied_store.bucket, Delete=objects)


def test_a_save_asks_little_of_the_store(proxied_store: S3Store, proxy: FaultProxy) -> None:
    checkpointer = checkpointer_at(proxied_store, retention=KeepBest(1, "loss"))
    checkpointer.save(*make_job().parts, 1)
    checkpointer.wait()
    proxy.clear()
    checkpointer.save(*make_job().parts, 2)
    count = [one.operation for one in proxy.log]
    checkpointer.finalize()
    # Per component: a look at .metadata, shard file, checksums, .metadata. Then two listings (nothing stands there,
    # nothing else stands there), the record, a look at the pointer and at its tag, the pointer.
    assert len(count) <= 4 * 4 + 5 + 4, count
