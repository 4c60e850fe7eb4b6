"""The shipped conformance suite over every kind of store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec import ConfigurationError
from dcp_fsspec.testing.conformance import CHECKS, Check, Target, run_check
from dcp_fsspec.testing.servers import MotoServer
from support.stores import S3Store, Store
from support.targets import StoreTarget

every_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())

FORBIDDEN = {
    "webdav": "?#%",  # httpx, and so webdav4, takes neither ? nor # in a path, and reads %41 as A.
    "abfs": "?",  # adlfs drops it at the end of a name.
}


def _run(check: Check, target: Target) -> None:
    result = run_check(check, target)
    if result.outcome == "not applicable":
        pytest.skip(result.reason)
    if result.outcome == "failed":
        raise AssertionError(result.reason) from result.error


@every_check
def test_every_store_passes(check: Check, store: Store) -> None:
    _run(check, StoreTarget(store, forbidden=FORBIDDEN.get(store.url.partition("://")[0], "")))


@every_check
def test_an_odd_filesystem_is_slower_and_not_wrong(check: Check, odd_target: StoreTarget) -> None:
    _run(check, odd_target)


@pytest.mark.parametrize("name", ["overwrite_replaces", "overwritten_by_another"])
def test_a_cache_in_front_of_s3_hides_no_overwrite(
    name: str, moto_server: MotoServer, moto_client: Any, tmp_path: Path
) -> None:
    store = S3Store(moto_client, moto_server.bucket)
    store.url = f"simplecache::{store.url}"
    store.storage_options = {
        "s3": moto_server.storage_options(),
        "simplecache": {"cache_storage": str(tmp_path / "cache")},
    }
    _run(CHECKS[name], StoreTarget(store))
    for file in store.raw_list():
        store.raw_delete(file)


@pytest.mark.parametrize("store", ["webdav"], indirect=True)
@pytest.mark.parametrize("name", ["a?c", "a#c", "a%41c"])
def test_a_name_that_webdav_would_read_otherwise_is_refused(name: str, store: Store) -> None:
    target = StoreTarget(store)
    with pytest.raises(ConfigurationError):
        target.save(name, {"step": 1})
    assert store.raw_list() == {}


@pytest.mark.parametrize("store", ["azure"], indirect=True)
def test_a_name_that_azure_would_read_otherwise_is_refused(store: Store) -> None:
    with pytest.raises(ConfigurationError):
        StoreTarget(store).save("a?", {"step": 1})
    assert store.raw_list() == {}


@pytest.mark.parametrize("odd_target", ["ftp"], indirect=True)
def test_a_url_that_ftp_would_cut_is_refused(odd_target: StoreTarget) -> None:
    with pytest.raises(ConfigurationError):
        odd_target.save("a?c", {"step": 1})
    assert odd_target.raw_list() == {}
