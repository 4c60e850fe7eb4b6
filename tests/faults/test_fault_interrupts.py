"""Ctrl-C in the middle of a save or a load: it ends at once, and nothing half-done is left, no thread either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_fsspec.testing.servers import MotoServer
from support.checkpoints import assert_loads, folder_files, impatient, save
from support.faultproxy import FaultProxy, Status
from support.stores import FolderStore, S3Store, Store
from support.tensors import random_tensor
from support.victim import run_victim, state_of

SHARD_BYTES = 64 << 10
NUM_TENSORS = 6
OLD: dict[str, Any] = {f"tensor{number}": random_tensor(15_000, seed=number) for number in range(NUM_TENSORS)}


FOLDERS_WITH_OLD = ("overwritten", "read")


def _scenario(store: Store, folder: str, **more: Any) -> dict[str, Any]:
    common = {"kind": "interrupt", "storage_options": store.storage_options, "num_tensors": NUM_TENSORS}
    return {**common, "url": store.below(folder), "arguments": {"max_concurrency": 2}, **more}


def _scenarios(store: Store) -> list[dict[str, Any]]:
    return [
        _scenario(store, "first", at=".distcp"),
        _scenario(store, "middle", at=".distcp", after=NUM_TENSORS // 2),
        _scenario(store, "last", at=".distcp", after=NUM_TENSORS - 1),
        _scenario(store, "at_checksums", at="/checksums"),
        _scenario(store, "overwritten", at=".distcp", after=2),
        _scenario(store, "read", at=".distcp", during="load"),
    ]


def test_interrupt_in_an_upload_or_a_download_ends_it_and_leaves_nothing(
    tmp_path: Path, moto_server: MotoServer, moto_client: Any
) -> None:
    stores: list[Store] = [
        FolderStore(tmp_path / "root", str(tmp_path / "root")),
        S3Store(moto_client, moto_server.bucket, moto_server.storage_options()),
    ]
    before = {}
    for store in stores:
        for folder in FOLDERS_WITH_OLD:
            save(OLD, store.below(folder), shard_bytes=SHARD_BYTES, **store.arguments)
            before[store, folder] = folder_files(store, folder)

    scenarios = [scenario for store in stores for scenario in _scenarios(store)]
    uncaught = _scenario(stores[1], "overwritten", at=".distcp", after=2, catch=False)
    outcome = run_victim(*scenarios, uncaught)

    assert outcome.returncode not in (0, None), outcome.output
    assert outcome.output.rstrip().endswith("KeyboardInterrupt")
    assert len(outcome.reports) == len(scenarios), outcome.output
    for scenario, report in zip(scenarios, outcome.reports, strict=True):
        assert "KeyboardInterrupt" in report["raised"] + report["text"], (scenario, report)
        assert report["threads"] == [], scenario
    for store in stores:
        for folder in ("first", "middle", "last"):
            assert folder_files(store, folder) == {}, (store.url, folder)
        left = folder_files(store, "at_checksums")
        assert [name for name in left if name == ".metadata" or name.endswith(".distcp")] == []
        for folder in FOLDERS_WITH_OLD:
            assert folder_files(store, folder) == before[store, folder], (store.url, folder)
            assert_loads(OLD, store.below(folder), **store.arguments)


@pytest.mark.server
def test_interrupt_ends_the_retries_of_an_upload_and_of_a_download(proxied_store: S3Store, proxy: FaultProxy) -> None:
    options = impatient(proxied_store.storage_options)["storage_options"]
    state = state_of(NUM_TENSORS)
    save(state, proxied_store.below("read"), shard_bytes=SHARD_BYTES, storage_options=options)
    for operation in ("PUT", "GET"):
        proxy.add(Status(503, "ServiceUnavailable"), operation=operation, key="*/__0_1.distcp", times=None)
    common = {"kind": "interrupt", "storage_options": options, "num_tensors": NUM_TENSORS, "at": "__0_1.distcp"}
    # An hour of patience: that the process ends before its deadline shows that it was called off.
    patient = {"retry_seconds": 3600}

    outcome = run_victim(
        {**common, "url": proxied_store.below("c"), "after": 2, "arguments": patient},
        {**common, "url": proxied_store.below("read"), "after": 2, "arguments": patient, "during": "load"},
    )

    assert outcome.returncode == 0, outcome.output
    for report in outcome.reports:
        assert "KeyboardInterrupt" in report["raised"] + report["text"], report
        assert report["threads"] == []
    assert folder_files(proxied_store, "c") == {}
    proxy.clear()
    assert_loads(state, proxied_store.below("read"), storage_options=options)
