"""Urls as people write them."""

import os
from pathlib import Path

import pytest

from dcp_fsspec import ConfigurationError
from dcp_fsspec.storage.location import is_safe_relative, normalize_root, normalize_url, redact, secrets_of


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        (Path("/a/b"), "/a/b"),
        ("relative/x", "relative/x"),
        ("~/x", os.path.expanduser("~/x")),
        ("simplecache::s3://b/x", "simplecache::s3://b/x"),
    ],
)
def test_what_is_taken(given: str | Path, normal: str) -> None:
    assert normalize_url(given) == normal


@pytest.mark.parametrize("given", ["", "  ", Path("s3://bucket/x"), "gs:/bucket/x", "s3://b/x?versionId=1/y"])
def test_what_is_refused(given: str | Path) -> None:
    with pytest.raises(ConfigurationError):
        normalize_url(given)


def test_a_swallowed_slash_is_explained() -> None:
    with pytest.raises(ConfigurationError, match="s3://"):
        normalize_url(Path("s3://bucket/x"))


@pytest.mark.parametrize(
    ("path", "root"),
    [("b/a/", "b/a"), ("b//a///c", "b/a/c"), ("/a//b/", "/a/b"), ("/", "/"), ("", ""), ("b", "b")],
)
def test_slashes(path: str, root: str) -> None:
    assert normalize_root(path) == root


@pytest.mark.parametrize("name", ["__0_0.distcp", "a/b.distcp", "..x", "sp ace[1]*?#%"])
def test_names_inside(name: str) -> None:
    assert is_safe_relative(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/x", "s3://b/x", "a//b", "a\\b", "a\0b", "simplecache::x", "x" * 2000],
)
def test_names_that_leave_the_folder(name: str) -> None:
    assert not is_safe_relative(name)


def test_secrets_are_found_however_deep() -> None:
    options = {
        "key": "AKIAEXAMPLE",
        "client_kwargs": {"aws_secret_access_key": "wJalrXUt", "endpoint_url": "http://h"},
        "config": [{"session_token": "FwoGZXIv"}],
        "anon": False,
    }
    assert set(secrets_of(options)) == {"AKIAEXAMPLE", "wJalrXUt", "FwoGZXIv"}


def test_secrets_are_hidden() -> None:
    text = redact(
        "http://user:pw@host/x?X-Amz-Signature=abc123&X-Amz-Date=1 and https://h/c?sv=2&sig=Zm9v%3D key AKIAEXAMPLE",
        ("AKIAEXAMPLE",),
    )
    for secret in ("user", "pw@", "abc123", "Zm9v", "AKIAEXAMPLE"):
        assert secret not in text
    assert "http://***@host/x" in text
