"""The servers over a folder are what the conformance tests take them for, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Any

import fsspec
import pytest

from dcp_fsspec.testing.folder_servers import FtpServer, RcloneServer


def test_rclone_ignores_conditions_and_answers_200_to_a_range(rclone: RcloneServer) -> None:
    client = rclone.boto3_client()
    client.put_object(Bucket=rclone.bucket, Key="server-test", Body=b"0123456789")
    client.put_object(Bucket=rclone.bucket, Key="server-test", Body=b"abcdefghij", IfNoneMatch="*")
    answer = client.get_object(Bucket=rclone.bucket, Key="server-test", Range="bytes=2-4")
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert answer["ContentRange"] == "bytes 2-4/10"
    assert (rclone.folder / "server-test").read_bytes() == b"abcdefghij"


def test_rclone_refuses_a_wrong_secret(rclone: RcloneServer) -> None:
    filesystem = fsspec.filesystem("s3", **{**rclone.storage_options(), "secret": "wrong"})
    with pytest.raises(PermissionError):
        filesystem.pipe_file(f"{rclone.bucket}/x", b"")


def test_a_stopped_rclone_is_gone_with_its_files() -> None:
    server = RcloneServer().start()
    assert server._process is not None
    process, folder = os.pidfd_open(server._process.pid), server.folder
    assert folder.is_dir()
    server.stop()
    server.stop()
    with contextlib.closing(os.fdopen(process)):
        ended, _, _ = select.select([process], [], [], 30)
    assert ended
    assert not folder.parent.parent.exists()
    with pytest.raises(RuntimeError):
        _ = server.endpoint_url


def test_a_stopped_ftp_server_is_gone_with_its_files() -> None:
    with FtpServer() as server:
        folder, url, options = server.folder, server.base_url, server.storage_options()
        filesystem: Any
        filesystem, path = fsspec.core.url_to_fs(f"{url}/file", **options)
        filesystem.pipe_file(path, b"data")
        assert (folder / "file").read_bytes() == b"data"
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        fsspec.core.url_to_fs(f"{url}/file", **options, timeout=5)
