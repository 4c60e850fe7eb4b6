"""`DistributedCheckpointer`: save and resume a training job. It puts the other modules in order and does nothing else.

::

    save    snapshot (every rank) -> uploader: components, commit record, pointer -> callbacks -> prune
    load    one rank decides -> small files read once -> everything compared -> data -> callbacks
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint.stateful import Stateful

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.checkpointer.background import ThreadUploader
from dcp_fsspec.checkpointer.callbacks import Callbacks
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group
from dcp_fsspec.checkpointer.loading import Loader, LoadReport
from dcp_fsspec.checkpointer.locating import decide, open_store
from dcp_fsspec.checkpointer.mapping import EMA_TO_REGULAR, KeyMapping
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.process import ProcessUploader
from dcp_fsspec.checkpointer.pruning import Pruner
from dcp_fsspec.checkpointer.records import check_user_values
from dcp_fsspec.checkpointer.resume import Decision, ResumeConfig, components_to_load
from dcp_fsspec.checkpointer.retention import RetentionPolicy
from dcp_fsspec.checkpointer.saving import IterationWriter, WriteOptions
from dcp_fsspec.checkpointer.snapshot import Snapshot, flat_state
from dcp_fsspec.checkpointer.state import (
    Component,
    Model,
    ModelComponent,
    Optimizer,
    OptimizerComponent,
    PerRank,
    SchedulerComponent,
    StatefulComponent,
)
from dcp_fsspec.checkpointer.training_state import SchedulerState, TrainerState
from dcp_fsspec.checkpointer.uploading import InlineUploader, Uploader
from dcp_fsspec.checkpointer.verdict import Verdict
from dcp_fsspec.errors import AsyncSaveError, ConfigurationError
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.progress import ProgressWish
from dcp_fsspec.storage.writer import FsspecStorageWriter

logger = logging.getLogger(__name__)

AsyncMode = Literal["disabled", "async", "async_with_pinned_mem"]


class DistributedCheckpointer:
    """Keeps the checkpoints of one training job in one folder of any store.

    Every method is collective unless it says otherwise: all ranks call it, in the same order, from the main thread.

    Args:
        url: Url or path of the job's checkpoints folder.
        storage_options: As in fsspec.
        filesystem: An fsspec filesystem to use instead of one made from `url`.
        resume: What to load when the job starts.
        async_mode: ``"disabled"``: `save` returns when the iteration is committed. ``"async"``: it returns when the
            state is copied to host memory, and a thread uploads. ``"async_with_pinned_mem"``: a process beside each
            rank uploads, which disturbs training less; the memory is pinned where there is a GPU.
        retention: Which iterations stay; None: all.
        callbacks: Objects with some of the hooks of `CheckpointCallback`.
        components: Further parts of the job's state by name; those of which each rank has its own as `PerRank`.
        process_group: The ranks of the job. Default: all of them.
        on_busy: What `save` does while the last upload is still under way: wait for it, or skip this one.
        upload_timeout_seconds: An upload in the background that takes longer is given up, and pruning that does so is
            not waited for.
        overwrite: Allow to replace committed iterations.
        key_mapping: How the model's keys are called in this job's checkpoints; see `KeyMapping`.
        writer_settings: Keyword arguments for `FsspecStorageWriter`, such as ``max_concurrency``.
        reader_settings: Keyword arguments for `FsspecStorageReader`, such as ``trust_pickle``.
        progress: As in `FsspecStorageWriter`, for loads and saves. An upload in the background shows no bar, and in the
            thread or process that uploads a function is called.

    Attributes:
        last_load_report: What the last `load` did on this rank.
        last_outcome: How the last save that ended did so.

    Raises:
        ConfigurationError: an argument that cannot work.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: AbstractFileSystem | None = None,
        resume: ResumeConfig | None = None,
        async_mode: AsyncMode = "disabled",
        retention: RetentionPolicy | None = None,
        callbacks: Sequence[Any] = (),
        components: Mapping[str, Stateful | PerRank] | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        upload_timeout_seconds: float = 3600.0,
        overwrite: bool = False,
        key_mapping: KeyMapping | None = None,
        writer_settings: Mapping[str, Any] | None = None,
        reader_settings: Mapping[str, Any] | None = None,
        progress: ProgressWish = True,
    ) -> None:
        self.catalog = Catalog(url, storage_options=storage_options, filesystem=filesystem)
        self._resume = resume or ResumeConfig()
        self._callbacks = Callbacks(callbacks)
        self._extra = {layout.check_component(name): one for name, one in (components or {}).items()}
        self._mappings = (key_mapping,) if key_mapping is not None else ()
        self._reader_settings = {"progress": progress, **(reader_settings or {})}
        components_to_load(self._resume, self._known, auto_resume=False)
        self._group = Group(process_group)
        self._verdict = Verdict(self.catalog, self._group)
        in_background = async_mode != "disabled" and not callable(progress)
        shown = {"progress": False if in_background else progress}
        options = WriteOptions(overwrite=overwrite, writer={**shown, **(writer_settings or {})})
        self._on_busy = on_busy
        self._async_mode = async_mode
        self._upload_timeout_seconds = upload_timeout_seconds
        self._pid = os.getpid()
        self._uploader = self._make_uploader(options)
        self._pruner = Pruner(self.catalog.copy(), retention, upload_timeout_seconds) if retention is not None else None
        self._gone_back_to: int | None = None
        self._uploading: int | None = None
        self.last_load_report = LoadReport()
        self.last_outcome: Outcome | None = None

    def _make_uploader(self, options: WriteOptions) -> Uploader:
        if self._async_mode not in get_args(AsyncMode) or self._on_busy not in ("wait", "skip"):
            raise ConfigurationError(
                f"async_mode is one of {get_args(AsyncMode)} and on_busy 'wait' or 'skip', got {self._async_mode!r} "
                f"and {self._on_busy!r}"
            )
        if self._upload_timeout_seconds <= 0:
            raise ConfigurationError(f"upload_timeout_seconds is above 0, got {self._upload_timeout_seconds!r}")
        # What is wrong with them should show here, not in the first save.
        FsspecStorageWriter.at(self.catalog.store, **{"overwrite": False, **options.writer})
        timeout_seconds = self._upload_timeout_seconds
        if self._async_mode == "async":
            return ThreadUploader(self.catalog, self._group, options, timeout_seconds)
        if self._async_mode == "async_with_pinned_mem":
            return ProcessUploader(self.catalog, self._group, options, timeout_seconds)
        return InlineUploader(IterationWriter(self.catalog, self._group, options))

    @property
    def _known(self) -> tuple[str, ...]:
        return (*layout.STANDARD_COMPONENTS, *self._extra)

    # Loading ---------------------------------------------------------------------------------------------

    def load(
        self,
        model: Model | Sequence[Model],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scheduler: Any = None,
        grad_scaler: Any = None,
        *,
        iteration: int | None = None,
    ) -> int:
        """Load what the job should start from, and return the iteration to go on from; 0 for a fresh start.

        The job's own latest iteration if there is one, else what `ResumeConfig` says. Everything is loaded in place.

        Args:
            model: One module, or a list with a common set of keys.
            optimizer: One or many; for a list of models, one for each.
            scheduler: One or many.
            grad_scaler: A ``torch.amp.GradScaler`` or the like.
            iteration: Go back to this one of the job's own iterations. The pointer moves back with the next save.

        Raises:
            IncompatibleStateError: the checkpoint does not fit. Nothing was loaded, unless the message says so.
            CheckpointNotFoundError, UncommittedCheckpointError: what was asked for by name is missing or incomplete.
            ConfigurationError: a component is to be loaded, but no object for it was given.
            CorruptCheckpointError, UnsafeCheckpointError: the checkpoint was refused. Damage may show while data are
                read; then, what was loaded so far stays, and must not be trained on.
            StorageReadError: the store did not answer; likewise.
        """
        self._call_on_all("on_load_checkpoint_start", model)
        decision = self._group.decide(lambda: decide(self.catalog, self._resume, self._known, iteration))
        if self._group.is_coordinator:
            for note in decision.notes:
                logger.log(logging.INFO if decision.location is None else logging.WARNING, "%s", note)
        resumed, url = 0, None
        if decision.location is not None:
            trainer = TrainerState(grad_scaler, None)
            components = self._group.agree(
                lambda: self._components_to_load(decision, model, optimizer, scheduler, trainer), "preparing the load"
            )
            folder = self._folder(decision)
            report, states = self._loader(decision).load(decision, folder, components)
            if layout.SCHEDULER in states and layout.OPTIM not in states:
                SchedulerState(scheduler).set_learning_rates()
            resumed, url = _iteration(decision, trainer, report), folder.url
            report.iteration = resumed
            self._report(report)
            self._call_on_all("on_load_checkpoint", model, state_dict=states)
            torch.cuda.empty_cache()  # Does nothing where CUDA is not in use.
        self._gone_back_to = iteration
        self._call_on_all("on_load_checkpoint_end", model, iteration=resumed, checkpoint_path=url)
        return resumed

    def _call_on_all(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook; if it fails on one rank, the others must not wait for it in the next exchange."""
        self._group.agree(lambda: self._callbacks.call(hook, *args, **kwargs), hook)

    def _folder(self, decision: Decision) -> Store:
        assert decision.location is not None
        if decision.is_auto_resume:
            return self.catalog.store.at(decision.location)
        return open_store(self.catalog, self._resume, decision.location)

    def _loader(self, decision: Decision) -> Loader:
        config = self._resume
        if decision.is_auto_resume:
            # Shapes and casts are forgiven for a warm start if the user says so; what the job wrote itself fits.
            config = dataclasses.replace(config, mismatched="error", overlap_keys=(), allow_lossy_casts=False)
        return Loader(self._group, config, self._reader_settings)

    def _components_to_load(
        self, decision: Decision, model: Any, optimizer: Any, scheduler: Any, trainer: TrainerState
    ) -> dict[str, Component]:
        given = self._components(model, optimizer, scheduler, trainer, warm_start=not decision.is_auto_resume)
        chosen = sorted(decision.components, key=lambda name: (name not in layout.STANDARD_COMPONENTS, name))
        # What the record of the checkpoint does not name was None when it was saved, and may be so again.
        stored = decision.save_ids or chosen
        lacking = [name for name in chosen if name not in given and name in stored]
        if lacking:
            raise ConfigurationError(
                f"{', '.join(lacking)} would be loaded from {self._folder(decision).url}, but load() was given no "
                "object for it. Pass it, or leave it out by keys_not_to_resume (with filter_auto_resume=True if the "
                "checkpoint is the job's own)."
            )
        return {name: given[name] for name in chosen if name in given}

    def _components(
        self, model: Any, optimizer: Any, scheduler: Any, trainer: TrainerState, *, warm_start: bool = False
    ) -> dict[str, Component]:
        mappings = [*self._mappings]
        if warm_start:
            mappings = [self._resume.key_mapping] if self._resume.key_mapping else mappings
            mappings += [EMA_TO_REGULAR] if self._resume.load_ema_to_reg else []
        components: dict[str, Component] = {layout.MODEL: ModelComponent(model, mappings)}
        if optimizer is not None:
            components[layout.OPTIM] = OptimizerComponent(model, optimizer, mappings)
        if scheduler is not None:
            components[layout.SCHEDULER] = SchedulerComponent(scheduler)
        components[layout.TRAINER] = StatefulComponent(trainer)
        for name, one in self._extra.items():
            components[name] = (
                StatefulComponent(one.stateful, self._group.rank)
                if isinstance(one, PerRank)
                else StatefulComponent(one)
            )
        return components

    def _report(self, report: LoadReport) -> None:
        self.last_load_report = report
        if self._group.is_coordinator:
            logger.log(logging.INFO if report.is_complete else logging.WARNING, "%s", report)

    # Saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        model: Model | Sequence[Model],
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scheduler: Any,
        grad_scaler: Any,
        iteration: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_for_staging: bool = True,
    ) -> bool:
        """Save the job's state as `iteration`. Returns False if it was skipped, by the wish of `on_busy`.

        With an upload in the background, how it ends is told by the callbacks, and a failure is raised, at the next
        `save`, `poll`, `wait` or `finalize`.

        Args:
            model: As in `load`.
            optimizer: As in `load`; None: there is none.
            scheduler: As in `load`; None: there is none.
            grad_scaler: As in `load`; None: there is none.
            iteration: The training iteration, from 0 on.
            metrics: Numbers for the commit record, for `KeepBest`. The coordinator's count.
            metadata: JSON values for the commit record. The coordinator's count.
            wait_for_staging: False: return while a GPU still copies. Call `maybe_wait_for_staging` before the
                optimizer's next step.

        Raises:
            AsyncSaveError: an earlier upload failed; nothing was done about `iteration`.
            CheckpointExistsError: the iteration is committed already and `overwrite` is false.
            IncompatibleStateError: a value cannot be saved; nothing was written.
            StorageWriteError: the iteration was not committed; the pointer and older iterations are as they were.
        """
        layout.folder_of(iteration)
        check_user_values(metrics or {}, metadata or {})
        self._check_process()
        if self._on_busy == "skip" and any(self._group.gather(self._uploader.is_busy())):
            logger.warning("iteration %d is not saved: the last upload is still under way", iteration)
            return False
        self._settle()
        end = {"model": None, "iteration": iteration}
        try:
            snapshot = self._group.agree(
                lambda: self._snapshot(model, optimizer, scheduler, grad_scaler, iteration), "collecting the state"
            )
            snapshot.metrics, snapshot.metadata = dict(metrics or {}), dict(metadata or {})
            self._go_back()
            self._uploader.start()
            self._group.agree(lambda: self._uploader.stage(snapshot), "staging the state")
            self._uploading = iteration
            self._uploader.submit(wait_for_staging=wait_for_staging)
            if self._async_mode == "disabled":
                self._settle()
        except BaseException:
            self._callbacks.call("on_save_checkpoint_end", **end)
            raise
        self._call_on_all("on_save_checkpoint_end", **end)
        return True

    def _snapshot(self, model: Any, optimizer: Any, scheduler: Any, grad_scaler: Any, iteration: int) -> Snapshot:
        self._callbacks.call("on_save_checkpoint_start", model, iteration)
        components = self._components(model, optimizer, scheduler, TrainerState(grad_scaler, iteration))
        url = self.catalog.store.url_of(layout.folder_of(iteration))
        states = {name: (one.state(), f"{url}/{name}") for name, one in components.items()}
        self._callbacks.call("on_save_checkpoint", model, state_dict=states)
        return Snapshot(iteration, {name: flat_state(state, name) for name, (state, _) in states.items()})

    def _go_back(self) -> None:
        """Move the pointer back to where the user went back to, before anything newer is replaced."""
        iteration = self._gone_back_to
        if iteration is not None:
            self._group.decide(lambda: self.catalog.advance(iteration, backward=True))
        self._gone_back_to = None

    def maybe_wait_for_staging(self) -> None:
        """Wait until the state may be changed again after a `save` without `wait_for_staging`. Not collective."""
        self._check_process()
        self._uploader.finish_staging()

    def poll(self) -> bool:
        """Tell whether nothing is being uploaded; the callbacks hear of what has ended. Call it once a step.

        Collective, but free when nothing is under way.

        Raises:
            AsyncSaveError: the upload failed.
        """
        self._check_process()
        if self._uploading is None:
            return True
        if any(self._group.gather(self._uploader.is_busy())):
            return False
        self._settle()
        return True

    def _settle(self) -> None:
        """Wait for the upload, agree with all ranks on how it ended, tell the callbacks, and raise its failure."""
        if self._uploading is not None:
            outcome = self._take_outcome()
            if self._async_mode != "disabled":
                outcome = self._verdict.agreed(outcome)
            self._tell(outcome, self._call_on_all)

    def _take_outcome(self) -> Outcome:
        assert self._uploading is not None
        lost = AsyncSaveError(f"the upload of iteration {self._uploading} was lost")
        outcome = self._uploader.wait(None) or Outcome(self._uploading, 0.0, error=lost)
        # Only now: after Ctrl-C while it waited, its memory is still in use.
        self._uploading = None
        return outcome

    def _tell(self, outcome: Outcome, call: Callable[..., None]) -> None:
        self.last_outcome = outcome
        if outcome.error is not None:
            call("on_save_checkpoint_failure", iteration=outcome.iteration, error=outcome.error)
            raise outcome.error
        if self._group.is_coordinator:
            logger.info("%s: %s", self.catalog.url, outcome)
        if self._pruner is not None and self._group.is_coordinator:
            self._pruner.start(protected=[outcome.iteration])
        call("on_save_checkpoint_success", iteration=outcome.iteration, elapsed_time=outcome.seconds)

    def wait(self) -> None:
        """Wait until nothing is being uploaded or pruned.

        Raises:
            AsyncSaveError: the last upload failed.
        """
        self._check_process()
        self._settle()
        if self._pruner is not None:
            self._pruner.wait()

    def finalize(self) -> None:
        """End the checkpointer: wait for what is under way, and end what runs. Not collective; may be called again.

        Raises:
            AsyncSaveError: the last upload failed on this rank.
        """
        if os.getpid() != self._pid:
            return  # A forked copy, such as a data loader's worker, has nothing of its own to end.
        try:
            if self._uploading is not None:
                self._tell(self._verdict.own(self._take_outcome()), self._callbacks.call)
        finally:
            self._uploader.close()
            if self._pruner is not None:
                self._pruner.wait()

    def _check_process(self) -> None:
        if self._async_mode != "disabled" and os.getpid() != self._pid:
            raise ConfigurationError(
                "this checkpointer was made in another process, of which this one is a fork; its uploads run there. "
                "Make one in the process that saves."
            )


def _iteration(decision: Decision, trainer: TrainerState, report: LoadReport) -> int:
    """Return the iteration to go on from."""
    if layout.TRAINER not in decision.components:
        return 0
    if trainer.iteration is None:
        report.notes += (f"the checkpoint's trainer state has no iteration; its folder says {decision.iteration}",)
        return decision.iteration or 0
    if decision.is_auto_resume and decision.iteration not in (None, trainer.iteration):
        report.notes += (f"the folder says iteration {decision.iteration}, the trainer state {trainer.iteration}",)
    return trainer.iteration
