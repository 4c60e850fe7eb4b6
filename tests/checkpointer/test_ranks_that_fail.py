"""A checkpointer on several ranks: one decides, one reads, all hear of each failure, each keeps its own state."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_fsspec import Catalog, CheckpointNotFoundError, DistributedCheckpointer, PerRank, ResumeConfig
from support.faultproxy import FaultProxy
from support.ranks import RankPool, values
from support.stores import S3Store
from support.tensors import assert_bits_equal, random_tensor
from support.training import Job, Raising, assert_same, make_job
from support.worlds import world

pytestmark = pytest.mark.distributed

Failures = dict[str, tuple[str, str]]


@contextlib.contextmanager
def _failing(name: str, failures: Failures) -> Iterator[None]:
    """Expect an error on this rank and note it; afterwards the ranks can talk to each other."""
    try:
        yield
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        failures[name] = type(error).__name__, text
    else:
        failures[name] = "", "it went well"
    dist.barrier()


class _Unwilling:
    """A component whose state cannot be taken, or put back, on one rank."""

    def __init__(self, *, get: bool = False, put: bool = False) -> None:
        self.get, self.put = get, put

    def state_dict(self) -> dict[str, Any]:
        if self.get:
            raise OverflowError("no state today")
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.put:
            raise OverflowError("no loading today")


def _fail_in_turn(rank: int, folder: str) -> tuple[Failures, list[int]]:
    failures: Failures = {}
    job = make_job(num_steps=1)
    url = f"{folder}/job"
    DistributedCheckpointer(url).save(*job.parts, 10)

    checkpointer = DistributedCheckpointer(url, components={"x": _Unwilling(get=rank == 1)})
    with _failing("state", failures):
        checkpointer.save(*job.parts, 20)
    unpicklable = _Unwilling()
    unpicklable.state_dict = lambda: {"bad": (lambda: 0) if rank == 1 else 1}  # type: ignore[method-assign]
    with _failing("pickle", failures):
        DistributedCheckpointer(url, components={"x": unpicklable}).save(*job.parts, 20)
    hooks = [Raising("on_save_checkpoint", KeyError("my callback"))] if rank == 1 else []
    with _failing("callback", failures):
        DistributedCheckpointer(url, callbacks=hooks).save(*job.parts, 20)
    for hook in ("on_load_checkpoint_start", "on_load_checkpoint", "on_load_checkpoint_end"):
        hooks = [Raising(hook, KeyError("my callback"))] if rank == 1 else []
        with _failing(hook, failures):
            DistributedCheckpointer(url, callbacks=hooks).load(*job.parts)
    with _failing("put", failures):
        both = DistributedCheckpointer(url, components={"x": _Unwilling(put=rank == 1)})
        both.save(*job.parts, 15)
        both.load(*job.parts)
    with _failing("None", failures):
        DistributedCheckpointer(url).load(job.model, None if rank == 1 else job.optimizer, job.scheduler)
    # The group, and the folder, are as usable as before.
    DistributedCheckpointer(url).save(*job.train(1).parts, 20)
    fresh = make_job(seed=1)
    assert DistributedCheckpointer(url).load(*fresh.parts) == 20
    assert_same(fresh, job.state())
    return failures, Catalog(url).iterations()


def test_b33_whatever_fails_on_one_rank_is_raised_on_all_and_nothing_is_committed(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    outcomes = values(two_ranks.run(_fail_in_turn, str(tmp_path), collective_timeout_seconds=40))
    for failures, iterations in outcomes:
        assert iterations == [10, 15, 20]
        for name in ("state", "put"):
            assert failures[name][0] == "OverflowError", failures[name]
            assert "on rank 1" in failures[name][1]
        assert "collecting the state" in failures["state"][1]
        assert f"{tmp_path}/job/iter_000000015/x" in failures["put"][1]
        assert failures["pickle"][0] == "IncompatibleStateError"
        assert re.search(r"rank 1: x: 'bad' is a function that cannot be pickled", failures["pickle"][1])
        for name in ("callback", "on_load_checkpoint_start", "on_load_checkpoint", "on_load_checkpoint_end"):
            assert failures[name][0] == "KeyError", (name, failures[name])
            assert "on rank 1" in failures[name][1]
        assert failures["None"][0] == "ConfigurationError"
        assert "optim would be loaded from" in failures["None"][1]


@contextlib.contextmanager
def _full_disk() -> Iterator[None]:
    """Let the system refuse this process every file of more than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _storage_fails(rank: int, folder: str) -> tuple[Failures, str, list[str]]:
    failures: Failures = {}
    job = make_job(num_steps=1)
    url = f"{folder}/job"
    checkpointer = DistributedCheckpointer(url)
    checkpointer.save(*job.parts, 10)
    with _failing("write", failures), _full_disk() if rank == 1 else contextlib.nullcontext():
        DistributedCheckpointer(url).save(*job.parts, 20)
    left = [path.name for path in Path(url, "iter_000000020").rglob("*") if path.is_file()]
    dist.barrier()
    for name in ("commit.json", "latest_checkpoint.txt"):
        # A folder in the place of the file: what is to be published there cannot be.
        blocked = Path(url, name if "latest" in name else f"iter_000000020/{name}")
        aside = blocked.with_name("aside")
        if rank == 0:
            if blocked.exists():
                blocked.rename(aside)
            (blocked / "occupied").mkdir(parents=True)
        dist.barrier()
        with _failing(name, failures):
            DistributedCheckpointer(url).save(*job.parts, 20)
        if rank == 0:
            shutil.rmtree(blocked)
            if aside.exists():
                aside.rename(blocked)
        dist.barrier()
    pointer = Path(url, "latest_checkpoint.txt").read_text()
    DistributedCheckpointer(url, overwrite=True).save(*job.parts, 20)
    with _failing("load", failures):
        if rank == 0:
            for path in Path(url, "iter_000000020", "optim").glob("__1_*.distcp"):
                path.unlink()
        dist.barrier()
        DistributedCheckpointer(url).load(*make_job(1).parts)
    assert DistributedCheckpointer(url).load(*job.parts, iteration=10) == 10
    return failures, pointer, left


def _one_decides(rank: int, folder: str) -> tuple[int, int, str]:
    """Rank 1 sees a store that lies: no pointer, no folders, no files."""
    job = make_job(num_steps=1)
    url = f"{folder}/job"
    for iteration in (10, 20):
        DistributedCheckpointer(url).save(*job.parts, iteration)
    checkpointer = DistributedCheckpointer(url)
    if rank == 1:
        for method in ("pointer", "iterations", "find", "record"):
            setattr(checkpointer.catalog, method, lambda *_, **__: pytest.fail("rank 1 looked itself"))
    resumed = checkpointer.load(*make_job(1).parts)
    # Save returns on all ranks only after the commit.
    checkpointer.save(*job.parts, 30)
    pointer = Path(url, "latest_checkpoint.txt").read_text().strip()
    missing: Failures = {}
    with _failing("explicit", missing):
        DistributedCheckpointer(f"{folder}/other", resume=ResumeConfig(f"{folder}/typo")).load(*job.parts)
    assert missing["explicit"][0] == CheckpointNotFoundError.__name__
    assert f"there is neither a checkpoint at {folder}/typo nor" in missing["explicit"][1]
    return resumed, Catalog(url).iterations()[-1], pointer


def test_b34_h37_one_rank_decides_for_all(two_ranks: RankPool, tmp_path: Path) -> None:
    assert values(two_ranks.run(_one_decides, str(tmp_path))) == [(20, 30, "iter_000000030")] * 2


class _Own:
    """A state that each rank has its own of."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "w": torch.full((3,), float(len(str(self.value))))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _schedulers(job: Job) -> Any:
    first = torch.optim.lr_scheduler.LinearLR(job.optimizer, total_iters=3)
    second = torch.optim.lr_scheduler.StepLR(job.optimizer, 2)
    return torch.optim.lr_scheduler.SequentialLR(job.optimizer, [first, second], [3])


def _own_state(rank: int, folder: str) -> tuple[Any, Any]:
    job = make_job(num_steps=1)
    job.scheduler = _schedulers(job)
    many = [torch.optim.lr_scheduler.StepLR(job.optimizer, number + 1) for number in range(12)]
    saved = _Own(("rank", rank))
    DistributedCheckpointer(f"{folder}/job", components={"own": PerRank(saved)}).save(*job.parts, 10)
    DistributedCheckpointer(f"{folder}/many").save(job.model, job.optimizer, many, None, 10)
    fresh = make_job(seed=1)
    fresh.scheduler = _schedulers(fresh)
    loaded = _Own(None)
    DistributedCheckpointer(f"{folder}/job", components={"own": PerRank(loaded)}).load(*fresh.parts)
    assert_same(fresh, job.state())
    again = [torch.optim.lr_scheduler.StepLR(fresh.optimizer, 99) for _ in range(12)]
    DistributedCheckpointer(f"{folder}/many").load(fresh.model, fresh.optimizer, again)
    assert [one.step_size for one in again] == list(range(1, 13))

    # One rank, which is another world: it has what was rank 0's.
    with world(rank, 1, f"{folder}/one") as inside:
        alone = _Own("as it was")
        if inside:
            checkpointer = DistributedCheckpointer(f"{folder}/job", components={"own": PerRank(alone)})
            assert checkpointer.load(*fresh.parts) == 10
            checkpointer.save(*fresh.parts, 20)
    return loaded.value, alone.value


def _more_ranks(rank: int, folder: str) -> tuple[Any, list[str]]:
    own = _Own("as it was")
    checkpointer = DistributedCheckpointer(f"{folder}/job", components={"own": PerRank(own)})
    fresh = make_job(seed=1)
    fresh.scheduler = _schedulers(fresh)
    assert checkpointer.load(*fresh.parts) == 20
    return own.value, checkpointer.last_load_report.components["own"].missing


def test_each_rank_keeps_its_own_state_and_a_new_rank_what_it_has(two_ranks: RankPool, tmp_path: Path) -> None:
    outcomes = values(two_ranks.run(_own_state, str(tmp_path)))
    assert [one[0] for one in outcomes] == [("rank", 0), ("rank", 1)]
    assert outcomes[0][1] == ("rank", 0)
    assert values(two_ranks.run(_more_ranks, str(tmp_path))) == [
        (("rank", 0), []),
        ("as it was", ["value", "w"]),
    ]
    names = [path.name for path in tmp_path.rglob("*.distcp")]
    assert all(path.stat().st_size for path in tmp_path.rglob("*.distcp")), "h27: no empty files"
    assert names


class _Spread(torch.nn.Module):
    def __init__(self, mesh: DeviceMesh, full: torch.Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))


def _dtensors(rank: int, folder: str) -> list[str]:
    mesh = DeviceMesh("cpu", torch.arange(2))
    source = random_tensor(5, 3, seed=1)
    DistributedCheckpointer(f"{folder}/job").save(_Spread(mesh, source), None, None, None, 5)
    config = ResumeConfig(f"{folder}/job", overlap_keys=["w"])
    target = torch.full((7, 2), -7.0)
    model = _Spread(mesh, target)
    DistributedCheckpointer(f"{folder}/other", resume=config).load(model)
    assert isinstance(model.w, DTensor)
    wanted = target.clone()
    wanted[:5, :2] = source[:, :2]
    assert_bits_equal(model.w.full_tensor(), wanted)

    # A mesh that does not include this rank: nothing to read, and no key is missing.
    small = DeviceMesh("cpu", torch.arange(1))
    inner = _Spread(small, torch.zeros(5, 3))
    checkpointer = DistributedCheckpointer(f"{folder}/third", resume=ResumeConfig(f"{folder}/job"))
    checkpointer.load(inner)
    if rank == 0:
        assert_bits_equal(inner.w.to_local(), source)
    return checkpointer.last_load_report.components["model"].missing


def test_dtensors_overlap_and_lie_on_some_ranks_only(two_ranks: RankPool, tmp_path: Path) -> None:
    assert values(two_ranks.run(_dtensors, str(tmp_path))) == [[], []]


def _resume(rank: int, url: str, options: dict[str, Any]) -> int:
    return DistributedCheckpointer(url, storage_options=options).load(*make_job(seed=1).parts)


def test_resuming_four_ranks_reads_each_small_file_once_in_all(
    four_ranks: RankPool, proxied_store: S3Store, proxy: FaultProxy
) -> None:
    url, options = proxied_store.below("job"), proxied_store.storage_options
    assert options is not None
    checkpointer = DistributedCheckpointer(url, storage_options=options)
    for iteration in (10, 20):
        checkpointer.save(*make_job(num_steps=1).parts, iteration)
    proxy.clear()
    assert values(four_ranks.run(_resume, url, options)) == [20] * 4
    reads = [one.key.partition("/job/")[2] for one in proxy.log if one.operation in ("GET", "HEAD")]
    small = sorted(name for name in reads if not name.endswith(".distcp"))
    components = ("model", "optim", "scheduler", "trainer")
    checksums = [re.sub(r"checksums_\w+", "checksums", name) for name in small]
    assert sorted(checksums) == sorted(
        [
            "iter_000000020/commit.json",
            "latest_checkpoint.txt",
            *(f"iter_000000020/{name}/.metadata" for name in components),
            *(f"iter_000000020/{name}/checksums.json" for name in components),
        ]
    )
    assert [one for one in proxy.log if one.operation not in ("GET",)] == []


def test_storage_faults_on_one_rank_are_raised_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    outcomes = values(two_ranks.run(_storage_fails, str(tmp_path), collective_timeout_seconds=40))
    for failures, pointer, left in outcomes:
        assert pointer == "iter_000000010\n"
        assert left == [], "what a failed save has written is removed"
        assert failures["write"][0] == "StorageWriteError"
        assert "on rank 1: " in failures["write"][1], failures
        for name in ("write", "commit.json", "latest_checkpoint.txt"):
            assert failures[name][0] in ("StorageWriteError", "StorageReadError"), failures
            assert f"{tmp_path}/job/" in failures[name][1], failures
            assert name == "write" or name in failures[name][1], failures
        assert failures["load"][0] == "CorruptCheckpointError", failures
        assert "rank 1" in failures["load"][1] or "rank 0" in failures["load"][1]
