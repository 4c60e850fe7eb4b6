"""Read once, fan out: what several ranks need alike is read from the store by one, which hands it to the others.

The coordinator sees the plans of all ranks and says who reads what (`share_out`, pure). Each rank then reads its own
items; all agree that nobody failed; and the shared tensors go round in buckets of bounded size (`hand_round`). A rank
that dies makes the collective fail on the others at once.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_fsspec.storage.torch_internals import StorageInfo

_UNIT_BYTES = 8 << 20
"""What one rank reads on behalf of others at least lies together, so that its ranges can be merged."""
_MAX_SETS = 4096
_MIN_SHARED_BYTES = 1 << 20
"""Less than this is not worth a collective."""


@dataclass(frozen=True)
class Share:
    """Items that several ranks need alike.

    Attributes:
        ranks: The ranks that need them.
        source: The one of these that reads them.
        items: Their places in this rank's plan, in the same order on each of the ranks; empty on all others.
    """

    ranks: tuple[int, ...]
    source: int
    items: tuple[int, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """What the coordinator tells one rank in ``LoadPlan.storage_data``.

    Attributes:
        shares: All shares, in the order in which they go round.
    """

    shares: tuple[Share, ...] = ()


@dataclass
class _Unit:
    ranks: tuple[int, ...]
    num_bytes: int = 0
    places: list[tuple[int, ...]] = field(default_factory=list)


_Key = tuple[str, tuple[int, ...] | None, tuple[int, ...], tuple[int, ...]]


def share_out(plans: Sequence[LoadPlan], storage_data: Mapping[object, StorageInfo]) -> list[Assignment]:
    """Say, for each rank, what is shared and who reads it; nothing if that saves too little."""
    wanted: dict[_Key, dict[int, int]] = {}
    for rank, plan in enumerate(plans):
        for place, item in enumerate(plan.items):
            if item.type == LoadItemType.TENSOR:
                wanted.setdefault(_key(item), {}).setdefault(rank, place)
    shared = {key: by_rank for key, by_rank in wanted.items() if len(by_rank) > 1}
    units = list(_units(shared, plans, storage_data))
    if sum(unit.num_bytes for unit in units) < _MIN_SHARED_BYTES or len({unit.ranks for unit in units}) > _MAX_SETS:
        return [Assignment() for _ in plans]
    sources = _balance(units, len(plans))
    shares = sorted(_joined(units, sources).items())
    return [
        Assignment(
            tuple(
                Share(ranks, source, tuple(places[ranks.index(rank)] for places in items) if rank in ranks else ())
                for (ranks, source), items in shares
            )
        )
        for rank in range(len(plans))
    ]


def _key(item: ReadItem) -> _Key:
    index = item.storage_index
    offset = tuple(index.offset) if index.offset is not None else None
    return index.fqn, offset, tuple(item.storage_offsets), tuple(item.lengths)


def _units(
    shared: Mapping[_Key, Mapping[int, int]], plans: Sequence[LoadPlan], storage_data: Mapping[object, StorageInfo]
) -> Iterator[_Unit]:
    """Put together what lies together and is needed by the same ranks."""
    located = []
    for by_rank in shared.values():
        rank, place = next(iter(by_rank.items()))
        info = storage_data[plans[rank].items[place].storage_index]
        located.append((tuple(sorted(by_rank)), info.relative_path, info.offset, info.length, by_rank))
    located.sort(key=lambda one: one[:4])
    unit, file = None, ""
    for ranks, path, _, length, by_rank in located:
        if unit is None or unit.ranks != ranks or path != file or unit.num_bytes >= _UNIT_BYTES:
            if unit is not None:
                yield unit
            unit, file = _Unit(ranks), path
        unit.num_bytes += length
        unit.places.append(tuple(by_rank[rank] for rank in ranks))
    if unit is not None:
        yield unit


def _balance(units: Sequence[_Unit], num_ranks: int) -> list[int]:
    """Choose the reading rank of each unit so that all read about as much."""
    load = [0] * num_ranks
    sources = []
    for unit in units:
        source = min(unit.ranks, key=lambda rank: load[rank])
        load[source] += unit.num_bytes
        sources.append(source)
    return sources


def _joined(units: Iterable[_Unit], sources: Iterable[int]) -> dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]:
    joined: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for unit, source in zip(units, sources, strict=True):
        joined.setdefault((unit.ranks, source), []).extend(unit.places)
    return joined


def received(assignment: Assignment, rank: int) -> set[int]:
    """Return the places in the plan of the items that this rank gets from others."""
    return {place for share in assignment.shares if share.source != rank for place in share.items}


class HandRound:
    """Hands the shared tensors of one load from the ranks that have read them to the others. Collective throughout.

    Args:
        group: The ranks of the load; None: all of them.
        assignment: What the coordinator said.
        items: This rank's plan.
        planner: Gives the targets.
        bucket_bytes: Memory for what is under way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        assignment: Assignment,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        bucket_bytes: int,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._assignment = assignment
        self._items = items
        self._planner = planner
        self._bucket_bytes = bucket_bytes
        self._targets: list[list[torch.Tensor]] = []

    def agree(self, failure: BaseException | None) -> list[int]:
        """Learn how all ranks fared, before anything goes round.

        Args:
            failure: What went wrong on this rank, if anything did.

        Returns:
            Places of items that this rank must read itself after all: their targets differ between the ranks.

        Raises:
            RankFailedError: another rank failed; nothing goes round.
        """
        if failure is None:
            try:
                self._targets = [
                    [self._planner.resolve_tensor(self._items[place]).detach() for place in share.items]
                    for share in self._assignment.shares
                ]
            except Exception as error:
                failure = error
        mine = (None if failure is None else f"{type(failure).__name__}: {failure}", self._forms())
        told: list[tuple[str | None, list[str]] | None] = [None] * self._size
        dist.all_gather_object(told, mine, group=self._group)
        if failure is not None:
            raise failure
        failures = {rank: one[0] for rank, one in enumerate(told) if one is not None and one[0] is not None}
        if failures:
            raise RankFailedError("; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        return self._without_differing([one[1] for one in told if one is not None])

    def _forms(self) -> list[str]:
        """Return, of each share, a digest of the shapes and dtypes of its targets."""
        return [
            hashlib.blake2s(repr([(tuple(one.shape), one.dtype) for one in targets]).encode()).hexdigest()
            if targets
            else ""
            for targets in self._targets
        ]

    def _without_differing(self, forms: Sequence[Sequence[str]]) -> list[int]:
        left: list[int] = []
        self._same: list[bool] = []
        for number, share in enumerate(self._assignment.shares):
            same = len({forms[rank][number] for rank in share.ranks}) == 1
            self._same.append(same)
            if not same and self._rank != share.source:
                left.extend(share.items)
        return left

    def run(self) -> int:
        """Send and receive all shares. Returns how many bytes this rank has received."""
        num_bytes = 0
        for number, share in enumerate(self._assignment.shares):
            if self._same[number] and self._rank in share.ranks:
                num_bytes += self._one(share, self._targets[number])
        return num_bytes

    def _one(self, share: Share, targets: list[torch.Tensor]) -> int:
        num_bytes = 0
        for bucket in _buckets(targets, self._bucket_bytes):
            num_bytes += self._send_or_receive(share, bucket)
        if self._rank == share.source:
            return 0
        for place, target in zip(share.items, targets, strict=True):
            self._planner.commit_tensor(self._items[place], target)
        return num_bytes

    def _send_or_receive(self, share: Share, bucket: Sequence[torch.Tensor]) -> int:
        device = _device_of(self._group)
        flat = torch.empty(sum(one.numel() for one in bucket), dtype=bucket[0].dtype, device=device)
        parts = torch.split(flat, [one.numel() for one in bucket])
        is_source = self._rank == share.source
        if is_source:
            for part, one in zip(parts, bucket, strict=True):
                part.view(one.shape).copy_(one)
        self._broadcast(flat.view(torch.uint8), share)
        if not is_source:
            for part, one in zip(parts, bucket, strict=True):
                one.copy_(part.view(one.shape))
        return flat.numel() * flat.itemsize

    def _broadcast(self, data: torch.Tensor, share: Share) -> None:
        """Bring `data` from the source of `share` to its other ranks.

        To some of the ranks it goes from one to the next along a binomial tree: a process group for each set of ranks
        would have to be made, and all ranks handle the shares in the same order, so none waits for another in a circle.
        """
        if len(share.ranks) == self._size:
            dist.broadcast(data, group=self._group, group_src=share.source)
            return
        members = [share.source, *(rank for rank in share.ranks if rank != share.source)]
        place, reached = members.index(self._rank), 1
        while reached < len(members):
            if place < reached and place + reached < len(members):
                dist.send(data, group=self._group, group_dst=members[place + reached])
            elif reached <= place < 2 * reached:
                dist.recv(data, group=self._group, group_src=members[place - reached])
            reached *= 2


class RankFailedError(Exception):
    """Another rank failed, for the reason in the text."""


def _buckets(targets: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Cut `targets` into runs of one dtype of about `bucket_bytes`; a larger tensor is cut by rows."""
    bucket: list[torch.Tensor] = []
    held = 0
    for target in targets:
        for piece in _pieces(target, bucket_bytes):
            num_bytes = piece.numel() * piece.itemsize
            if bucket and (held + num_bytes > bucket_bytes or piece.dtype != bucket[0].dtype):
                yield bucket
                bucket, held = [], 0
            if num_bytes:
                bucket.append(piece)
                held += num_bytes
    if bucket:
        yield bucket


def _pieces(target: torch.Tensor, bucket_bytes: int) -> Sequence[torch.Tensor]:
    num_bytes = target.numel() * target.itemsize
    if num_bytes <= bucket_bytes or target.dim() == 0 or target.shape[0] < 2:
        return [target]
    rows = max(1, target.shape[0] * bucket_bytes // num_bytes)
    return torch.split(target, rows)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if "gloo" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
