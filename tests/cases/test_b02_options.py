"""B02: options and filesystems given once hold for every checkpoint that the same writer or reader handles."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import fsspec
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import ConfigurationError, DcpFsspecError, FsspecStorageReader, FsspecStorageWriter
from dcp_fsspec.testing.servers import SeaweedServer
from support.checkpoints import assert_loads, save
from support.faultproxy import FaultProxy
from support.stores import MemoryStore, S3Store, Store
from support.tensors import assert_bits_equal, blank_like, random_tensor

_S3 = ("seaweed", "moto", "obstore")
_peers: list[set[Any]] = []


def _note_peer(event: str, arguments: tuple[Any, ...]) -> None:
    if _peers and event == "socket.connect":
        address = arguments[1]
        _peers[-1].add(address[:2] if isinstance(address, tuple) else address)
    elif _peers and event == "socket.getaddrinfo":
        _peers[-1].add((arguments[0], arguments[1]))


@pytest.fixture(scope="module")
def _audited() -> None:
    # An audit hook sees connections of every library in the process, and can never be removed again.
    sys.addaudithook(_note_peer)


@pytest.fixture
def peers(_audited: None) -> Iterator[set[Any]]:
    """Every address that this process connects to or looks up during the test."""
    _peers.append(set())
    yield _peers[-1]
    _peers.pop()


def _state(seed: int) -> dict[str, Any]:
    return {"w": random_tensor(5, 3, seed=seed), "n": seed}


def _load(reader: FsspecStorageReader, like: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = blank_like(like)
    dcp.load(loaded, storage_reader=reader, **arguments)
    return loaded


def _is_loopback(peer: Any) -> bool:
    return isinstance(peer, tuple) and peer[0] in ("127.0.0.1", b"127.0.0.1")


@pytest.mark.parametrize("store", ["path", "memory", *_S3, "webdav"], indirect=True)
def test_b02_checkpoint_id_keeps_options_and_filesystem(store: Store, peers: set[Any]) -> None:
    """B02: the second checkpoint goes to the store that the first one went to, and nowhere else."""
    s3fs.S3FileSystem.clear_instance_cache()  # An instance of another test has its connections already.
    writer = FsspecStorageWriter(store.below("first"), **store.arguments)
    dcp.save(_state(1), storage_writer=writer)
    dcp.save(_state(2), storage_writer=writer, checkpoint_id=store.below("second"))
    writer.reset(store.below("third"))
    dcp.save(_state(3), storage_writer=writer)
    dcp.save(_state(4), storage_writer=writer)  # the same place again, without another word
    folders = {name.partition("/")[0] for name in store.raw_list()}
    assert folders == {"first", "second", "third"}

    reader = FsspecStorageReader(store.below("first"), **store.arguments)
    assert_bits_equal(_load(reader, _state(1)), _state(1))
    assert_bits_equal(_load(reader, _state(2), checkpoint_id=store.below("second")), _state(2))
    assert_bits_equal(_load(reader, _state(2)), _state(2))
    reader.reset(store.below("third"))
    assert_bits_equal(_load(reader, _state(4)), _state(4))
    if not isinstance(store, S3Store):
        return
    if store.filesystem is None:
        assert peers  # the hook sees s3fs; obstore connects from Rust
    assert {peer for peer in peers if not _is_loopback(peer)} == set()


@pytest.mark.parametrize("store", ["path", "memory", *_S3], indirect=True)
@pytest.mark.parametrize("duplicate", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_b02_copies_keep_options_and_filesystem(store: Store, duplicate: Any) -> None:
    """B02: a writer or reader that was sent to another process still knows its store, before and after use."""
    writer = FsspecStorageWriter(store.below("first"), **store.arguments)
    reader = FsspecStorageReader(store.below("first"), **store.arguments)
    dcp.save(_state(1), storage_writer=duplicate(writer))
    assert_bits_equal(_load(duplicate(reader), _state(1)), _state(1))
    dcp.save(_state(2), storage_writer=writer)
    dcp.save(_state(3), storage_writer=duplicate(writer), checkpoint_id=store.below("second"))
    assert_bits_equal(_load(reader, _state(2)), _state(2))
    assert_bits_equal(_load(duplicate(reader), _state(3), checkpoint_id=store.below("second")), _state(3))


def test_b02_a_copy_keeps_all_other_settings(seaweed_store: S3Store) -> None:
    """B02."""
    url, arguments = seaweed_store.below("ckpt"), seaweed_store.arguments
    writer = FsspecStorageWriter(url, **arguments, shard_bytes=1 << 20, max_concurrency=2, overwrite=False)
    twin = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.zeros(3 << 18)}, storage_writer=twin)
    assert sum(name.endswith(".distcp") for name in seaweed_store.raw_list()) == 3
    with pytest.raises(CheckpointException, match="stands at"):
        dcp.save({"w": torch.zeros(1)}, storage_writer=twin)


def test_b02_secrets_stay_out_of_what_is_stored_and_shown(seaweed_store: S3Store, seaweed: SeaweedServer) -> None:
    """B02: options travel by pickle; metadata and messages are for everybody."""
    writer = save(_state(1), seaweed_store.below("ckpt"), **seaweed_store.arguments)
    secret = seaweed.secret_key.encode()
    assert all(secret not in seaweed_store.raw_read(name) for name in seaweed_store.raw_list())
    assert seaweed.secret_key not in f"{writer!r} {writer._store!r} {writer.checkpoint_id}"


def test_b02_user_options_and_environment_are_merged(
    seaweed: SeaweedServer, seaweed_client: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B02: `FSSPEC_S3_...` gives what the caller leaves out, inside of nested options too, also after a reset."""
    everything = seaweed.storage_options(endpoint_url=proxy.endpoint_url)
    environment = {
        "FSSPEC_S3_KEY": everything["key"],
        "FSSPEC_S3_SECRET": "to be overruled by the caller",
        "FSSPEC_S3_CLIENT_KWARGS": '{"region_name": "us-east-1"}',
        "FSSPEC_S3": '{"config_kwargs": {"user_agent_extra": "from-env"}}',
    }
    configured: dict[str, Any] = {}
    fsspec.config.set_conf_env(configured, environment)
    monkeypatch.setitem(fsspec.config.conf, "s3", configured["s3"])

    bucket = seaweed.bucket
    options = {
        "secret": everything["secret"],
        "client_kwargs": {"endpoint_url": proxy.endpoint_url},
        "config_kwargs": {"connect_timeout": 11},
    }
    given = copy.deepcopy(options)
    store = S3Store(seaweed_client, bucket, options)
    writer = FsspecStorageWriter(f"s3://{bucket}/{store.prefix}/first", storage_options=options)
    dcp.save(_state(1), storage_writer=writer)
    dcp.save(_state(2), storage_writer=writer, checkpoint_id=f"s3://{bucket}/{store.prefix}/second")
    dcp.save(
        _state(3),
        storage_writer=pickle.loads(pickle.dumps(writer)),
        checkpoint_id=f"s3://{bucket}/{store.prefix}/third",
    )
    assert {name.partition("/")[0] for name in store.raw_list()} == {"first", "second", "third"}
    assert proxy.log
    assert all("from-env" in exchange.headers["user-agent"] for exchange in proxy.log)
    reader = FsspecStorageReader(f"s3://{bucket}/{store.prefix}/first", storage_options=options)
    assert_bits_equal(_load(reader, _state(1)), _state(1))
    assert_bits_equal(_load(reader, _state(2), checkpoint_id=f"s3://{bucket}/{store.prefix}/second"), _state(2))
    assert options == given, "the caller's own dict was changed"
    store.close()


def test_b02_a_filesystem_of_one_folder_stays_in_it(seaweed_store: S3Store) -> None:
    """B02: a passed filesystem is used as it is, with paths of its own."""
    whole = fsspec.filesystem("s3", **(seaweed_store.storage_options or {}))
    inside = DirFileSystem(f"{seaweed_store.bucket}/{seaweed_store.prefix}", whole)
    writer = FsspecStorageWriter("first", filesystem=inside)
    dcp.save(_state(1), storage_writer=writer)
    dcp.save(_state(2), storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id="deep/second")
    assert sorted(seaweed_store.raw_list()) == [
        f"{folder}/{name}"
        for folder in ("deep/second", "first")
        for name in (".metadata", "__0_0.distcp", "checksums.json")
    ]
    assert_loads(_state(1), "first", filesystem=inside)
    assert_loads(_state(2), seaweed_store.below("deep/second"), **seaweed_store.arguments)


class _OwnMemory(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose files are those of the instance alone: only this very object knows them."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]


def test_b02_a_passed_instance_is_the_one_that_is_used() -> None:
    """B02: no second filesystem is made from the url behind the caller's back."""
    mine, other = _OwnMemory(), _OwnMemory()
    writer = FsspecStorageWriter("memory://a/first", filesystem=mine)
    dcp.save(_state(1), storage_writer=writer)
    dcp.save(_state(2), storage_writer=writer, checkpoint_id="memory://a/second")
    assert {path.rpartition("/")[0] for path in mine.store} == {"/a/first", "/a/second"}
    assert other.store == {}
    assert not any(path.startswith("/a/") for path in MemoryFileSystem.store)
    assert_loads(_state(2), "a/second", filesystem=mine)


@pytest.mark.parametrize("store", ["path", "memory", *_S3], indirect=True)
def test_b02_async_save_in_a_thread_keeps_options(store: Store) -> None:
    """B02: `dcp.async_save` stages, then saves in a thread of its own, several times over."""
    state = _state(1)
    writer = FsspecStorageWriter(store.below("first"), **store.arguments)
    first = dcp.async_save(state, storage_writer=writer)
    assert isinstance(first, Future)
    state["w"].fill_(-1)  # staged already: must not arrive
    first.result(60)
    second = dcp.async_save(_state(2), storage_writer=writer, checkpoint_id=store.below("second"))
    assert isinstance(second, Future)
    second.result(60)
    assert_loads(_state(1), store.below("first"), **store.arguments)
    assert_loads(_state(2), store.below("second"), **store.arguments)


class _Held(MemoryFileSystem):  # type: ignore[misc]
    """Holds back the shard files of one folder until told to go on."""

    cachable = False

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._folder in path and path.endswith(".distcp"):
            self.arrived.set()
            assert self.go_on.wait(60)
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.mark.parametrize("second_is_async", [True, False])
def test_b02_overlapping_saves_of_one_writer_do_not_mix(second_is_async: bool) -> None:
    """B02: a writer that is sent elsewhere while it still saves finishes what it began where it began it.

    To refuse the second save is allowed, too; what counts is that a save which reports success is there.
    """
    store = MemoryStore()
    filesystem = _Held("/first/")
    writer = FsspecStorageWriter(store.below("first"), filesystem=filesystem)
    first = dcp.async_save(_state(1), storage_writer=writer)
    assert isinstance(first, Future)
    assert filesystem.arrived.wait(60)

    succeeded: dict[str, Any] = {}
    refusal = ""
    try:
        if second_is_async:
            second = dcp.async_save(_state(2), storage_writer=writer, checkpoint_id=store.below("second"))
            assert isinstance(second, Future)
            second.result(60)
        else:
            dcp.save(_state(2), storage_writer=writer, checkpoint_id=store.below("second"))
        succeeded["second"] = _state(2)
    except (DcpFsspecError, CheckpointException) as error:
        refusal = str(error)
    filesystem.go_on.set()
    first.result(60)
    succeeded["first"] = _state(1)
    assert "second" in succeeded or store.url in refusal
    for name, state in succeeded.items():
        assert_loads(state, store.below(name))
    dcp.save(_state(3), storage_writer=writer, checkpoint_id=store.below("third"))
    assert_loads(_state(3), store.below("third"))
    store.close()


def test_b02_a_filesystem_that_only_works_inside_of_a_loop_is_refused() -> None:
    """B02: at construction, where the caller can see which argument it was."""
    inside = fsspec.filesystem("s3", asynchronous=True, key="key", secret="secret")
    for end in (FsspecStorageWriter, FsspecStorageReader):
        with pytest.raises(ConfigurationError, match="asynchronous"):
            end("s3://bucket/x", filesystem=inside)
