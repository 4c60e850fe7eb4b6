"""Any sequence of saves, crashes, failures, loads and checks: what stands is always exactly one whole checkpoint.

A few short sequences, the same ones each time; `DCP_FSSPEC_STATEFUL_EXAMPLES` asks for that many others, longer ones.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec import CheckpointExistsError, CheckpointNotFoundError, FsspecStorageWriter, verify
from dcp_fsspec.testing.servers import MotoServer
from support.changes import Change, Changes
from support.checkpoints import assert_loads
from support.stores import FolderStore, MemoryStore, S3Store, Store
from support.tensors import random_tensor

SHARD_BYTES = 64 << 10
EXAMPLES = int(os.environ.get("DCP_FSSPEC_STATEFUL_EXAMPLES", "0"))

FOLDERS = st.sampled_from(["a", "b"])
SIZES = st.integers(1, 3)
CHANGES = st.integers(0, 25)


class Crash(BaseException):
    """The process is gone; nothing of it runs on, clean-up included."""


class Fate:
    """Lets a save die, or meet one failed call, at a change.

    Args:
        at: index of the change; None: it lives.
        arrives: it dies once the change has been made.
        fails: the call fails instead, and what comes after it works again.
    """

    def __init__(self, at: int | None = None, *, arrives: bool = False, fails: bool = False) -> None:
        self._at, self._arrives, self._fails = at, arrives, fails
        self.committed = False
        self.struck = False

    def before(self, change: Change) -> None:
        if self.struck and not self._fails:
            raise Crash
        if change.index == self._at and not self._arrives:
            self.struck = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if self._fails else Crash

    def after(self, change: Change) -> None:
        self.committed = self.committed or change.commits
        if change.index == self._at:
            self.struck = True
            raise Crash


class Saves(RuleBasedStateMachine):
    """What stands in each of two folders, beside what should."""

    make_store: ClassVar[Any]

    def __init__(self) -> None:
        super().__init__()
        self._closing = contextlib.ExitStack()
        self.store: Store = self._closing.enter_context(type(self).make_store())
        self.standing: dict[str, dict[str, Any] | None] = {"a": None, "b": None}
        self.writers: dict[tuple[str, bool], FsspecStorageWriter] = {}
        self.numbers = itertools.count(1)

    def teardown(self) -> None:
        self._closing.close()

    # What may happen -------------------------------------------------------------------------------------

    @rule(folder=FOLDERS, size=SIZES, overwrite=st.booleans())
    def save(self, folder: str, size: int, overwrite: bool) -> None:
        self._save(folder, size, overwrite, Fate())

    @rule(folder=FOLDERS, size=SIZES, overwrite=st.booleans(), at=CHANGES, arrives=st.booleans())
    def crash(self, folder: str, size: int, overwrite: bool, at: int, arrives: bool) -> None:
        self._save(folder, size, overwrite, Fate(at, arrives=arrives))
        self.reopen()

    @rule(folder=FOLDERS, size=SIZES, overwrite=st.booleans(), at=CHANGES)
    def fail(self, folder: str, size: int, overwrite: bool, at: int) -> None:
        before = self.store.raw_list()
        fate = Fate(at, fails=True)
        self._save(folder, size, overwrite, fate)
        if fate.struck and not fate.committed and isinstance(self.store, FolderStore):
            assert self.store.raw_list().keys() <= before.keys(), "something half-done is left"

    @rule()
    def reopen(self) -> None:
        self.writers.clear()

    @rule(folder=FOLDERS)
    def load_some(self, folder: str) -> None:
        standing = self.standing[folder]
        if standing is not None:
            wanted = {"tensor0": standing["tensor0"]}
            assert_loads(wanted, self.store.below(folder), **{**self.store.arguments, "verify": "read"})

    @rule(folder=FOLDERS)
    def check(self, folder: str) -> None:
        if self.standing[folder] is None:
            with pytest.raises(CheckpointNotFoundError):
                verify(self.store.below(folder), **self.store.arguments)
            return
        report = verify(self.store.below(folder), **self.store.arguments)
        assert (report.problems, report.checksums) == ([], "checked")

    # What must be true at all times ----------------------------------------------------------------------

    @invariant()
    def what_stands_is_whole(self) -> None:
        for folder, standing in self.standing.items():
            if standing is not None:
                assert_loads(standing, self.store.below(folder), **self.store.arguments)
                continue
            assert f"{folder}/.metadata" not in self.store.raw_list()

    # ------------------------------------------------------------------------------------------------------

    def _save(self, folder: str, size: int, overwrite: bool, fate: Fate) -> None:
        number = next(self.numbers)
        state: dict[str, Any] = {f"tensor{key}": random_tensor(15_000, seed=10 * number + key) for key in range(size)}
        state["number"] = number
        raised = self._attempt(folder, overwrite, state, fate)
        if self.standing[folder] is not None and not overwrite:
            assert isinstance(raised, CheckpointExistsError)
            assert not fate.struck
        elif not fate.struck:
            assert raised is None, raised
        assert raised is not None or fate.committed
        if fate.committed:
            self.standing[folder] = state

    def _attempt(self, folder: str, overwrite: bool, state: dict[str, Any], fate: Fate) -> BaseException | None:
        url = self.store.below(folder)
        writer = self.writers.get((folder, overwrite))
        if writer is None:
            writer = FsspecStorageWriter(
                url, **self._arguments(), shard_bytes=SHARD_BYTES, overwrite=overwrite, retry_seconds=0
            )
            self.writers[folder, overwrite] = writer
        try:
            with Changes(url, self._arguments().get("filesystem"), fate.before, fate.after):
                dcp.save(state, storage_writer=writer)
        except CheckpointException as error:
            ((raised, _),) = error.failures.values()
            return raised
        except Crash as crash:
            return crash
        return None

    def _arguments(self) -> dict[str, Any]:
        if isinstance(self.store, FolderStore):
            return {}
        protocol = self.store.url.partition("://")[0]
        return {"filesystem": fsspec.filesystem(protocol, **(self.store.storage_options or {}))}


@contextlib.contextmanager
def _folder() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="saves-") as folder:
        yield FolderStore(Path(folder, "root"), f"{folder}/root")


@contextlib.contextmanager
def _memory() -> Iterator[Store]:
    store = MemoryStore()
    yield store
    store.close()


def _run(machine: type[Saves], *, share: int = 1) -> None:
    chosen = settings(
        max_examples=EXAMPLES // share or 12,
        stateful_step_count=30 if EXAMPLES else 12,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],  # shrinking takes minutes
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]


def test_any_sequence_in_a_folder_leaves_one_whole_checkpoint_or_none() -> None:
    class InFolder(Saves):
        make_store = staticmethod(_folder)

    _run(InFolder)


def test_any_sequence_in_memory_leaves_one_whole_checkpoint_or_none() -> None:
    class InMemory(Saves):
        make_store = staticmethod(_memory)

    _run(InMemory)


@pytest.mark.slow
def test_any_sequence_on_s3_leaves_one_whole_checkpoint_or_none(moto_server: MotoServer, moto_client: Any) -> None:
    @contextlib.contextmanager
    def moto() -> Iterator[Store]:
        store = S3Store(moto_client, moto_server.bucket, moto_server.storage_options())
        yield store
        store.close()

    class OnMoto(Saves):
        make_store = staticmethod(moto)

    _run(OnMoto, share=4)
