"""What a trainer and its upload process say to each other: pickles over a socket, tensors by their place in memory."""

import dataclasses
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.saving import WriteOptions
from dcp_fsspec.checkpointer.snapshot import FlatState, Snapshot, StagedShards
from dcp_fsspec.checkpointer.staging import Arena
from dcp_fsspec.storage.filesystem import Store


@dataclasses.dataclass(frozen=True)
class Setup:
    """First message to an upload process.

    Attributes:
        store: The checkpoints folder.
        options: For the writer.
        rank: Of this process among the upload processes, which is that of its trainer.
        world_size: Of the upload processes.
        host: Where the process of rank 0 listens.
        port: Where the process of rank 0 listens.
        listens: Whether a listening socket follows this message: on rank 0.
        timeout_seconds: After which a collective is given up, and an upload whose trainer is gone.
        trainer_pid: The process id of the trainer.
    """

    store: Store
    options: WriteOptions
    rank: int
    world_size: int
    host: str
    port: int
    listens: bool
    timeout_seconds: float
    trainer_pid: int


@dataclasses.dataclass(frozen=True)
class Ready:
    """The process has its group and waits for work."""


@dataclasses.dataclass(frozen=True)
class Unable:
    """The process cannot become ready, and ends.

    Attributes:
        why: What happened, with its traceback.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class NewArena:
    """The memory of the snapshots to come; its file descriptor follows."""

    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Request:
    """A staged snapshot, pickled by `encode`.

    Attributes:
        iteration: Its iteration.
        snapshot: The pickle.
    """

    iteration: int
    snapshot: bytes


@dataclasses.dataclass(frozen=True)
class Committing:
    """All components are written, and the iteration is about to be committed. Only rank 0 says so."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How an upload ended on this rank.

    Attributes:
        outcome: The outcome.
        goes_on: Whether the process can take another one.
    """

    outcome: Outcome
    goes_on: bool


Message = Setup | Ready | Unable | NewArena | Request | Committing | Ended


def send(connection: Connection, message: Message) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone.
    """
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Return the next message.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    return pickle.loads(connection.recv_bytes())


class _Place(NamedTuple):
    """Where a tensor lies in the memory that both sides map."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def encode(snapshot: Snapshot, arena: Arena) -> bytes:
    """Pickle a staged snapshot without the tensors that lie in `arena`."""

    def named(tensor: torch.Tensor) -> Any:
        offset = arena.offset_of(tensor)
        return tensor if offset is None else _Place(offset, tensor.dtype, tuple(tensor.shape))

    return pickle.dumps(_with_tensors(snapshot, named), protocol=pickle.HIGHEST_PROTOCOL)


def decode(data: bytes, arena: Arena) -> Snapshot:
    """Return a snapshot whose tensors lie in `arena`."""
    return _with_tensors(pickle.loads(data), lambda one: arena.place(*one) if isinstance(one, _Place) else one)


def _with_tensors(snapshot: Snapshot, replaced: Callable[[Any], Any]) -> Snapshot:
    components = {
        name: FlatState(
            {
                key: StagedShards(one.write_items, tuple(map(replaced, one.tensors)))
                if isinstance(one, StagedShards)
                else one
                for key, one in flat.values.items()
            },
            flat.paths,
        )
        for name, flat in snapshot.components.items()
    }
    return dataclasses.replace(snapshot, components=components)
