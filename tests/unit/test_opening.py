"""What is added to the options of an s3 url, and what is left alone."""

from typing import Any

import fsspec
import pytest

from dcp_fsspec.storage.opening import open_filesystem


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    fs, path = open_filesystem("s3://bucket/x", options, None, skip_instance_cache=True)
    assert path == "bucket/x"
    config: dict[str, Any] = fs.config_kwargs
    return config


def test_the_body_is_guarded_by_a_checksum_or_by_its_hash() -> None:
    assert config_of({})["s3"] == {"payload_signing_enabled": False}
    assert "s3" not in config_of({"config_kwargs": {"request_checksum_calculation": "when_required"}})


@pytest.mark.parametrize("where", ["options", "configuration"])
def test_what_the_user_says_wins_and_keeps_the_rest(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"config_kwargs": {"max_pool_connections": 9, "s3": {"addressing_style": "path"}}}
    if where == "configuration":
        monkeypatch.setitem(fsspec.config.conf, "s3", said)
    config = config_of(said if where == "options" else {})
    assert config["max_pool_connections"] == 9
    assert config["s3"] == {"addressing_style": "path", "payload_signing_enabled": False}
    assert config["response_checksum_validation"] == "when_required"
