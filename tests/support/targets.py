"""Stores of the tests as targets of the conformance suite, looked at by the stores' own raw access."""

from __future__ import annotations

from dcp_fsspec.testing.conformance import Target
from support.stores import Store


class StoreTarget(Target):
    """A store of the tests.

    Args:
        store: empty.
        forbidden: as for `Target`.
    """

    def __init__(self, store: Store, *, forbidden: str = "") -> None:
        super().__init__(store.url, store.storage_options, store.filesystem, forbidden=forbidden)
        self.store = store

    def raw_list(self, name: str = "") -> dict[str, int]:
        files = self.store.raw_list()
        if not name:
            return files
        return {file.removeprefix(f"{name}/"): size for file, size in files.items() if file.startswith(f"{name}/")}

    def raw_read(self, name: str) -> bytes:
        return self.store.raw_read(name)


class InDirTarget(StoreTarget):
    """A store reached through `dir://`, fsspec's filesystem for a folder of another one."""

    def below(self, name: str) -> str:
        return f"dir://{name}::{self.store.url}"
