"""The conformance checks, each a function of a `Target`. It returns when the store passes.

It raises `NotApplicableError` when it has nothing to say about the store; every other exception is a failure.
"""

import errno
import functools
import io
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_fsspec.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageWriteError,
)
from dcp_fsspec.storage.capabilities import capabilities_of
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.testing.faults import Fail, Flip, Truncate
from dcp_fsspec.testing.target import (
    ConformanceError,
    Target,
    blank,
    failure_of,
    is_local_path,
    not_applicable,
    require,
    require_failure,
    require_same,
)

Check = Callable[[Target], None]

_SMALL_SHARDS = 64 << 10
_EXTRA_FILES = {".metadata", "checksums.json"}
_MAX_READ_RATIO = 1.05
AWKWARD_NAMES = ("a b+c=ä☃", "a[b]c", "a*c", "a?c", "a#c", "a%41c", "{a,b}")
"""Names that a shell, a url, a glob or an ASCII codec would read otherwise than they stand."""


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def _state(seed: int = 0) -> dict[str, Any]:
    base = _random(12, 8, seed=seed)
    return {
        "model": {
            "weight": base,
            "transposed": _random(5, 3, seed=seed + 1).t(),
            "slice": base[2:4],
            "half": _random(7, 6, seed=seed + 2, dtype=torch.bfloat16),
            "scalar": torch.tensor(seed, dtype=torch.int64),
            "empty": torch.zeros(0, 4),
            "flags": torch.tensor([True, False, True]),
        },
        "step": seed,
        "text": f"naïve ☃ {seed}",
        "lr": 0.1 * seed,
    }


def _shards(seed: int = 0, num: int = 6) -> dict[str, Any]:
    """Return a state that fills one small shard file with each tensor."""
    return {f"w{number}": _random(_SMALL_SHARDS // 4, seed=100 * seed + number) for number in range(num)}


def round_trip(target: Target) -> None:
    """What is loaded is what was saved, bit for bit."""
    state = _state()
    target.save("run", state)
    require_same(target.load("run", state), state)


def stock_files_land(target: Target) -> None:
    """A first save leaves exactly the stock files, and each item can be read from them without this package."""
    state = _shards(num=3)
    target.save("run", state, shard_bytes=_SMALL_SHARDS)
    files = target.raw_list("run")
    shard_files = {name for name in files if name.endswith(".distcp")}
    require(set(files) - shard_files == _EXTRA_FILES, f"the folder holds {sorted(files)}")
    wanted = {f"__0_{number}.distcp" for number in range(len(shard_files))}
    require(len(shard_files) >= 3 and shard_files == wanted, f"the shard files are {sorted(shard_files)}")
    metadata: Metadata = pickle.loads(target.raw_read("run/.metadata"))
    contents = {name: target.raw_read(f"run/{name}") for name in shard_files}
    for name, content in contents.items():
        require(len(content) == files[name], f"{name} is listed with {files[name]} bytes and has {len(content)}")
    for fqn, tensor in state.items():
        require_same(_assembled(metadata, contents, fqn), tensor, fqn)


def _assembled(metadata: Metadata, contents: Mapping[str, bytes], fqn: str) -> torch.Tensor:
    record = metadata.state_dict_metadata[fqn]
    if not isinstance(record, TensorStorageMetadata):
        raise ConformanceError(f"{fqn} is not recorded as a tensor")
    whole = torch.zeros(record.size, dtype=record.properties.dtype)
    for chunk in record.chunks:
        place = metadata.storage_data[MetadataIndex(fqn, chunk.offsets)]
        frame = contents[place.relative_path][place.offset : place.offset + place.length]
        part = torch.load(io.BytesIO(frame), weights_only=True)
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = part
    return whole


def stock_reader_reads_it(target: Target) -> None:
    """PyTorch's own reader loads what this package wrote."""
    state = {**_shards(num=2), **_state()}
    target.save("run", state, shard_bytes=_SMALL_SHARDS)
    loaded = blank(state)
    load(loaded, storage_reader=_stock(target, "run", FsspecReader, FileSystemReader))
    require_same(loaded, state)


def stock_writer_is_read(target: Target) -> None:
    """This package loads what PyTorch's own writer wrote."""
    state = {**_shards(num=2), **_state()}
    failure = failure_of(lambda: save(state, storage_writer=_stock(target, "run", FsspecWriter, FileSystemWriter)))
    if failure is not None:
        not_applicable(f"stock PyTorch cannot write here: {_brief(failure)}")
    failure = failure_of(lambda: require_same(target.load("run", state), state))
    if failure is None:
        return
    loaded = blank(state)
    stock_failure = failure_of(
        lambda: load(loaded, storage_reader=_stock(target, "run", FsspecReader, FileSystemReader))
    )
    if stock_failure is not None:
        not_applicable(f"stock PyTorch cannot read what it has written here: {_brief(stock_failure)}")
    raise failure


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _stock(target: Target, name: str, remote: Callable[..., Any], local: Callable[..., Any]) -> Any:
    url = target.below(name)
    if is_local_path(url) and target.filesystem is None:
        return local(url)
    if target.filesystem is None and "::" not in url:
        return remote(url, **(target.storage_options or {}))
    # The stock classes take urls only, and chained ones hardly; what they do with the filesystem stays their own.
    stock = remote("memory://")
    stock.fs.fs, stock.path = target.raw(name)
    return stock


def overwrite_replaces(target: Target) -> None:
    """A save over a checkpoint replaces it, leaves none of its files, and keeps the checkpoint loadable."""
    old, new = _shards(1, num=5), _shards(2, num=2)
    target.save("run", old, shard_bytes=_SMALL_SHARDS)
    old_files = set(target.raw_list("run")) - {".metadata"}
    target.save("run", new, shard_bytes=_SMALL_SHARDS)
    files = set(target.raw_list("run")) - {".metadata"}
    referred = {info.relative_path for info in pickle.loads(target.raw_read("run/.metadata")).storage_data.values()}
    require(not files & old_files, f"files of the old checkpoint are there: {sorted(files & old_files)}")
    others = files - referred
    require(
        referred <= files and len(others) == 1 and others.pop().startswith("checksums"),
        f".metadata names {sorted(referred)}, beside it there is {sorted(files)}",
    )
    require_same(target.load("run", new), new)


def overwrite_refused(target: Target) -> None:
    """With overwrite=False the checkpoint that stands there stays as it is, byte for byte."""
    target.save("run", _shards(1, num=2), overwrite=False, shard_bytes=_SMALL_SHARDS)
    before = _snapshot(target, "run")
    again = target.writer("run", overwrite=False)
    require_failure(
        CheckpointExistsError,
        "saving over a checkpoint with overwrite=False",
        lambda: save(_shards(2), storage_writer=again),
    )
    require(_snapshot(target, "run") == before, "the refused save has changed the folder")


def _snapshot(target: Target, name: str) -> dict[str, bytes]:
    return {file: target.raw_read(f"{name}/{file}") for file in target.raw_list(name)}


def overwritten_by_another(target: Target) -> None:
    """A reader that has read a checkpoint before sees the one by which another process has replaced it."""
    reader = target.reader("run")
    for seed in (1, 2, 3):
        state = {**_state(seed), "grows": _random(1000 * seed, seed=seed)}
        target.afresh().save("run", state)
        loaded = blank(state)
        load(loaded, storage_reader=reader)
        require_same(loaded, state)


def ranges_are_exact(target: Target) -> None:
    """Reading a range gives the bytes of the range and no others; one beyond the end is an error."""
    content = _random(100_003, dtype=torch.uint8, seed=7).numpy().tobytes()
    store = Store(target.url, target.storage_options, target.filesystem)
    store.prepare()
    fs, path = target.raw("file")
    fs.pipe_file(path, content)
    size = len(content)
    for start, stop in ((0, 1), (0, size), (1, 2), (65_535, 65_537), (size - 1, size), (50, 50), (99, 99_999)):
        got = bytes(store.read_range("file", start, stop))
        require(got == content[start:stop], f"bytes {start} to {stop}: got {len(got)} bytes, not those asked for")
    for start, stop in ((size - 1, size + 1), (size, size + 5), (size + 10, size + 11)):
        what = f"reading bytes {start} to {stop} of a file of {size}"
        require_failure(CorruptCheckpointError, what, functools.partial(store.read_range, "file", start, stop))


def partial_load_is_lean(target: Target) -> None:
    """Loading two of eight tensors fetches hardly more than those two."""
    state = {f"w{number}": _random(64, 1024, seed=number) for number in range(8)}
    target.save("run", state)
    some = {name: state[name] for name in ("w1", "w5")}
    fs, watched = target.faulty()
    require_same(watched.load("run", some), some)
    fetched, needed = fs.num_bytes("cat_file", "*.distcp"), sum(tensor.nbytes for tensor in some.values())
    if fetched > _MAX_READ_RATIO * needed and _ignores_ranges(target):
        not_applicable("the filesystem returns whole files whatever range is asked for")
    require(fetched <= _MAX_READ_RATIO * needed, f"{fetched} bytes were fetched for {needed}")


def _ignores_ranges(target: Target) -> bool:
    fs, path = target.raw("run/.metadata")
    return len(fs.cat_file(path, start=1, end=3)) != 2


def failed_write_leaves_nothing(target: Target) -> None:
    """When the store breaks off in a shard file, no file is left, and what stood there before is whole."""
    _fail_and_compare(target, {})
    target.save("run", _shards(1), shard_bytes=_SMALL_SHARDS)
    _fail_and_compare(target, _snapshot(target, "run"))
    require_same(target.load("run", _shards(1)), _shards(1))


def _fail_and_compare(target: Target, wanted: Mapping[str, bytes]) -> None:
    fs, broken = target.faulty()
    full = OSError(errno.ENOSPC, "no space left")
    # Half a file is what only a store can leave behind that does not take files whole.
    fs.inject(
        "pipe_file", Fail(full) if capabilities_of(fs).atomic_put else Truncate(error=full), path="*.distcp", nth=3
    )
    call = functools.partial(broken.save, "run", _shards(2), shard_bytes=_SMALL_SHARDS)
    require_failure(StorageWriteError, "a save of which the third shard file cannot be written", call)
    left = target.raw_list("run")
    require(set(left) == set(wanted), f"the failed save leaves {sorted(left)}, before it there was {sorted(wanted)}")
    require(_snapshot(target, "run") == wanted, "the failed save has changed files of the checkpoint before it")


def failed_commit_changes_nothing(target: Target) -> None:
    """When ``.metadata`` cannot be written, the old checkpoint stays the one that is loaded; the next save succeeds."""
    old, new = _shards(1, num=2), _shards(2, num=3)
    target.save("run", old, shard_bytes=_SMALL_SHARDS)
    fs, broken = target.faulty()
    fs.inject("pipe_file", Fail(OSError(errno.ENOSPC, "no space left")), path="*/.metadata*", times=None)
    call = functools.partial(broken.save, "run", new, shard_bytes=_SMALL_SHARDS)
    require_failure(StorageWriteError, "a save whose .metadata cannot be written", call)
    require(".metadata" in target.raw_list("run"), "the failed commit has removed .metadata")
    require_same(target.load("run", old), old)
    target.save("run", new, shard_bytes=_SMALL_SHARDS)
    require_same(target.load("run", new), new)


def damage_is_noticed(target: Target) -> None:
    """One wrong bit in what the store delivers is an error, not a wrong tensor."""
    state = _shards(num=2)
    target.save("run", state)
    fs, broken = target.faulty()
    fs.inject("cat_file", Flip(), path="*.distcp", times=None)
    require_failure(CorruptCheckpointError, "loading damaged bytes", lambda: broken.load("run", state))


def missing_checkpoint_is_said(target: Target) -> None:
    """Loading where there is nothing says so, and makes nothing."""
    for name in ("nowhere", "not/yet/there"):
        call = functools.partial(target.load, name, _state())
        require_failure(CheckpointNotFoundError, "loading where no checkpoint is", call)
    require(not target.raw_list(), f"loading has made {sorted(target.raw_list())}")


def awkward_names_are_literal(target: Target) -> None:
    """Names mean what they say: no pattern, no escape, no query."""
    names = [name for name in AWKWARD_NAMES if not set(name) & set(target.forbidden)]
    for number, name in enumerate(names):
        target.save(name, _state(number))
    found = {name.partition("/")[0] for name in target.raw_list()}
    require(found == set(names), f"wanted the folders {sorted(names)}, got {sorted(found)}")
    for number, name in enumerate(names):
        require_same(target.load(name, _state(number)), _state(number), name)


def neighbours_are_left_alone(target: Target) -> None:
    """Saving over a checkpoint touches none whose name a pattern or a prefix would take for the same."""
    awkward = [name for name in ("a*", "a?", "a[b]") if not set(name) & set(target.forbidden)]
    neighbours = ("a", "aa", "ab", "a/deeper")
    for number, name in enumerate((*neighbours, *awkward)):
        target.save(name, _shards(number, num=1))
    before = {name: _snapshot(target, name) for name in neighbours[1:]}
    for name in ("a", *awkward):
        target.save(name, _shards(9, num=1))
    for name, content in before.items():
        require(_snapshot(target, name) == content, f"{name} was changed by saving over a neighbour")


def slashes_make_no_difference(target: Target) -> None:
    """A slash too many in the url means the same checkpoint."""
    state = _state()
    target.save("deep//run/", state)
    files = set(target.raw_list())
    wanted = {f"deep/run/{name}" for name in ("__0_0.distcp", *_EXTRA_FILES)}
    require(files == wanted, f"got {sorted(files)}")
    for name in ("deep/run", "deep/run/", "deep//run", "/deep/run//"):
        require_same(target.load(name, state), state, name)


def many_threads_at_once(target: Target) -> None:
    """Many small files written and read by many threads arrive where they belong."""
    state = _shards(num=40)
    target.save("run", state, shard_bytes=_SMALL_SHARDS, max_concurrency=16)
    require_same(target.load("run", state, max_concurrency=16), state)


def large_tensors_in_small_shards(target: Target) -> None:
    """A tensor much larger than a shard file is cut, along whatever dimension, and put together again."""
    state = {"rows": _random(2304, 1024, seed=1), "one_row": _random(1, 1_200_001, seed=2)}
    target.save("run", state, shard_bytes=1 << 20)
    sizes = [size for name, size in target.raw_list("run").items() if name.endswith(".distcp")]
    require(len(sizes) >= 12 and max(sizes) < 2 << 20, f"the shard files have {sorted(sizes)} bytes")
    require_same(target.load("run", state), state)


def empty_state(target: Target) -> None:
    """A state without anything in it is a checkpoint too."""
    target.save("run", {})
    files = set(target.raw_list("run"))
    require(files == _EXTRA_FILES, f"the folder holds {sorted(files)}")
    require_same(target.load("run", {}), {})


def pickled_copies_work(target: Target) -> None:
    """A writer and a reader that were sent to another process work there."""
    try:
        pickle.dumps(target.filesystem)
    except Exception as error:
        not_applicable(f"the filesystem itself cannot be pickled: {error}")
    state = _state()
    save(state, storage_writer=pickle.loads(pickle.dumps(target.writer("run"))))
    loaded = blank(state)
    load(loaded, storage_reader=pickle.loads(pickle.dumps(target.reader("run"))))
    require_same(loaded, state)


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        round_trip,
        stock_files_land,
        stock_reader_reads_it,
        stock_writer_is_read,
        overwrite_replaces,
        overwrite_refused,
        overwritten_by_another,
        ranges_are_exact,
        partial_load_is_lean,
        failed_write_leaves_nothing,
        failed_commit_changes_nothing,
        damage_is_noticed,
        missing_checkpoint_is_said,
        awkward_names_are_literal,
        neighbours_are_left_alone,
        slashes_make_no_difference,
        many_threads_at_once,
        large_tensors_in_small_shards,
        empty_state,
        pickled_copies_work,
    )
}
"""All checks by their names."""
