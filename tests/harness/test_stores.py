"""Raw access to each store sees what fsspec wrote, and the other way round."""

from __future__ import annotations

from typing import Any

import fsspec

from support.stores import Store


def _resolve(store: Store, name: str) -> tuple[Any, str]:
    if store.filesystem is not None:
        return store.filesystem, store.filesystem._strip_protocol(store.below(name))
    return fsspec.core.url_to_fs(store.below(name), **(store.storage_options or {}))


def test_raw_access_agrees_with_fsspec(store: Store) -> None:
    assert store.raw_list() == {}
    filesystem, path = _resolve(store, "folder/one")
    filesystem.makedirs(filesystem._parent(path), exist_ok=True)
    filesystem.pipe_file(path, b"from fsspec")
    assert store.raw_list() == {"folder/one": 11}
    assert store.raw_read("folder/one") == b"from fsspec"

    store.raw_write("folder/deeper/two", b"raw")
    filesystem, path = _resolve(store, "folder/deeper/two")
    assert filesystem.cat_file(path) == b"raw"
    store.flip("folder/deeper/two", -1)
    assert store.raw_read("folder/deeper/two") == b"ra\x88"
    store.raw_delete("folder/one")
    assert store.raw_list() == {"folder/deeper/two": 3}
