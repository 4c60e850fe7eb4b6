"""From the url that a user names to the checkpoint that is meant."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.folder import read_record
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.errors import CheckpointNotFoundError, ConfigurationError, UncommittedCheckpointError
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.tools.listing import kind_of, number_of


@dataclass(frozen=True)
class Located:
    """A checkpoint.

    Attributes:
        store: Its folder.
        components: The DCP checkpoints that it consists of, by name; one without a name is the folder itself.
        incomplete: Names of folders in it that are no complete component.
        iteration: The training iteration, where the name of the folder says it.
        record: Its commit record, if it has one.
        notes: What the user should know about how it was found.
    """

    store: Store
    components: Mapping[str, Store]
    incomplete: tuple[str, ...] = ()
    iteration: int | None = None
    record: CommitRecord | None = None
    notes: tuple[str, ...] = field(default=())

    def component(self, name: str) -> Store:
        """Return the folder of one component; of a checkpoint that is a single one, that.

        Raises:
            CheckpointNotFoundError: it has no such component.
        """
        if "" in self.components:
            return self.components[""]
        if name not in self.components:
            state = "incomplete" if name in self.incomplete else "missing"
            raise CheckpointNotFoundError(
                f"{self.store.url}: the component {name!r} is {state}; it has {', '.join(self.components) or 'none'}"
            )
        return self.components[name]


def locate(store: Store) -> Located:
    """Return the checkpoint at a folder: one DCP checkpoint, an iteration, or the latest one of a job's folder.

    Raises:
        CheckpointNotFoundError: there is none.
        UncommittedCheckpointError: what is there was never completed.
        StorageReadError: the store did not answer.
    """
    entries = store.list_folder()
    name = store.url.rpartition("/")[2]
    kind = kind_of(name, entries)
    if not entries:
        raise CheckpointNotFoundError(f"there is nothing at {store.url}, or no such folder or bucket")
    if kind == "component":
        return Located(store, {"": store}, iteration=number_of(name))
    if kind == "iteration":
        return _iteration(store)
    return _latest_below(store, entries)


def _iteration(store: Store, notes: tuple[str, ...] = ()) -> Located:
    files = store.list_files()
    folders = sorted({name.partition("/")[0] for name in files if "/" in name})
    complete = [name for name in folders if f"{name}/{metadata.FILE_NAME}" in files]
    iteration = number_of(store.url.rpartition("/")[2])
    if metadata.FILE_NAME in files:
        return Located(store, {"": store}, (), iteration, None, notes)
    if not complete:
        raise UncommittedCheckpointError(f"{store.url} was never completed: nothing in it has a {metadata.FILE_NAME}")
    record = read_record(store) if layout.COMMIT_NAME in files else None
    incomplete = tuple(name for name in folders if name not in complete)
    return Located(store, {name: store.child(name) for name in complete}, incomplete, iteration, record, notes)


def _latest_below(store: Store, entries: Mapping[str, bool]) -> Located:
    if entries.get(layout.CHECKPOINTS_FOLDER) and layout.POINTER_NAME not in entries:
        store = store.child(layout.CHECKPOINTS_FOLDER)
        entries = store.list_folder()
    catalog = Catalog.of(store)
    found = catalog.latest()
    if found is not None:
        return _iteration(catalog.folder(found.iteration), found.notes)
    steps = {name: number_of(name) for name, is_folder in entries.items() if is_folder}
    for name in sorted((name for name, number in steps.items() if number is not None), key=steps.get, reverse=True):  # type: ignore[arg-type]
        folder = store.child(name)
        if layout.iteration_of(name) is None and folder.exists(metadata.FILE_NAME):
            return Located(
                folder, {"": folder}, iteration=steps[name], notes=(f"{name} is the newest that is complete",)
            )
    if any(entries.values()) or layout.POINTER_NAME in entries:
        raise UncommittedCheckpointError(f"there is neither a checkpoint at {store.url} nor a committed one below it")
    raise CheckpointNotFoundError(f"there is no checkpoint at {store.url}, nor below it")


def check_apart(source: Store, target: Store) -> None:
    """Refuse to write into what is being read.

    Raises:
        ConfigurationError: the two folders are the same, or one lies in the other.
    """
    same_store = source.fs is target.fs or source.fs == target.fs
    one, other = f"{source.root}/", f"{target.root}/"
    if same_store and (one.startswith(other) or other.startswith(one)):
        raise ConfigurationError(f"{target.url} and {source.url} are the same folder, or one lies in the other")
