"""B42: many small tensors in few requests, and no byte fetched that is not needed, in whatever order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_fsspec import FsspecStorageReader, FsspecStorageWriter
from support.checkpoints import load, save
from support.faultproxy import FaultProxy
from support.stores import MemoryStore, S3Store
from support.tensors import assert_bits_equal, blank_like, random_tensor

NUM_SMALL = 2_500
NUM_LARGE = 60
LARGE_ELEMENTS = 160_000


@pytest.fixture
def memory_store() -> Any:
    store = MemoryStore()
    yield store
    store.close()


def test_b42_thousands_of_tensors_take_few_files_and_few_requests(memory_store: MemoryStore) -> None:
    numbers = random_tensor(NUM_SMALL, 4, seed=1)
    state = {f"{number:05d}": numbers[number] for number in range(NUM_SMALL)}
    url = memory_store.below("c")
    writer = save(state, url)
    files = memory_store.raw_list()
    stored = sum(size for name, size in files.items() if name.endswith(".distcp"))
    num_files = sum(name.endswith(".distcp") for name in files)
    assert num_files <= 8
    assert stored <= NUM_SMALL * 1600
    assert writer.last_report.num_requests <= num_files + 4

    loaded = blank_like(state)
    reader = FsspecStorageReader(url)
    dcp.load(loaded, storage_reader=reader)
    assert_bits_equal(loaded, state)
    assert reader.last_report.num_requests <= num_files + 6
    assert reader.last_report.num_bytes <= 1.02 * stored


@pytest.mark.server
def test_b42_bytes_fetched_are_those_needed_whatever_the_order_and_the_share(
    proxied_store: S3Store, proxy: FaultProxy
) -> None:
    state = {f"{number:02d}": random_tensor(LARGE_ELEMENTS, seed=number) for number in range(NUM_LARGE)}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    url = proxied_store.below("c")
    writer = FsspecStorageWriter(url, storage_options=proxied_store.storage_options)
    dcp.save(state, storage_writer=writer)
    puts = proxy.requests("PUT")
    assert len({put.key for put in puts}) == len(puts) == writer.last_report.num_files + 2
    assert sum(put.request_bytes for put in puts) <= 1.05 * num_bytes
    assert {exchange.operation for exchange in proxy.log} == {"PUT", "GET"}

    shuffled = list(state)
    random.Random(4).shuffle(shuffled)
    counts = set()
    for order in (list(state), list(reversed(state)), shuffled):
        proxy.clear()
        wanted = {name: state[name] for name in order}
        assert_bits_equal(load(wanted, url, storage_options=proxied_store.storage_options), wanted)
        gets = proxy.requests("GET")
        assert gets == proxy.log
        assert sum(get.response_bytes for get in gets) <= 1.05 * num_bytes
        assert len([get for get in gets if get.key.endswith("/.metadata")]) == 1
        assert len([get for get in gets if get.key.endswith("/checksums.json")]) == 1
        counts.add(len(gets))
    assert len(counts) == 1, "the order changes the requests"
    assert counts.pop() <= 2 + NUM_LARGE

    small_files = sum(len(proxied_store.raw_read(f"c/{name}")) for name in (".metadata", "checksums.json"))
    for name in ("00", "31", "59"):
        proxy.clear()
        wanted = {name: state[name]}
        assert_bits_equal(load(wanted, url, storage_options=proxied_store.storage_options), wanted)
        assert len(proxy.log) == 3
        assert sum(get.response_bytes for get in proxy.log) - small_files <= 1.05 * state[name].nbytes
