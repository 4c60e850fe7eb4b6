"""The ranks of a job, and how they come to one answer: one decides and tells the others; all hear of each failure."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.errors import DcpFsspecError, StorageWriteError

T = TypeVar("T")


class Group:
    """The ranks that save and load together; one process alone where nothing is initialised.

    Making it is collective where the given group cannot exchange objects on the host (NCCL): a gloo group is made
    then, so that nothing here uses a GPU.

    Args:
        process_group: The ranks. Default: all of them.
        own: Make a gloo group of its own in any case, for use in a thread beside the training's.
        timeout_seconds: Of a group that is made: how long ranks wait for each other.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        own: bool = False,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.rank, self.size = 0, 1
        if not self.is_distributed:
            return
        if own or "gloo" not in str(dist.get_backend(process_group)):
            self.process_group = dist.new_group(
                dist.get_process_group_ranks(process_group) if process_group is not None else None,
                timeout=datetime.timedelta(seconds=timeout_seconds),
                backend="gloo",
                use_local_synchronization=True,  # Ranks outside of the group do not come here.
            )
        self.rank = dist.get_rank(self.process_group)
        self.size = dist.get_world_size(self.process_group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def decide(self, decision: Callable[[], T]) -> T:
        """Run `decision` on the coordinator and return what it returned, or raise what it raised, on every rank."""
        if self.size == 1:
            return decision()
        answer: list[Any] = [None]
        if self.is_coordinator:
            answer = [_attempt(decision)]
        dist.broadcast_object_list(answer, group=self.process_group, group_src=0)
        return cast(T, _outcome(answer[0]))

    def agree(self, work: Callable[[], T], doing: str) -> T:
        """Run `work` on every rank; if it fails anywhere, raise on every rank.

        Raises:
            DcpFsspecError: of the type that the first failing rank raised, naming the ranks.
        """
        if self.size == 1:
            return work()
        mine = _attempt(work)
        failure = mine if isinstance(mine, _Failure) else None
        failures: list[_Failure | None] = [None] * self.size
        dist.all_gather_object(failures, failure, group=self.process_group)
        raise_failures({rank: one.error for rank, one in enumerate(failures) if one is not None}, doing)
        return cast(T, mine)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return cast(list[T], values)


class _Failure:
    """An error on its way to the other ranks; one that cannot be pickled goes as its text."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (portable(self.error),)


def portable(error: BaseException) -> BaseException:
    """Return `error`, or its text in another one if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        text = StorageWriteError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            text.add_note(note)
        return text
    return error


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (Exception, CheckpointException) as error:
        return _Failure(error)


def _outcome(answer: Any) -> Any:
    if isinstance(answer, _Failure):
        raise answer.error
    return answer


def raise_failures(failures: dict[int, BaseException], doing: str) -> None:
    """Raise one error for all of `failures`, by rank, if there are any.

    The type is that of the lowest rank's error if it is one of this package, else the error itself.
    """
    if not failures:
        return
    flat = {rank: _innermost(error) for rank, error in failures.items()}
    first = flat[min(flat)]
    if not isinstance(first, DcpFsspecError):
        first.add_note(f"while {doing}, on rank {', '.join(map(str, sorted(flat)))}")
        raise first
    texts = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(flat.items()))
    raise type(first)(f"{doing} failed on {texts}") from first


def _innermost(error: BaseException) -> BaseException:
    """Return the first rank's own error out of torch's collection of them."""
    while isinstance(error, CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return error


def checkpoint_failures(error: CheckpointException) -> dict[int, BaseException]:
    """Return the errors that torch has collected, by rank."""
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}
