"""What to load when a job starts: the settings, and the rules that follow from them. Pure; `locating` looks at storage.

A pointer (or, without a usable one, any committed iteration) in the job's own folder means auto-resume: the job goes
on, with everything. Otherwise ``load_path`` means a warm start: a new job begins with parts of another one's state.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.mapping import KeyMapping
from dcp_fsspec.errors import ConfigurationError

Mismatch = Literal["error", "skip"]


@dataclasses.dataclass(frozen=True)
class ResumeConfig:
    """What to load when the job starts.

    All but `strict_resume` and `filter_auto_resume` are about a warm start. A job that finds checkpoints of its own
    goes on from them with all components, whatever is said here.

    Attributes:
        load_path: Url or path of an iteration's folder, of a job's folder or of its checkpoints folder, in any store.
            Empty: no warm start. A single file (``.pt``, ``.safetensors``) is left to the caller.
        load_training_state: Load optimizer, scheduler, trainer and all further components too, and go on counting
            from the checkpoint's iteration.
        only_load_scheduler_state: Without `load_training_state`: load the scheduler beside the model.
        keys_not_to_resume: Names of components to leave out.
        strict_resume: A key that is missing in the checkpoint, or that only the checkpoint has, is an error. Otherwise
            it is reported and logged.
        load_ema_to_reg: Load the averaged weights (``net_ema.``) into the model's regular ones (``net.``).
        filter_auto_resume: Apply `keys_not_to_resume` to auto-resume as well. A job that leaves out its trainer state
            then counts from 0 after each restart.
        load_storage_options: For the store of `load_path`, if not those of the job.
        mismatched: What to do with a tensor of another shape: an error, or skip and report it.
        overlap_keys: Keys of tensors that may have another shape: what overlaps, from index 0 on in each dimension, is
            loaded, and the rest keeps its values. Never for a number of dimensions that differs.
        allow_lossy_casts: Load floating-point values into integers and complex ones into real ones.
        key_mapping: How the model's keys are called in the checkpoint of `load_path`; see `KeyMapping`.

    Raises:
        ConfigurationError: two settings that exclude each other, or a value that cannot work.
    """

    load_path: str = ""
    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    keys_not_to_resume: Sequence[str] = ()
    strict_resume: bool = True
    load_ema_to_reg: bool = False
    filter_auto_resume: bool = False
    load_storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    mismatched: Mismatch = "error"
    overlap_keys: Sequence[str] = ()
    allow_lossy_casts: bool = False
    key_mapping: KeyMapping | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keys_not_to_resume, str) or isinstance(self.overlap_keys, str):
            raise ConfigurationError("keys_not_to_resume and overlap_keys are sequences of names, not one str")
        if self.mismatched not in ("error", "skip"):
            raise ConfigurationError(f"mismatched is 'error' or 'skip', got {self.mismatched!r}")
        if self.load_ema_to_reg and self.load_training_state:
            raise ConfigurationError(
                "load_ema_to_reg starts a new training from averaged weights; the optimizer state of the regular ones, "
                "which load_training_state loads, does not go with them"
            )

    @property
    def is_single_file(self) -> bool:
        """Whether `load_path` names a file that is no distributed checkpoint."""
        return str(self.load_path).endswith((".pt", ".pth", ".safetensors"))


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to load.

    Attributes:
        location: The folder to load from, not for messages; None: nothing, the job starts from scratch.
        components: What to load of it.
        is_auto_resume: It is one of the job's own checkpoints.
        iteration: That of the checkpoint, where its folder's name or its record tells it.
        flat: One DCP checkpoint holds all components.
        save_ids: By component, the save that was committed; empty if other software wrote it.
        notes: What the user should know, for the log.
    """

    location: str | None
    components: tuple[str, ...] = ()
    is_auto_resume: bool = False
    iteration: int | None = None
    flat: bool = False
    save_ids: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def components_to_load(config: ResumeConfig, known: Sequence[str], *, auto_resume: bool) -> tuple[str, ...]:
    """Return which of the `known` components to load, once a checkpoint was found.

    Raises:
        ConfigurationError: `keys_not_to_resume` names one that is not known.
    """
    unknown = sorted(set(config.keys_not_to_resume) - set(known))
    if unknown:
        raise ConfigurationError(f"keys_not_to_resume names {', '.join(unknown)}; known are {', '.join(known)}")
    if auto_resume or config.load_training_state:
        chosen = tuple(known)
    elif config.only_load_scheduler_state:
        chosen = (layout.MODEL, layout.SCHEDULER)
    else:
        chosen = (layout.MODEL,)
    if auto_resume and not config.filter_auto_resume:
        return chosen
    return tuple(name for name in chosen if name not in config.keys_not_to_resume)
