"""Process groups of 1, 2 and 4 ranks killed with SIGKILL in the middle of a save, on the real S3 server and on disk.

After each kill: the checkpoint that stands is the one from before or the new one, whole and bit for bit, the new one
exactly if its commit was carried out; and the next save succeeds.

By default a few points of each kind are tried. `DCP_FSSPEC_CRASH_POINTS=all` (or `nox -s crash`) tries every
systematic point, and as many random ones; a number tries that many of each kind. How each ended is printed at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec import CheckpointNotFoundError
from dcp_fsspec.testing.servers import SeaweedServer
from support.checkpoints import fails, load
from support.crashing import Strike, Victim, save_until_killed, state_of
from support.faultproxy import Call, FaultProxy
from support.ranks import Outcome, RankPool, values
from support.stores import FolderStore, S3Store
from support.tensors import assert_bits_equal

pytestmark = [pytest.mark.distributed, pytest.mark.server]

WANTED = os.environ.get("DCP_FSSPEC_CRASH_POINTS", "3")
NUM_RANDOM_OF_ALL = 40

_numbers = itertools.count(1)
_endings: Counter[tuple[str, ...]] = Counter()


@pytest.fixture(scope="module")
def kill_proxy(seaweed: SeaweedServer) -> Iterator[FaultProxy]:
    """A proxy for those alone that are to be killed."""
    with FaultProxy(seaweed.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, tuple[RankPool, RankPool]]]:
    """By number of ranks, a pool to be killed and one to live."""
    made = {number: (RankPool(number, forked=True), RankPool(number, forked=True)) for number in (1, 2, 4)}
    yield made
    for pool in itertools.chain.from_iterable(made.values()):
        pool.stop()


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    yield
    print(f"\n{sum(_endings.values())} kills; store, ranks, save, moment, who was killed, what stood:")
    for row, count in sorted(_endings.items()):
        print(f"{count:6}  {', '.join(row)}")


@dataclasses.dataclass
class Site:
    """Where the ranks save: how those that are killed reach it, and how all others do."""

    kind: str
    url: str
    options: dict[str, Any] | None
    killed_options: dict[str, Any] | None
    proxy: FaultProxy
    doomed: RankPool
    living: RankPool

    def victim(self, folder: str, strike: Strike | None = None) -> Victim:
        return Victim(f"{self.url}/{folder}", self.killed_options, next(_numbers), strike)

    def save(self, folder: str) -> int:
        """Save by ranks that live; return the number of the state."""
        victim = dataclasses.replace(self.victim(folder), storage_options=self.options)
        values(self.living.run(save_until_killed, victim))
        assert self.stands(folder, victim.number) == victim.number
        return victim.number

    def kill(self, victim: Victim) -> list[Outcome]:
        """Save by ranks that die, and wait until all that they had sent has been carried out."""
        outcomes = self.doomed.run(save_until_killed, victim, deadline_seconds=60)
        self.doomed.stop()
        if self.options is not None:
            self.proxy.drain()
        for outcome in outcomes:
            assert "still running" not in str(outcome.error), "a rank waits for ever for one that died"
        return outcomes

    def stands(self, folder: str, *numbers: int) -> int | None:
        """Return which of the states is there, whole, or None if there is no checkpoint at all."""
        arguments = {"storage_options": self.options, "verify": "full"}
        try:
            loaded = load(state_of(numbers[0]), f"{self.url}/{folder}", **arguments)
        except BaseException:
            with fails() as failure:
                load(state_of(numbers[0]), f"{self.url}/{folder}", **arguments)
            assert isinstance(failure.causes[0], CheckpointNotFoundError), failure.text
            return None
        assert loaded["number"] in numbers
        assert_bits_equal(loaded, state_of(loaded["number"]))
        return int(loaded["number"])


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    seaweed: SeaweedServer,
    seaweed_client: Any,
    kill_proxy: FaultProxy,
    pools: dict[int, tuple[RankPool, RankPool]],
) -> Iterator[Site]:
    kind, num_ranks = request.param
    kill_proxy.clear()
    if kind == "folder":
        store: FolderStore | S3Store = FolderStore(tmp_path / "root", str(tmp_path / "root"))
        yield Site(kind, store.url, None, None, kill_proxy, *pools[num_ranks])
        return
    store = S3Store(seaweed_client, seaweed.bucket, seaweed.storage_options())
    killed_options = seaweed.storage_options(endpoint_url=kill_proxy.endpoint_url)
    yield Site(kind, store.url, store.storage_options, killed_options, kill_proxy, *pools[num_ranks])
    kill_proxy.clear()
    store.close()


SITES = [pytest.param((kind, ranks), id=f"{kind}-{ranks}") for kind in ("s3", "folder") for ranks in (1, 2, 4)]


RACED = ("mkdir folder", "fsync above")
"""Changes that only the rank makes that comes first, if they are made at all."""

COMMITS = ("pipe_file commit", "replace commit")


def _strikes(changes_of_ranks: list[list[str]]) -> Iterator[tuple[Strike, bool]]:
    """Yield every systematic point, and whether the commit has been carried out by then."""
    alone_too = (True, False) if len(changes_of_ranks) > 1 else (True,)
    for rank, changes in enumerate(changes_of_ranks):
        committed = False
        for at, name in enumerate(changes):
            number = changes[:at].count(name)
            for arrives in (False, True):
                committed = committed or (arrives and name in COMMITS)
                for whole_group in alone_too:
                    yield Strike(rank, name, number, arrives, whole_group), committed


def _chosen(points: list[tuple[Strike, bool]], group: str) -> list[tuple[Strike, bool]]:
    """Return those to try: all, or the two around the commit and some more."""
    if WANTED == "all":
        return points
    around = [point for point in points if point[0].change in COMMITS and point[0].whole_group]
    return (around + random.Random(group).sample(points, len(points)))[: int(WANTED)]


@pytest.mark.parametrize("mode", ["first", "overwrite"])
@pytest.mark.parametrize("site", SITES, indirect=True)
def test_kill_at_any_change_leaves_the_checkpoint_from_before_or_the_new_one(site: Site, mode: str) -> None:
    ranks = site.living.world_size
    old = site.save("c")
    watched = site.victim("c" if mode == "overwrite" else "watched")
    changes = values(site.doomed.run(save_until_killed, watched))
    old = watched.number if mode == "overwrite" else old
    points = _chosen(list(_strikes(changes)), f"{site.kind} {ranks} {mode}")
    for number, (strike, committed) in enumerate(points):
        folder = "c" if mode == "overwrite" else f"first{number}"
        victim = site.victim(folder, strike)

        outcomes = site.kill(victim)

        if outcomes[strike.rank].error is None:
            assert strike.change in RACED, "the moment never came"
            old = victim.number if mode == "overwrite" else old
            continue
        assert outcomes[strike.rank].error == "process ended with exit code -9", (strike, outcomes)
        before = old if mode == "overwrite" else None
        assert site.stands(folder, victim.number, old) == (victim.number if committed else before), strike
        killed = "the group" if strike.whole_group else f"rank {'0' if strike.rank == 0 else 'above 0'} alone"
        ended = "new" if committed else "old" if before else "none"
        moment = f"{'after' if strike.arrives else 'before'} {strike.change}"
        _endings[site.kind, str(ranks), mode, moment, killed, ended] += 1
        old = site.save(folder)


@pytest.mark.parametrize("site", SITES, indirect=True)
def test_kill_of_a_group_at_a_random_moment_leaves_the_checkpoint_from_before_or_the_new_one(site: Site) -> None:
    ranks = site.living.world_size
    chance = random.Random(f"{site.kind} {ranks}")
    old = site.save("c")
    watched = site.victim("c")
    values(site.doomed.run(save_until_killed, watched))
    num_requests, old = len(site.proxy.log), watched.number
    site.doomed.stop()
    for _ in range(NUM_RANDOM_OF_ALL if WANTED == "all" else int(WANTED)):
        victim = site.victim("c")
        if site.options is None:
            _kill_at_a_sight(site, victim, chance.randrange(3 * ranks + 9))
            stood, carried_out = site.stands("c", old, victim.number), None
        else:
            carried_out = _kill_at_a_request(site, victim, chance.randrange(num_requests), late=chance.random() < 0.5)
            stood = site.stands("c", old, victim.number)
        assert stood in (old, victim.number)
        assert carried_out in (None, stood == victim.number)
        ended = "old" if stood == old else "new"
        _endings[site.kind, str(ranks), "overwrite", "random", "the group", ended] += 1
        old = site.save("c")


def _kill_at_a_request(site: Site, victim: Victim, number: int, *, late: bool) -> bool:
    """Kill all ranks when the server has got that many requests. Returns whether it has carried the commit out.

    Args:
        site: an S3 server.
        victim: what to save.
        number: of the request, from 0.
        late: the request itself is carried out after the death of who sent it, else before.
    """
    site.proxy.clear()
    rule = site.proxy.add(Call(site.doomed.kill, forward_first=not late), skip=number)
    site.kill(victim)
    assert rule.fired == 1
    return any(exchange.status == 200 for exchange in site.proxy.requests("PUT", "*/.metadata"))


def _kill_at_a_sight(site: Site, victim: Victim, num_names: int) -> None:
    """Kill all ranks once so many new names have been seen in the folder."""
    folder = Path(victim.url)
    before = set(os.listdir(folder))
    seen: set[str] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.update(set(os.listdir(folder)) - before)
            if len(seen) > num_names:
                site.doomed.kill()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        site.kill(victim)
    finally:
        over.set()
        watcher.join()
