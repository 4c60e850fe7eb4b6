"""What a conformance check works on: a folder on the store under test, with ways in that go around the package."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.writer import FsspecStorageWriter
from dcp_fsspec.testing.faults import FaultyFileSystem


class ConformanceError(AssertionError):
    """The store, together with this package, does not do what it must."""


class NotApplicableError(Exception):
    """The check says nothing about this store."""


class Target:
    """A folder on a store for one check, which may write anything below it.

    `raw_list` and `raw_read` look at the store through a plain fsspec instance of its own. A subclass may look in a
    still more independent way, such as the store's own client.

    Args:
        url: Url or path of the folder. It need not exist.
        storage_options: As in fsspec.
        filesystem: An instance to use instead.
        forbidden: Characters that names on this store cannot have.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: AbstractFileSystem | None = None,
        *,
        forbidden: str = "",
    ) -> None:
        self.url = url.rstrip("/")
        self.storage_options = storage_options
        self.filesystem = filesystem
        self.forbidden = forbidden
        self._raw: tuple[AbstractFileSystem, str] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def arguments(self) -> dict[str, Any]:
        """What a storage writer or reader takes beside the url."""
        return {"storage_options": self.storage_options, "filesystem": self.filesystem}

    def below(self, name: str) -> str:
        """Return the url of `name` in the folder."""
        return f"{self.url}/{name}" if name else self.url

    # Through the package ---------------------------------------------------------------------------------

    def writer(self, name: str, **options: Any) -> FsspecStorageWriter:
        """Return a writer for the checkpoint `name`."""
        return FsspecStorageWriter(self.below(name), **{**self.arguments, **options})

    def reader(self, name: str, **options: Any) -> FsspecStorageReader:
        """Return a reader of the checkpoint `name`."""
        return FsspecStorageReader(self.below(name), **{**self.arguments, **options})

    def save(self, name: str, state: dict[str, Any], **options: Any) -> None:
        """Save `state` as the checkpoint `name`."""
        state_dict_saver.save(state, storage_writer=self.writer(name, **options))

    def load(self, name: str, like: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Return what the checkpoint `name` has for the keys of `like`."""
        state: dict[str, Any] = blank(like)
        state_dict_loader.load(state, storage_reader=self.reader(name, **options))
        return state

    def faulty(self) -> "tuple[FaultyFileSystem, Target]":
        """Return the filesystem that the package would use, made fit for faults, and this folder seen through it."""
        store = self._store()
        fs = FaultyFileSystem(store.fs)
        return fs, Target(store.root, filesystem=fs)

    def afresh(self) -> "Target":
        """Return this folder seen through a filesystem of its own, as another process would see it."""
        fs, root = self.raw()
        return Target(root, filesystem=fs)

    def _store(self) -> Store:
        return Store(self.url, self.storage_options, self.filesystem)

    # Around it -------------------------------------------------------------------------------------------

    def raw(self, name: str = "") -> tuple[AbstractFileSystem, str]:
        """Return a filesystem that no writer or reader of this target uses, and the path of `name` on it.

        It is the same one each time, made to forget what it has seen. Where `filesystem` was given it is that one.
        """
        if self._raw is None:
            store = self._store()
            fs = store.fs
            if self.filesystem is None:
                fs = type(fs)(*fs.storage_args, **fs.storage_options, skip_instance_cache=True)
            self._raw = fs, store.root
        fs, root = self._raw
        fs.invalidate_cache()
        return fs, f"{root}/{name}" if name else root

    def raw_list(self, name: str = "") -> dict[str, int]:
        """Return the sizes of all files below `name`, by their names relative to it."""
        fs, folder = self.raw(name)
        try:
            found = fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        prefix = folder.lstrip("/") + "/"
        sizes = {path.lstrip("/"): info["size"] for path, info in found.items() if info["type"] == "file"}
        return {path.removeprefix(prefix): size for path, size in sizes.items() if path.startswith(prefix)}

    def raw_read(self, name: str) -> bytes:
        """Return the content of the file `name` below the folder."""
        fs, path = self.raw(name)
        content: bytes = fs.cat_file(path)
        return content


def require(condition: object, message: str) -> None:
    """Fail the check with `message` unless `condition` holds."""
    if not condition:
        raise ConformanceError(message)


def require_same(got: Any, wanted: Any, path: str = "state") -> None:
    """Compare nested values; tensors by dtype, shape and every bit.

    Raises:
        ConformanceError: names the first place that differs.
    """
    if isinstance(wanted, torch.Tensor):
        require(isinstance(got, torch.Tensor), f"{path}: got a {type(got).__name__}, wanted a tensor")
        kinds = (got.dtype, tuple(got.shape)), (wanted.dtype, tuple(wanted.shape))
        require(kinds[0] == kinds[1], f"{path}: got {kinds[0]}, wanted {kinds[1]}")
        require(_bits(got) == _bits(wanted), f"{path}: the bytes differ")
    elif isinstance(wanted, dict):
        require(set(got) == set(wanted), f"{path}: got the keys {sorted(got)}, wanted {sorted(wanted)}")
        for key, value in wanted.items():
            require_same(got[key], value, f"{path}[{key!r}]")
    else:
        require(type(got) is type(wanted) and got == wanted, f"{path}: got {got!r}, wanted {wanted!r}")


def _bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    content: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


def blank(like: Any) -> Any:
    """Return a state to load into: zeros for tensors, empty values for others."""
    if isinstance(like, torch.Tensor):
        return torch.zeros(like.shape, dtype=like.dtype)
    if isinstance(like, dict):
        return {key: blank(value) for key, value in like.items()}
    return type(like)()


def first_failure(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, out of the exception in which torch gathers them."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def failure_of(call: Callable[[], object]) -> BaseException | None:
    """Return what `call` raises, None if it succeeds."""
    try:
        call()
    except (Exception, CheckpointException) as error:
        return first_failure(error)
    return None


def require_failure(kind: type[Exception], what: str, call: Callable[[], object]) -> BaseException:
    """Require that `call` fails by an error of `kind`, and return it.

    Args:
        kind: The type of the error.
        what: What is being done, for messages.
        call: Does it.
    """
    error = failure_of(call)
    require(error is not None, f"{what} must fail and did not")
    if not isinstance(error, kind):
        raise ConformanceError(f"{what} must raise {kind.__name__}, got {type(error).__name__}: {error}") from error
    return error


def not_applicable(reason: str) -> NoReturn:
    """End the check without a verdict."""
    raise NotApplicableError(reason)


def is_local_path(url: str) -> bool:
    """Tell whether stock PyTorch would take `url` for a local path."""
    return "://" not in url and "::" not in url and os.path.isabs(url)
