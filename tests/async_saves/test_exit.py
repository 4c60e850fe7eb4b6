"""How a script may end after a save in the background: the checkpoint is complete, or stderr names the lost iteration.

Real scripts, run by Python or by torchrun. The upload takes longer than the script: the store is slow.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcp_fsspec.checkpointer.catalog import Catalog
from support.faultproxy import Delay, FaultProxy, Stall
from support.jobs import BACKGROUND, gone
from support.stores import S3Store
from support.torchrun import torchrun

pytestmark = pytest.mark.slow

# Within it even a busy machine comes to the request that hangs.
_PATIENCE_SECONDS = 12

_SCRIPT = """
import json, os, sys
url, options, mode, ending, timeout_seconds = sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]
import torch
import torch.distributed as dist
from dcp_fsspec import DistributedCheckpointer, KeepLatest
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(3, 3)
checkpointer = DistributedCheckpointer(
    url,
    storage_options=options,
    async_mode=mode,
    upload_timeout_seconds=float(timeout_seconds),
    retention=KeepLatest(1) if ending == "prune" else None,
)
pid = checkpointer._uploader._process.process.pid if mode == "async_with_pinned_mem" else 0
os.write(1, f"worker {pid}\\n".encode())  # In one piece, whatever the other rank does.
if ending == "prune":
    checkpointer.save(model, None, None, None, 6)
    checkpointer.wait()
checkpointer.save(model, None, None, None, 7)
os.write(1, b"saved\\n")
if ending == "exit":
    sys.exit(3)
if ending == "raise":
    raise LookupError("the training failed")
if ending == "hang":
    import time
    time.sleep(1000)
if ending == "group":
    dist.destroy_process_group()
"""


def _arguments(store: S3Store, mode: str, ending: str, timeout_seconds: float) -> list[str]:
    return [store.url, json.dumps(store.storage_options), mode, ending, str(timeout_seconds)]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


def _run(store: S3Store, mode: str, ending: str, timeout_seconds: float = 100.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT, *_arguments(store, mode, ending, timeout_seconds)]
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=120, check=False)


def _workers(output: str) -> list[int]:
    return [int(line.removeprefix("worker ")) for line in output.splitlines() if line.startswith("worker ")]


def _is_complete(store: S3Store) -> bool:
    catalog = Catalog(store.url, storage_options=store.storage_options)
    return catalog.pointee() == 7 and catalog.record(7) is not None


@pytest.mark.parametrize("mode", BACKGROUND)
def test_h15_whatever_way_a_script_ends_its_checkpoint_is_complete(
    mode: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Delay(0.5), operation="PUT", key="*.distcp", times=None)
    for ending, returncode in (("fall off", 0), ("exit", 3), ("raise", 1)):
        ended = _run(proxied_store, mode, ending)
        assert ended.returncode == returncode, ended.stderr
        assert "saved" in ended.stdout
        assert ("LookupError" in ended.stderr) == (ending == "raise")
        assert "NOT saved" not in ended.stderr
        assert _is_complete(proxied_store), ending
        assert all(gone(pid, 0.5) for pid in _workers(ended.stdout) if pid)
        proxied_store.close()


@pytest.mark.parametrize(
    ("mode", "key"), [("async", "*.distcp"), ("async", "*/commit.json"), ("async_with_pinned_mem", "*.distcp")]
)
def test_h15_a_script_that_ends_while_the_store_hangs_ends_in_time_and_names_the_lost_iteration(
    mode: str, key: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key=key, times=None)
    ended = _run(proxied_store, mode, "fall off", _PATIENCE_SECONDS)
    assert stall.arrived.is_set()
    assert ended.returncode == 0, ended.stderr
    assert "iteration 7 was NOT saved" in ended.stderr
    assert "given up" in ended.stderr
    assert all(gone(pid) for pid in _workers(ended.stdout) if pid)
    assert Catalog(proxied_store.url, storage_options=proxied_store.storage_options).pointee() is None


def test_a_script_that_ends_while_a_delete_hangs_ends_in_time(proxied_store: S3Store, proxy: FaultProxy) -> None:
    stall = Stall()
    proxy.add(stall, operation="DELETE", key="*iter_000000006/*", times=None)
    proxy.add(stall, operation="DELETE_MANY", times=None)
    ended = _run(proxied_store, "disabled", "prune", _PATIENCE_SECONDS)
    assert stall.arrived.is_set()
    assert ended.returncode == 0, ended.stderr
    assert "is not waited for any longer" in ended.stderr
    assert _is_complete(proxied_store)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", BACKGROUND)
@pytest.mark.parametrize("ending", ["raise", "group"])
def test_ranks_that_end_without_finalize_leave_the_checkpoint_complete_or_say_that_it_is_lost(
    mode: str, ending: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    proxy.add(Delay(0.5), operation="PUT", key="*.distcp", times=None)
    ended = torchrun(_SCRIPT, *_arguments(proxied_store, mode, ending, 60), num_ranks=2)
    assert ended.output.count("saved\n") == 2, ended.output
    assert ended.returncode == (1 if ending == "raise" else 0), ended.output
    assert all(gone(pid) for pid in _workers(ended.output) if pid)
    assert _is_complete(proxied_store) or "iteration 7 was NOT saved" in ended.output, ended.output
    if mode == "async_with_pinned_mem":
        assert _is_complete(proxied_store), ended.output


@pytest.mark.parametrize("when", ["uploading", "idle"])
def test_a_trainer_killed_leaves_the_iteration_complete_or_absent_and_no_process(
    when: str, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*.distcp" if when == "uploading" else "nothing")
    arguments = _arguments(proxied_store, "async_with_pinned_mem", "hang", 100)
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        (worker,) = _workers(trainer.stdout.readline())
        assert trainer.stdout.readline() == "saved\n"
        if when == "uploading":
            assert stall.arrived.wait(60)
        else:
            _until(lambda: _is_complete(proxied_store))
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        if when == "uploading":
            assert not gone(worker, 0.2)
            stall.released.set()
        assert gone(worker)
    assert _is_complete(proxied_store)


def _until(condition: Any) -> None:
    done = threading.Event()
    while not condition():
        done.wait(0.1)


@pytest.mark.distributed
def test_a_job_killed_in_mid_upload_leaves_no_mixture(
    proxied_store: S3Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    """One rank's trainer and its process are killed; torchrun ends the others."""
    stall = Stall()
    proxy.add(stall, operation="PUT", key="*__1_*.distcp")
    script = _SCRIPT + (
        "\nimport signal, time\n"
        "if dist.get_rank() == 1:\n"
        f"    while not os.path.exists({str(tmp_path / 'arrived')!r}): time.sleep(0.02)\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1000)\n"
    )
    script = script.replace("model = torch.nn.Linear(3, 3)", "model = _Sharded(3, 3)").replace(
        "torch.manual_seed(1)",
        "torch.manual_seed(1)\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "class _Sharded(torch.nn.Linear):\n"
        "    def __init__(self, *sizes):\n"
        "        super().__init__(*sizes)\n"
        "        mesh = init_device_mesh('cpu', (2,))\n"
        "        self.weight = torch.nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))\n",
    )

    def watch() -> None:
        stall.arrived.wait(100)
        (tmp_path / "arrived").touch()

    threading.Thread(target=watch, daemon=True).start()
    ended = torchrun(script, *_arguments(proxied_store, "async_with_pinned_mem", "wait", 60), num_ranks=2)
    assert ended.returncode == 1, ended.output
    assert all(gone(pid) for pid in _workers(ended.output))
    catalog = Catalog(proxied_store.url, storage_options=proxied_store.storage_options)
    assert catalog.pointee() is None
    assert catalog.record(7) is None
    assert proxied_store.raw_list() == {}
    assert not any(psutil.pid_exists(pid) for pid in _workers(ended.output))
