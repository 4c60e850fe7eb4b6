"""What of a stored component can be loaded into the job's state, decided before any data is read. Pure."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_fsspec.checkpointer.mapping import Renaming, is_replaced_by_ema
from dcp_fsspec.checkpointer.resume import ResumeConfig
from dcp_fsspec.errors import IncompatibleStateError

EXTRA_STATE = "_extra_state"


@dataclasses.dataclass
class ComponentReport:
    """What a load did to one component. Keys are those of the job's state.

    Attributes:
        loaded: Keys whose values come from the checkpoint now.
        missing: Keys that the checkpoint does not have; they keep their values.
        unexpected: Keys that only the checkpoint has; they were not read.
        mismatched: Keys of another shape, with both shapes; skipped, or loaded in part if that was asked for.
        skipped: Keys left out on purpose, such as ``_extra_state``.
        cast: Keys whose stored dtype is wider than the one loaded into, with both dtypes.
        num_bytes: Bytes fetched by this rank.
        seconds: Wall time on this rank.
        num_requests: Calls made to the filesystem by this rank.
    """

    loaded: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)
    skipped: list[str] = dataclasses.field(default_factory=list)
    cast: dict[str, str] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0
    num_requests: int = 0


@dataclasses.dataclass
class Match:
    """What to load of one component.

    Attributes:
        request: By name in the checkpoint: the tensor to load into, or None for a Python value.
        overlapping: Of these, by name in the checkpoint: tensors of another shape, to be loaded where they overlap.
        report: What was found.
        problems: What must not go on.
        may_be_empty: That not one key fits is no error.
    """

    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    overlapping: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    report: ComponentReport = dataclasses.field(default_factory=ComponentReport)
    problems: list[str] = dataclasses.field(default_factory=list)
    may_be_empty: bool = False


def match(
    template: Mapping[str, Any],
    renaming: Renaming,
    metadata: Metadata,
    config: ResumeConfig,
    *,
    strict: bool,
    prefix: str = "",
) -> Match:
    """Compare the state's flat keys with those of the checkpoint.

    Args:
        template: The state to load into, flat.
        renaming: How its keys are called in the checkpoint.
        metadata: The checkpoint's.
        config: How to treat what differs.
        strict: A key that only one side has is a problem.
        prefix: How the component's keys begin, where one checkpoint holds several components.
    """
    result = Match()
    stored = metadata.state_dict_metadata
    for key, value in template.items():
        name = prefix + renaming.to_checkpoint.get(key, key)
        if is_extra_state(key):
            result.report.skipped.append(key)
        elif name not in stored:
            result.report.missing.append(key)
        else:
            _match_one(result, key, name, value, stored[name], config)
    _note_unexpected(result.report, stored, {prefix + renaming.to_checkpoint.get(key, key) for key in template}, prefix)
    if config.load_ema_to_reg:
        asked = set(renaming.to_checkpoint.values())
        regular = [name for name in result.report.unexpected if is_replaced_by_ema(name, asked)]
        result.report.unexpected = [name for name in result.report.unexpected if name not in set(regular)]
        result.report.skipped += regular
    if strict:
        result.problems += [f"{key!r} is missing in the checkpoint" for key in result.report.missing]
        result.problems += [f"{key!r} is in the checkpoint only" for key in result.report.unexpected]
    return result


def is_extra_state(key: str) -> bool:
    """Tell whether `key` is a module's extra state, whose form differs from one run to the next."""
    return key == EXTRA_STATE or key.endswith(f".{EXTRA_STATE}")


def _note_unexpected(report: ComponentReport, stored: Mapping[str, Any], asked: Collection[str], prefix: str) -> None:
    for name in stored:
        if name.startswith(prefix) and name not in asked:
            key = name.removeprefix(prefix)
            (report.skipped if is_extra_state(key) else report.unexpected).append(key)


def _match_one(result: Match, key: str, name: str, value: Any, stored: Any, config: ResumeConfig) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        _match_value(result, key, name, value)
        return
    if not isinstance(value, torch.Tensor):
        result.problems.append(f"{key!r} is a tensor in the checkpoint and {type(value).__name__} here")
        return
    if (problem := _cast_problem(result.report, key, stored.properties.dtype, value.dtype, config)) is not None:
        result.problems.append(problem)
        return
    if tuple(stored.size) == tuple(value.shape):
        result.request[name] = value
        result.report.loaded.append(key)
        return
    shapes = f"{tuple(stored.size)} in the checkpoint, {tuple(value.shape)} here"
    result.report.mismatched[key] = shapes
    if key in config.overlap_keys:
        if len(stored.size) != value.dim():
            result.problems.append(f"{key!r} is {shapes}: shapes of other dimensions do not overlap")
            return
        result.overlapping[name] = value
    elif config.mismatched == "error":
        result.problems.append(f"{key!r} is {shapes}")


def _match_value(result: Match, key: str, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        result.problems.append(f"{key!r} is a Python value in the checkpoint and a tensor here")
        return
    result.request[name] = None
    result.report.loaded.append(key)


def _cast_problem(
    report: ComponentReport, key: str, stored: torch.dtype, here: torch.dtype, config: ResumeConfig
) -> str | None:
    """Note a cast that narrows; return what is wrong with one that would change the meaning of values."""
    if stored == here or _widens(stored, here):
        return None
    casts = f"{_name(stored)} in the checkpoint, {_name(here)} here"
    if not torch.can_cast(stored, here) and not config.allow_lossy_casts:
        return f"{key!r} is {casts}: pass allow_lossy_casts=True to load it all the same"
    report.cast[key] = casts
    return None


def _widens(stored: torch.dtype, here: torch.dtype) -> bool:
    if stored.is_floating_point != here.is_floating_point and not here.is_complex:
        return False
    try:
        return torch.promote_types(stored, here) == here
    except RuntimeError:
        return False  # Some of the small floating-point types are never promoted.


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(matches: Mapping[str, Match], url: str) -> None:
    """Refuse a load that must not go on, before anything was read.

    Raises:
        IncompatibleStateError: it names each problem, up to twenty.
    """
    problems = [f"{name}: {problem}" for name, one in matches.items() for problem in one.problems]
    for name, one in matches.items():
        if not one.request and not one.overlapping and not one.may_be_empty:
            here = ", ".join(map(repr, one.report.missing[:3])) or "none"
            there = ", ".join(map(repr, one.report.unexpected[:3])) or "none"
            problems.append(f"{name}: not one key is the same; here {here} ..., in the checkpoint {there} ...")
    if not problems:
        return
    shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
    raise IncompatibleStateError(
        f"{url} does not fit the state to load it into; nothing was loaded:\n  {shown}\nLoad it with the model that "
        "wrote it, or see strict_resume, mismatched, overlap_keys, key_mapping and keys_not_to_resume of ResumeConfig."
    )
