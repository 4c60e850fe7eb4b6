"""Four ranks and a store in trouble: what passes is borne, what lasts is a clear error on every rank, soon."""

from __future__ import annotations

import errno
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from support.checkpoints import Failure, assert_loads, fails, load, save, threads_of_ours
from support.faultproxy import Cut, FaultProxy, Reset, Stall, Status
from support.faults import Action
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import random_tensor

pytestmark = [pytest.mark.distributed, pytest.mark.server]

SHARD_BYTES = 64 << 10
FILES_A_RANK = 8
NUM_RANKS = 4
SLOW_DOWN = Status(503, "SlowDown")
DENIED = Status(403, "AccessDenied")


def _state(rank: int, number: int = 0) -> dict[str, Any]:
    keys = range(FILES_A_RANK)
    seed = 1000 * number + 100 * rank
    return {f"rank{rank}.{key}": random_tensor(15_000, seed=seed + key) for key in keys} | {f"number{rank}": number}


def _save_well(rank: int, urls: dict[str, str], arguments: dict[str, Any]) -> int:
    retries = 0
    for number, url in enumerate(urls.values()):
        writer = save(_state(rank, number), url, shard_bytes=SHARD_BYTES, **arguments)
        retries += writer.last_report.num_retries
    assert threads_of_ours() == []
    return retries


def _load_well(rank: int, urls: dict[str, str], arguments: dict[str, Any]) -> None:
    for number, url in enumerate(urls.values()):
        assert_loads(_state(rank, number), url, **{"verify": "read", **arguments})
    assert threads_of_ours() == []


def _fail(rank: int, what: str, urls: dict[str, str], arguments: dict[str, Any]) -> dict[str, Failure]:
    seen = {}
    for name, url in urls.items():
        with fails() as failure:
            if what == "save":
                save(_state(rank), url, shard_bytes=SHARD_BYTES, **arguments)
            else:
                load(_state(rank), url, **arguments)
        dist.barrier()
        assert threads_of_ours() == []
        seen[name] = failure
    return seen


def _run(pool: RankPool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return values(pool.run(function, *arguments, collective_timeout_seconds=90, deadline_seconds=100))


def test_one_request_in_twenty_fails_in_many_ways_and_every_byte_is_right(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    storm = [
        proxy.add(SLOW_DOWN, times=None, probability=0.02, seed=1),
        proxy.add(Status(500, "InternalError"), times=None, probability=0.01, seed=2),
        proxy.add(Reset(), times=None, probability=0.02, seed=3),
        proxy.add(Cut(), method="GET", times=None, probability=0.03, seed=4),
    ]
    arguments = {"storage_options": proxied_store.storage_options}
    # The last three overwrite one another.
    urls = {str(number): proxied_store.below("first" if number == 0 else "again") for number in range(4)}
    last = {name: url for name, url in urls.items() if name in "03"}

    retries = _run(four_ranks, _save_well, urls, arguments)
    _run(four_ranks, functools.partial(_check_numbers, numbers=(0, 3)), list(last.values()), arguments)

    fired = [rule.fired for rule in storm]
    assert all(fired), fired
    assert sum(fired) >= len(proxy.log) * 0.03
    assert sum(retries) > 0, "the faults are counted in the report"
    proxy.clear()
    # What was overwritten is gone, in spite of the storm, and no more.
    assert Counter(name.partition("/")[0] for name in proxied_store.raw_list()) == Counter(
        dict.fromkeys(("first", "again"), NUM_RANKS * FILES_A_RANK + 2)
    )


def _check_numbers(rank: int, urls: list[str], arguments: dict[str, Any], *, numbers: tuple[int, ...]) -> None:
    for number, url in zip(numbers, urls, strict=True):
        assert_loads(_state(rank, number), url, **{"verify": "read", **arguments})


VERBS: dict[str, tuple[str, str, str, Action]] = {
    "puts": ("save", "PUT", "*", SLOW_DOWN),
    "resets": ("save", "PUT", "*", Reset()),
    "commit": ("save", "PUT", "*/.metadata", SLOW_DOWN),
    "look": ("save", "GET", "*", Status(500, "InternalError")),
    "gets": ("load", "GET", "*", SLOW_DOWN),
    "shards": ("load", "GET", "*.distcp", Reset()),
    "cut": ("load", "GET", "*.distcp", Cut()),
}
BUSY = f"[Errno {errno.EBUSY}]"
"""What becomes of SlowDown."""

CAUSES = {"puts": BUSY, "resets": "Connection", "commit": BUSY, "look": "OSError", "gets": BUSY}
CAUSES |= {"shards": "Connection", "cut": "EOFError"}
ONLY_COORDINATOR = ("commit", "look")


def test_verb_that_always_fails_is_an_error_on_every_rank_once_patience_is_over(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    arguments = {"storage_options": proxied_store.storage_options, "retry_seconds": 2}
    urls = {name: proxied_store.below(name) for name in VERBS}
    of = {what: {name: urls[name] for name, verb in VERBS.items() if verb[0] == what} for what in ("save", "load")}
    _run(four_ranks, _save_well, of["load"], arguments)
    rules = {
        name: proxy.add(action, operation=operation, key=f"*/{name}/*", when=_like(pattern), times=None)
        for name, (_, operation, pattern, action) in VERBS.items()
    }

    for what, some_urls in of.items():
        for failures in _run(four_ranks, _fail, what, some_urls, arguments):
            for name, failure in failures.items():
                failing = [0] if name in ONLY_COORDINATOR else list(range(NUM_RANKS))
                assert failure.ranks == failing, (name, failure.text)
                failure.names(*(f"RANK {rank}" for rank in failing), f"{urls[name]}/")
                error = "StorageWriteError" if VERBS[name][1] == "PUT" else "StorageReadError"
                assert {type(cause).__name__ for cause in failure.causes} == {error}
                failure.names(CAUSES[name])
    for name, rule in rules.items():
        assert rule.fired > 1, f"{name} was not tried again"
    for name in of["save"]:
        assert f"{name}/.metadata" not in proxied_store.raw_list()

    proxy.clear()
    for some_urls in of.values():
        _run(four_ranks, _save_well, some_urls, arguments)
        _run(four_ranks, _load_well, some_urls, arguments)


def _like(pattern: str) -> Callable[[Any], bool]:
    return lambda exchange: pattern == "*" or exchange.key.endswith(pattern.lstrip("*"))


def test_verb_that_fails_for_a_time_goes_on_once_it_heals(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    arguments = {"storage_options": proxied_store.storage_options}
    urls = {name: proxied_store.below(name) for name in ("puts", "commit")}
    ailing = [
        proxy.add(SLOW_DOWN, operation="PUT", key="*/puts/*", times=2 * NUM_RANKS * FILES_A_RANK),
        proxy.add(Reset(), operation="PUT", key="*/commit/.metadata", times=4),
        proxy.add(SLOW_DOWN, operation="GET", key="*/puts/*", when=_like("*.distcp"), times=2 * NUM_RANKS),
        proxy.add(Cut(), operation="GET", key="*/commit/*", when=_like("*.distcp"), times=2 * NUM_RANKS),
    ]
    retries = _run(four_ranks, _save_well, urls, arguments)
    _run(four_ranks, _load_well, urls, arguments)
    assert [rule.fired for rule in ailing] == [64, 4, 8, 8]
    assert sum(retries) >= 64


@pytest.mark.parametrize("what", ["save", "load"])
def test_denied_access_ends_on_all_ranks_at_once(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool, what: str
) -> None:
    arguments = {"storage_options": proxied_store.storage_options, "retry_seconds": 3600}
    urls = {"c": proxied_store.below("c")}
    if what == "load":
        _run(four_ranks, _save_well, urls, arguments)
    operation, name = {"save": ("PUT", "__2_"), "load": ("GET", "__1_")}[what]
    proxy.add(DENIED, operation=operation, key=f"*/{name}*", times=None)

    for failure in (failures["c"] for failures in _run(four_ranks, _fail, what, urls, arguments)):
        failure.names(f"{urls['c']}/{name}", "PermissionError", "Check the credentials")

    denied = Counter(exchange.key for exchange in proxy.requests(operation) if exchange.status == 403)
    assert set(denied.values()) == {2}, "asked more than once by a signed request and once through the filesystem"


STALLS = {
    "shard": ("save", "PUT", "__1_3.distcp"),
    "checksums": ("save", "PUT", "checksums.json"),
    "commit": ("save", "PUT", ".metadata"),
    "look": ("save", "GET", ".metadata"),
    "metadata": ("load", "GET", ".metadata"),
    "read": ("load", "GET", "__3_0.distcp"),
}


def _hasty(store: S3Store, **arguments: Any) -> dict[str, Any]:
    return {"storage_options": {**store.storage_options, "config_kwargs": {"read_timeout": 1}}, **arguments}


def test_store_that_never_answers_is_an_error_on_every_rank(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    arguments = _hasty(proxied_store, retry_seconds=2)
    urls = {name: proxied_store.below(name) for name in STALLS}
    of = {what: {name: urls[name] for name, stall in STALLS.items() if stall[0] == what} for what in ("save", "load")}
    _run(four_ranks, _save_well, of["load"], {"storage_options": proxied_store.storage_options})
    for name, (_, operation, file) in STALLS.items():
        proxy.add(Stall(), operation=operation, key=f"*/{name}/{file}", times=None)

    for what, some_urls in of.items():
        for failures in _run(four_ranks, _fail, what, some_urls, arguments):
            for name, failure in failures.items():
                failure.names(f"{urls[name]}/{STALLS[name][2]}", "Timeout")
                assert failure.ranks == {"shard": [1], "metadata": [0, 1, 2, 3], "read": [3]}.get(name, [0])


def test_store_that_does_not_answer_for_a_while_is_waited_for(
    proxied_store: S3Store, proxy: FaultProxy, four_ranks: RankPool
) -> None:
    arguments = _hasty(proxied_store)
    urls = {name: proxied_store.below(name) for name in ("before", "after")}
    stalls = [
        # Before it is carried out, and after: then the answer alone is missing.
        proxy.add(Stall(forward_first=name == "after"), method=method, key=f"*/{name}/{file}", times=2)
        for name in urls
        for method, file in (("PUT", "__1_*"), ("PUT", "checksums.json"), ("PUT", ".metadata"), ("GET", "*.distcp"))
    ]
    _run(four_ranks, _save_well, urls, arguments)
    _run(four_ranks, _load_well, urls, arguments)
    assert [rule.fired for rule in stalls] == [2] * len(stalls)
