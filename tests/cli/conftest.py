"""Checkpoints of every kind, written once, and a store of each kind that the command line is tried on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import KINDS, upload, write_others, write_ours
from support.stores import Store

Place = Callable[..., str]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of iterations 1 and 2 of each kind; of stock torch, a single checkpoint."""
    folders = {}
    for kind in KINDS:
        folders[kind] = tmp_path_factory.mktemp(kind)
        if kind == "ours":
            write_ours(str(folders[kind]), (1, 2))
        else:
            write_others(folders[kind], kind, (1,) if kind == "stock" else (1, 2))
    return folders


@pytest.fixture
def place(written: dict[str, Path]) -> Place:
    """Put the checkpoints of one kind into a store; returns their url."""

    def put(store: Store, kind: str, name: str = "run") -> str:
        upload(written[kind], store, name)
        return store.below(name)

    return put
