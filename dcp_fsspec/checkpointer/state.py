"""The components of a job's state: what each hands to a save, what it asks of a checkpoint, how it takes it back."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from dcp_fsspec.checkpointer import nesting
from dcp_fsspec.checkpointer.mapping import KeyMapping, Renaming, lora_base_layers
from dcp_fsspec.checkpointer.matching import ComponentReport, Match, is_extra_state, match
from dcp_fsspec.checkpointer.resume import ResumeConfig
from dcp_fsspec.checkpointer.training_state import SchedulerState
from dcp_fsspec.errors import ConfigurationError, CorruptCheckpointError, IncompatibleStateError

Model = torch.nn.Module
Optimizer = torch.optim.Optimizer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE, _GROUPS = "state.", "param_groups."


class Component(Protocol):
    """One part of a job's state. Every rank calls the same methods in the same order."""

    def state(self) -> dict[str, Any]:
        """Return what is to be saved; tensors are those of the job, not copies."""
        ...

    def match(self, metadata: Metadata, config: ResumeConfig, *, strict: bool, prefix: str) -> Match:
        """Say what to load of a checkpoint, without reading data or changing anything."""
        ...

    def check(self, loaded: Mapping[str, Any], metadata: Metadata, prefix: str) -> None:
        """Look at values, where not all can be told without them. Changes nothing; most components have no need of it.

        Raises:
            IncompatibleStateError: it does not fit.
        """
        return

    def undo(self) -> None:
        """Take back what `match` had to change. Called when nothing of the component is restored."""
        return

    def restore(self, loaded: Mapping[str, Any], matched: Match, metadata: Metadata, prefix: str) -> dict[str, Any]:
        """Take what was loaded, by name in the checkpoint, and return the state that this makes.

        Raises:
            IncompatibleStateError: it does not fit.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PerRank:
    """Marks a component of which each rank has its own: random number generators, a data loader.

    A checkpoint keeps the state of each rank under the rank's number. A rank that the checkpoint does not know, because
    more ranks load than saved, keeps the state it has, and the report says so.

    Attributes:
        stateful: The rank's own object.
    """

    stateful: Stateful


class ModelComponent(Component):
    """The parameters and buffers of one model, or of a list of models (pipeline stages) under one set of keys.

    Args:
        models: One or many modules.
        mappings: How keys are called in the checkpoint, beyond the naming of layers wrapped for LoRA.

    Raises:
        ConfigurationError: two models have a key in common.
    """

    def __init__(self, models: Model | Sequence[Model], mappings: Iterable[KeyMapping] = ()) -> None:
        self._models = as_list(models)
        self._mappings = (lora_base_layers, *mappings)

    def _parts(self) -> list[dict[str, Any]]:
        parts = [get_model_state_dict(model) for model in self._models]
        _check_clashes(parts, "models")
        return parts

    def _renaming(self, parts: Iterable[Mapping[str, Any]]) -> Renaming:
        return Renaming.of((key for part in parts for key in part), *self._mappings)

    def state(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the checkpoint."""
        parts = self._parts()
        names = self._renaming(parts).to_checkpoint
        return {names[key]: value for part in parts for key, value in part.items()}

    def match(self, metadata: Metadata, config: ResumeConfig, *, strict: bool, prefix: str) -> Match:
        """Ask for each key of the models."""
        parts = self._parts()
        template = {key: value for part in parts for key, value in part.items()}
        return match(template, self._renaming(parts), metadata, config, strict=strict, prefix=prefix)

    def restore(self, loaded: Mapping[str, Any], matched: Match, metadata: Metadata, prefix: str) -> dict[str, Any]:
        """Put the values into the models; most are there already, loaded in place."""
        parts = self._parts()
        names = self._renaming(parts).to_checkpoint
        whole: dict[str, Any] = {}
        for model, part in zip(self._models, parts, strict=True):
            own = {key: loaded[prefix + names[key]] for key in part if prefix + names[key] in loaded}
            result = set_model_state_dict(model, dict(own), options=StateDictOptions(strict=False))
            lost = [key for key in own if key in result.missing_keys and not is_extra_state(key)]
            if lost or result.unexpected_keys:
                raise IncompatibleStateError(f"the model did not take {(lost + result.unexpected_keys)[:5]}")
            whole |= own
        return whole


class OptimizerComponent(Component):
    """The state of one or many optimizers, by the names of the parameters, so that it can be resharded.

    Args:
        models: One model, or a list.
        optimizers: For one model: its optimizers. For a list: one for each model.
        mappings: As for the model.

    Raises:
        ConfigurationError: a list of models without an optimizer for each.
    """

    def __init__(
        self,
        models: Model | Sequence[Model],
        optimizers: Optimizer | Sequence[Optimizer],
        mappings: Iterable[KeyMapping] = (),
    ) -> None:
        all_models, all_optimizers = as_list(models), as_list(optimizers)
        if len(all_models) == 1:
            self._pairs = [(all_models[0], all_optimizers)]
        elif len(all_models) == len(all_optimizers):
            self._pairs = [(model, [one]) for model, one in zip(all_models, all_optimizers, strict=True)]
        else:
            raise ConfigurationError(f"{len(all_models)} models need as many optimizers, got {len(all_optimizers)}")
        self._model = ModelComponent(models, mappings)
        self._mappings = tuple(mappings)
        self._made_up: list[Optimizer] = []

    def _parts(self) -> list[dict[str, Any]]:
        parts = [get_optimizer_state_dict(model, optimizers, options=_FLAT) for model, optimizers in self._pairs]
        _check_clashes(parts, "optimizers")
        return parts

    def _renaming(self, parts: Iterable[Mapping[str, Any]]) -> Renaming:
        """Rename the parameter in each key: ``state.<parameter>.<name>``, ``param_groups.<parameter>.<name>``."""
        keys = [key for part in parts for key in part]
        parameters = self._model._renaming(self._model._parts()).to_checkpoint

        def rename(keys: Iterable[str]) -> dict[str, str]:
            found = {}
            for key in keys:
                section, parameter, name = split_optimizer_key(key, parameters)
                if parameter in parameters:
                    found[key] = f"{section}{parameters[parameter]}.{name}"
            return found

        return Renaming.of(keys, rename)

    def state(self) -> dict[str, Any]:
        """Return state and hyperparameters, flat; hyperparameters alone of an optimizer that has taken no step."""
        fresh = self._fresh()
        parts = self._parts()
        # torch makes up the state of a fresh optimizer, by a step of learning rate 0 that counts as one.
        made_up = self._parameters_of(fresh)
        for one in fresh:
            one.state.clear()
        names = self._renaming(parts).to_checkpoint
        return {
            names[key]: value
            for part in parts
            for key, value in part.items()
            if not (key.startswith(_STATE) and parameter_of(key) in made_up)
        }

    def _fresh(self) -> list[Optimizer]:
        return [one for _, optimizers in self._pairs for one in optimizers if not one.state]

    def _parameters_of(self, optimizers: Sequence[Optimizer]) -> set[str]:
        held = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
        return {
            _own_name(model, name)
            for model, _ in self._pairs
            for name, parameter in model.named_parameters()
            if id(parameter) in held
        }

    def match(self, metadata: Metadata, config: ResumeConfig, *, strict: bool, prefix: str) -> Match:
        """Ask for each key; parameters that never had a gradient and new hyperparameters may be missing."""
        self._made_up = self._made_up or self._fresh()
        parts = self._parts()
        template = {key: value for part in parts for key, value in part.items()}
        result = match(template, self._renaming(parts), metadata, config, strict=False, prefix=prefix)
        result.may_be_empty = not template
        report = result.report
        loaded = {parameter_of(key) for key in report.loaded if key.startswith(_STATE)}
        if strict:
            torn = [key for key in report.missing if key.startswith(_STATE) and parameter_of(key) in loaded]
            result.problems += [f"{key!r} is missing in the checkpoint" for key in torn]
            foreign = [key for key in report.unexpected if key.startswith(_STATE)]
            result.problems += [f"{key!r} is in the checkpoint only" for key in foreign]
        is_fresh = not any(name.startswith(prefix + _STATE) for name in metadata.state_dict_metadata)
        if not loaded and not is_fresh and any(key.startswith(_STATE) for key in template):
            result.problems.append("it holds no state for any parameter of this optimizer")
        return result

    def undo(self) -> None:
        """Take away the state that torch has made up for an optimizer that had none."""
        for one in self._made_up:
            one.state.clear()

    def restore(self, loaded: Mapping[str, Any], matched: Match, metadata: Metadata, prefix: str) -> dict[str, Any]:
        """Put state and hyperparameters into the optimizers; a parameter without stored state begins afresh."""
        with _without_steps(one for _, optimizers in self._pairs for one in optimizers):
            whole = self._restore(loaded, prefix)
        self._forget({parameter_of(key) for key in matched.report.missing if key.startswith(_STATE)}, matched.report)
        return whole

    def _restore(self, loaded: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        parts = self._parts()
        names = self._renaming(parts).to_checkpoint
        whole: dict[str, Any] = {}
        for (model, optimizers), part in zip(self._pairs, parts, strict=True):
            own = {key: loaded.get(prefix + names[key], value) for key, value in part.items()}
            try:
                set_optimizer_state_dict(model, optimizers, dict(own), options=_FLAT)
            except (RuntimeError, KeyError, TypeError, ValueError) as error:
                raise IncompatibleStateError(f"the optimizer did not take the stored state: {error}") from error
            whole |= own
        return whole

    def _forget(self, parameters: set[str], report: ComponentReport) -> None:
        """Drop what was made up for parameters of which nothing is stored."""
        parameters -= {parameter_of(key) for key in report.loaded if key.startswith(_STATE)}
        for model, optimizers in self._pairs if parameters else ():
            for name, parameter in model.named_parameters():
                for one in optimizers:
                    if _own_name(model, name) in parameters and parameter in one.state:
                        del one.state[parameter]


@contextlib.contextmanager
def _without_steps(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Let torch take no more steps to make up state: what has none by now needs none, and a step may write weights."""
    stateless = [(one, vars(one).get("step")) for one in optimizers if not one.state]
    for one, _ in stateless:
        vars(one)["step"] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        for one, step in stateless:
            vars(one).pop("step")
            vars(one).update({"step": step} if step is not None else {})


class StatefulComponent(Component):
    """Python objects with a state: it comes back as it was saved, whatever the object holds now.

    Args:
        stateful: The object.
        rank: For an object of which each rank has its own: this rank.
    """

    def __init__(self, stateful: Stateful, rank: int | None = None) -> None:
        self._stateful = stateful
        self._section = () if rank is None else (f"rank_{rank}",)

    def state(self) -> dict[str, Any]:
        """Return the state, with its outline where DCP would change its form."""
        state = nesting.with_outline(self._stateful.state_dict(), type(self._stateful).__name__)
        return {self._section[0]: state} if self._section else state

    def _start(self, prefix: str) -> str:
        return prefix + "".join(f"{section}." for section in self._section)

    def match(self, metadata: Metadata, config: ResumeConfig, *, strict: bool, prefix: str) -> Match:
        """Ask for all that is stored, into the tensors of the object where they fit."""
        start = self._start(prefix)
        template, _ = nesting.flatten(self._stateful.state_dict(), type(self._stateful).__name__)
        result = Match(may_be_empty=True)
        for name, stored in metadata.state_dict_metadata.items():
            if not name.startswith(start):
                continue
            key = name.removeprefix(start)
            target = None
            if isinstance(stored, TensorStorageMetadata):
                target = _target(key, template.get(key), stored)
            result.request[name] = target
            if key != nesting.OUTLINE_KEY:
                result.report.loaded.append(key)
        found = set(result.report.loaded)
        result.report.missing = [key for key in template if key not in found]
        return result

    def _stored(self, loaded: Mapping[str, Any], metadata: Metadata, prefix: str) -> dict[str, Any] | None:
        start = self._start(prefix)
        data = getattr(metadata, "planner_data", None) or {}
        # In the order in which they were saved: that of `loaded` depends on which rank wrote what.
        names = [name for name in data if name in loaded] + [name for name in loaded if name not in data]
        flat = {name.removeprefix(start): loaded[name] for name in names}
        paths = {name.removeprefix(start): _below(data[name], start) for name in loaded if name in data}
        return nesting.restore(flat, paths) if flat else None

    def restore(self, loaded: Mapping[str, Any], matched: Match, metadata: Metadata, prefix: str) -> dict[str, Any]:
        """Give the object the state that was saved."""
        state = self._stored(loaded, metadata, prefix)
        if state is None:
            return {}
        self._stateful.load_state_dict(state)
        return state


class SchedulerComponent(StatefulComponent):
    """Learning rate schedulers, which may be of another number of parameter groups than those that were saved.

    Args:
        schedulers: One, or a list.
    """

    def __init__(self, schedulers: Any) -> None:
        self._schedulers = SchedulerState(schedulers)
        super().__init__(self._schedulers)

    def check(self, loaded: Mapping[str, Any], metadata: Metadata, prefix: str) -> None:
        """Compare the number of schedulers and of their parameter groups."""
        self._schedulers.check(self._stored(loaded, metadata, prefix) or {})


def _target(key: str, current: Any, stored: TensorStorageMetadata) -> torch.Tensor:
    """Return the tensor to load into: the object's own if it is of the same form, else a new one."""
    if (
        isinstance(current, torch.Tensor)
        and tuple(current.shape) == tuple(stored.size)
        and current.dtype == stored.properties.dtype
    ):
        return current
    try:
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    except RuntimeError as error:
        raise CorruptCheckpointError(f"{key!r} has the absurd shape {tuple(stored.size)}") from error


def _below(path: nesting.Path, start: str) -> nesting.Path:
    """Return the part of `path` that comes after the names in `start`."""
    depth = 0
    while depth < len(path) and len(".".join(map(str, path[:depth]))) < len(start) - 1:
        depth += 1
    return path[depth:]


def as_list(one_or_many: Any) -> list[Any]:
    """Return a list of what is one object or a sequence of such."""
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]


def _own_name(model: Model, name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    wrappers = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    name = ".".join(part for part in name.split(".") if part not in wrappers)
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return name.removeprefix("module.") if is_ddp else name


def parameter_of(key: str) -> str:
    """Return the parameter that a flat key of optimizer state is about."""
    return key.removeprefix(_STATE).removeprefix(_GROUPS).rpartition(".")[0]


def split_optimizer_key(key: str, parameters: Mapping[str, Any]) -> tuple[str, str, str]:
    """Split a flat key of optimizer state into section, parameter and name; the name may have dots of its own."""
    section = _STATE if key.startswith(_STATE) else _GROUPS
    parts = key.removeprefix(section).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        parameter = ".".join(parts[:cut])
        if parameter in parameters:
            return section, parameter, ".".join(parts[cut:])
    return section, ".".join(parts[:-1]), parts[-1]


def _check_clashes(parts: Iterable[Mapping[str, Any]], what: str) -> None:
    counts = collections.Counter(key for part in parts for key in part)
    clashing = [key for key, count in counts.items() if count > 1]
    if clashing:
        raise ConfigurationError(
            f"two of the {what} have the key {clashing[0]!r}"
            + (f" and {len(clashing) - 1} more" * (len(clashing) > 1))
            + "; one of them would be lost. Put them in one module under different names."
        )
