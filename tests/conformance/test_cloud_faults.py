"""Azure and Google Cloud Storage, through their own clients, when requests fail on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_fsspec import CorruptCheckpointError, StorageReadError, StorageWriteError, verify
from support.checkpoints import assert_loads, fails, load, save
from support.faultproxy import Corrupt, Cut, FaultProxy, Lose, Reset, Status
from support.faults import Action, Exchange
from support.stores import AzureStore, GcsStore, Store
from support.tensors import random_tensor

STATE: dict[str, Any] = {**{f"w{number}": random_tensor(15_000, seed=number) for number in range(6)}, "step": 7}
SMALL: dict[str, Any] = {"shard_bytes": 64 << 10}


class Cloud:
    """A store seen by the package through a proxy, by the tests directly."""

    def __init__(self, store: Store, proxy: FaultProxy) -> None:
        self.store = store
        self.proxy = proxy

    def hurt(self, action: Action, *, upload: bool, **rule: Any) -> Any:
        """Do `action` to uploads, or to reads of shard files."""
        return self.proxy.add(action, when=_is_upload if upload else _is_read, **rule)


def _is_upload(exchange: Exchange) -> bool:
    return exchange.method in ("PUT", "POST")


def _is_read(exchange: Exchange) -> bool:
    return exchange.method == "GET" and ".distcp" in exchange.path


@pytest.fixture(params=["azure", "gcs"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    server = request.getfixturevalue("azurite" if request.param == "azure" else "gcs")
    with FaultProxy(server.endpoint_url) as proxy:
        options = server.storage_options(endpoint_url=proxy.endpoint_url)
        store: Store
        if request.param == "azure":
            store = AzureStore(server.container_client(), options)
        else:
            store = GcsStore(server.endpoint_url, server.bucket, options)
        yield Cloud(store, proxy)
        proxy.clear()
        store.close()


# Azure's client waits 15 seconds after its first 503, so it meets one only.
@pytest.mark.parametrize("action", [Status(503, "ServerBusy"), Reset(), Lose()], ids=["busy", "reset", "lost_answer"])
def test_an_upload_that_fails_on_the_way_is_made_again(cloud: Cloud, action: Action) -> None:
    rule = cloud.hurt(action, upload=True, skip=1)
    save(STATE, cloud.store.below("c"), **SMALL, **cloud.store.arguments)
    assert rule.fired == 1
    assert_loads(STATE, cloud.store.below("c"), **cloud.store.arguments)


@pytest.mark.parametrize("action", [Reset(), Cut()], ids=["reset", "cut"])
def test_a_read_that_fails_on_the_way_is_made_again(cloud: Cloud, action: Action) -> None:
    save(STATE, cloud.store.below("c"), **SMALL, **cloud.store.arguments)
    rule = cloud.hurt(action, upload=False, times=2)
    assert_loads(STATE, cloud.store.below("c"), **cloud.store.arguments)
    assert rule.fired == 2


def test_wrong_bytes_on_the_way_are_never_loaded(cloud: Cloud) -> None:
    save(STATE, cloud.store.below("c"), **SMALL, **cloud.store.arguments)
    cloud.hurt(Corrupt(), upload=False, times=None)
    with fails() as failure:
        load(STATE, cloud.store.below("c"), **cloud.store.arguments)
    assert isinstance(failure.causes[0], CorruptCheckpointError | StorageReadError), failure.text


def test_damage_in_the_store_is_named_by_load_and_by_verify(cloud: Cloud) -> None:
    url = cloud.store.below("c")
    save(STATE, url, **SMALL, **cloud.store.arguments)
    shard = sorted(name for name in cloud.store.raw_list() if name.endswith(".distcp"))[0]
    cloud.store.flip(shard, cloud.store.raw_list()[shard] // 2)
    with fails() as failure:
        load(STATE, url, **cloud.store.arguments)
    assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
    failure.names(cloud.store.below(shard))
    cloud.store.raw_delete(shard)
    with fails() as failure:
        load(STATE, url, **cloud.store.arguments)
    assert isinstance(failure.causes[0], CorruptCheckpointError), failure.text
    assert [problem.file for problem in verify(url, **cloud.store.arguments).problems] == [shard.removeprefix("c/")]


def test_a_refused_upload_ends_the_save_at_once_and_leaves_nothing(cloud: Cloud) -> None:
    rule = cloud.hurt(Status(403, "AuthorizationFailure"), upload=True, skip=1, times=None)
    with fails() as failure:
        save(STATE, cloud.store.below("c"), max_concurrency=1, **SMALL, **cloud.store.arguments)
    assert isinstance(failure.causes[0], StorageWriteError), failure.text
    assert rule.fired == 1
    assert cloud.store.raw_list() == {}


def test_a_commit_whose_answer_was_lost_counts_also_where_overwriting_is_not_allowed(cloud: Cloud) -> None:
    state = {"w": STATE["w0"]}
    rule = cloud.hurt(Lose(), upload=True, skip=2, times=1)  # After the shard file and the checksums.
    save(state, cloud.store.below("c"), overwrite=False, **cloud.store.arguments)
    assert rule.fired == 1
    assert_loads(state, cloud.store.below("c"), **cloud.store.arguments)
