"""Load components of a checkpoint into a job's state: read the small files once, compare everything, then read data."""

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.group import Group, checkpoint_failures, raise_failures
from dcp_fsspec.checkpointer.matching import ComponentReport, Match, check
from dcp_fsspec.checkpointer.resume import Decision, ResumeConfig
from dcp_fsspec.checkpointer.state import Component
from dcp_fsspec.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompatibleStateError
from dcp_fsspec.storage import metadata
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.opened import SmallFiles, read_metadata, read_small_files
from dcp_fsspec.storage.reader import FsspecStorageReader
from dcp_fsspec.storage.report import speed_text

logger = logging.getLogger(__name__)

_SHOWN = 10
_FLAT_SECTIONS = {
    layout.MODEL: ("model.",),
    layout.OPTIM: ("optimizer.", "optim."),
    layout.SCHEDULER: ("lr_scheduler.", "scheduler."),
    layout.TRAINER: ("trainer.", "train_state."),
}
"""How the keys of a component begin where one DCP checkpoint holds all of them (torchtitan, Cosmos-Reason1)."""


@dataclasses.dataclass
class LoadReport:
    """What a load did on this rank.

    Attributes:
        url: The folder it loaded from; None: there was nothing to load.
        iteration: What ``load`` returned.
        is_auto_resume: The job went on from its own checkpoint.
        components: By name.
        notes: What else was noticed.
    """

    url: str | None = None
    iteration: int = 0
    is_auto_resume: bool = False
    components: dict[str, ComponentReport] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """The load on this rank in plain numbers, by name."""
        parts = self.components.values()
        num_bytes, seconds = sum(one.num_bytes for one in parts), sum(one.seconds for one in parts)
        return {
            "seconds": seconds,
            "bytes": num_bytes,
            "bytes_per_second": num_bytes / seconds if seconds else 0.0,
            "requests": sum(one.num_requests for one in parts),
        }

    def __str__(self) -> str:
        """Return a readable block."""
        if self.url is None:
            return "nothing loaded"
        kind = "resumed" if self.is_auto_resume else "warm start"
        lines = [f"{kind} from {self.url} at iteration {self.iteration}"]
        for name, one in self.components.items():
            lines.append(
                f"  {name}: {len(one.loaded)} keys loaded, {speed_text(one.num_bytes, one.seconds)}, "
                f"{one.num_requests} requests"
            )
            lines += _listed("missing in the checkpoint, kept as they are", one.missing)
            lines += _listed("in the checkpoint only", one.unexpected)
            lines += _listed("skipped", one.skipped)
            lines += _listed("of another shape", [f"{key} ({shapes})" for key, shapes in one.mismatched.items()])
            lines += _listed("cast", [f"{key} ({casts})" for key, casts in one.cast.items()])
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    @property
    def is_complete(self) -> bool:
        """Whether every key of the job's state was loaded, as it was stored."""
        return not any(one.missing or one.mismatched or one.cast or one.unexpected for one in self.components.values())


def _listed(what: str, keys: list[str]) -> list[str]:
    if not keys:
        return []
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"    {len(keys)} {what}: {', '.join(keys[:_SHOWN])}{more}"]


@dataclasses.dataclass
class _Opened:
    """A stored component, about to be loaded."""

    store: Store
    files: SmallFiles
    metadata: Metadata
    prefix: str | None
    matched: Match

    @property
    def doing(self) -> str:
        """What is being done with it, for messages."""
        return f"loading {self.store.url}"


class Loader:
    """Loads components. All methods are collective.

    Args:
        group: The ranks.
        config: What may differ.
        settings: Keyword arguments for `FsspecStorageReader`.
    """

    def __init__(self, group: Group, config: ResumeConfig, settings: Mapping[str, Any]) -> None:
        self._group = group
        self._config = config
        self._settings = settings

    def load(self, decision: Decision, folder: Store, components: Mapping[str, Component]) -> tuple[LoadReport, Any]:
        """Load, and return the report and the states that were restored, by component.

        Raises:
            IncompatibleStateError: the checkpoint does not fit; nothing was loaded.
            CheckpointNotFoundError: a component is missing; nothing was loaded.
            CorruptCheckpointError, UnsafeCheckpointError: the checkpoint was refused.
            StorageReadError: the store did not deliver. What was loaded so far stays in the job's state, which must
                not be trained on.
        """
        report = LoadReport(folder.url, is_auto_resume=decision.is_auto_resume, notes=decision.notes)
        files, absent = self._group.decide(lambda: self._read_small_files(decision, folder, components))
        report.notes += tuple(absent)
        strict = self._config.strict_resume
        states: dict[str, Any] = {}
        try:
            opened = self._group.agree(
                lambda: self._match(decision, folder, components, files, strict),
                f"comparing {folder.url} with the state",
            )
            # What cannot be told without its values comes first, before anything has changed.
            loaded = {name: self._read(opened[name]) for name in opened if name == layout.SCHEDULER}
            for name, values in loaded.items():
                self._check(components[name], opened[name], values)
            for name, one in opened.items():
                values = loaded[name] if name in loaded else self._read(one)
                states[name] = self._restore(components[name], one, values, list(states))
                report.components[name] = one.matched.report
        except BaseException:
            for name, component in components.items():
                if name not in states:
                    component.undo()
            raise
        return report, states

    def _read_small_files(
        self, decision: Decision, folder: Store, components: Mapping[str, Component]
    ) -> tuple[dict[str, SmallFiles], list[str]]:
        """Read ``.metadata`` and checksums of each component, on one rank for all."""
        if decision.flat:
            shared = read_small_files(folder)
            return dict.fromkeys(components, shared), []
        files, absent = {}, []
        for name in components:
            store = folder.child(name)
            try:
                files[name] = read_small_files(store)
            except CheckpointNotFoundError as error:
                may_lack = name == layout.TRAINER and not decision.save_ids
                if name == layout.MODEL or (self._config.strict_resume and not may_lack):
                    raise CheckpointNotFoundError(
                        f"{folder.url} has no {name}. Leave it out by keys_not_to_resume, or set strict_resume=False."
                    ) from error
                absent.append(f"{folder.url} has no {name}, which keeps its state")
        return files, absent

    def _match(
        self,
        decision: Decision,
        folder: Store,
        components: Mapping[str, Component],
        files: Mapping[str, SmallFiles],
        strict: bool,
    ) -> dict[str, _Opened]:
        opened = {}
        for name, small in files.items():
            store = folder if decision.flat else folder.child(name)
            dcp_metadata, _ = read_metadata(store, files=small)
            _check_save(dcp_metadata, decision.save_ids.get(name), store)
            candidates = [
                _Opened(
                    store, small, dcp_metadata, prefix, self._match_one(components[name], dcp_metadata, prefix, strict)
                )
                for prefix in (_prefixes_of(name, dcp_metadata) if decision.flat else [None])
            ]
            opened[name] = max(candidates, key=lambda one: len(one.matched.report.loaded))
        check({name: one.matched for name, one in opened.items()}, folder.url)
        return opened

    def _match_one(self, component: Component, dcp_metadata: Metadata, prefix: str | None, strict: bool) -> Match:
        if prefix != "":
            return component.match(dcp_metadata, self._config, strict=strict, prefix=prefix or "")
        # The model's keys have no prefix of their own beside the other components', which must not count as unexpected.
        matched = component.match(dcp_metadata, self._config, strict=False, prefix="")
        matched.report.unexpected = []
        matched.problems += [f"{key!r} is missing in the checkpoint" for key in matched.report.missing if strict]
        return matched

    def _check(self, component: Component, opened: _Opened, values: Mapping[str, Any]) -> None:
        self._group.agree(lambda: component.check(values, opened.metadata, opened.prefix or ""), opened.doing)

    def _restore(
        self, component: Component, opened: _Opened, values: Mapping[str, Any], before: Sequence[str]
    ) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            state: dict[str, Any] = self._group.agree(
                lambda: component.restore(values, opened.matched, opened.metadata, opened.prefix or ""), opened.doing
            )
        except IncompatibleStateError as error:
            if not before:
                raise
            raise IncompatibleStateError(
                f"{error}; {', '.join(before)} of the checkpoint have been loaded already, do not train on that"
            ) from error
        opened.matched.report.seconds += time.monotonic() - begin
        return state

    def _read(self, opened: _Opened) -> dict[str, Any]:
        begin = time.monotonic()
        matched, report = opened.matched, opened.matched.report
        reader = FsspecStorageReader.at(
            opened.store, opened.files, process_group=self._group.process_group, **self._settings
        )
        wholes = {name: _empty_as_stored(opened.metadata, name) for name in matched.overlapping}
        request = {**matched.request, **wholes}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(
                    request,
                    storage_reader=reader,
                    process_group=self._group.process_group,
                    no_dist=not self._group.is_distributed,
                )
            except CheckpointException as error:
                raise_failures(checkpoint_failures(error), opened.doing)
                raise
        for name, whole in wholes.items():
            _copy_overlap(matched.overlapping[name], request.pop(name, whole))
            request[name] = matched.overlapping[name]
        report.num_bytes, report.num_requests = reader.last_report.num_bytes, reader.last_report.num_requests
        report.seconds = time.monotonic() - begin
        return request


def _check_save(dcp_metadata: Metadata, save_id: str | None, store: Store) -> None:
    if save_id is not None and metadata.save_id_of(dcp_metadata) != save_id:
        raise CorruptCheckpointError(
            f"{store.url} is not what was committed: another save has replaced it since. Two jobs may be saving into "
            "one folder. Use an older iteration."
        )


def _prefixes_of(component: str, dcp_metadata: Metadata) -> list[str]:
    """Return how the keys of a component may begin in a checkpoint that holds all of them."""
    known = _FLAT_SECTIONS.get(component, (f"{component}.",))
    found = [prefix for prefix in known if any(map(_begins(prefix), dcp_metadata.state_dict_metadata))]
    if component == layout.MODEL:
        found.append("")
    if not found:
        raise IncompatibleStateError(f"the checkpoint has no keys for {component}; leave it out by keys_not_to_resume")
    return found


def _begins(prefix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix)


def _empty_as_stored(dcp_metadata: Metadata, name: str) -> torch.Tensor:
    stored = dcp_metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


@torch.no_grad()
def _copy_overlap(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy what both have, from index 0 on in each dimension."""
    region = tuple(slice(0, min(here, there)) for here, there in zip(target.shape, source.shape, strict=True))
    if isinstance(target, DTensor):
        whole = target.full_tensor()
        whole[region] = source[region].to(whole.device, whole.dtype)
        spread = distribute_tensor(whole, target.device_mesh, target.placements)
        target.to_local().copy_(spread.to_local())
    else:
        target[region] = source[region].to(target.device, target.dtype)
