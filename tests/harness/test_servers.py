"""The shipped servers leave nothing behind and keep strangers out."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from dcp_fsspec.testing.servers import SeaweedServer

pytestmark = pytest.mark.server


def test_wrong_secret_is_refused(seaweed: SeaweedServer) -> None:
    options = {**seaweed.storage_options(), "secret": "wrong"}
    with pytest.raises(PermissionError):
        fsspec.filesystem("s3", **options).pipe_file(f"{seaweed.bucket}/x", b"")


def test_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    source = (
        "import os, sys; from dcp_fsspec.testing.servers import SeaweedServer\n"
        "print(SeaweedServer(data_parent=sys.argv[1]).start().pid, flush=True)\n"
        "os._exit(1)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", source, str(tmp_path)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False).stdout
    # A process that nobody has waited for yet counts as ended here.
    with contextlib.suppress(ProcessLookupError):
        ended, _, _ = select.select([os.pidfd_open(int(output))], [], [], 30)
        assert ended
