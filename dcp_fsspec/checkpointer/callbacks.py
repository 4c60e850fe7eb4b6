"""The hooks of a checkpointer, and when each is called.

Order in ``load``: start, (load, if a checkpoint was found), end.
Order in ``save``: start, save, then success or failure, then end; with an upload in the background, ``end`` comes when
the snapshot is taken, and success or failure when the upload has ended, in the trainer's main thread.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class CheckpointCallback:
    """Base of callbacks: override what you need. All are called on every rank."""

    def on_load_checkpoint_start(self, model: Any) -> None:
        """First thing in ``load``."""

    def on_load_checkpoint(self, model: Any, state_dict: Mapping[str, Any]) -> None:
        """After all components were loaded; `state_dict` holds what was restored, by component."""

    def on_load_checkpoint_end(self, model: Any, iteration: int, checkpoint_path: str | None) -> None:
        """Last thing in ``load``, also when there was nothing to load."""

    def on_save_checkpoint_start(self, model: Any, iteration: int) -> None:
        """Before the state is collected."""

    def on_save_checkpoint(self, model: Any, state_dict: dict[str, tuple[dict[str, Any], str]]) -> None:
        """Before anything is written. The states in `state_dict` (state, url; by component) may be changed in place."""

    def on_save_checkpoint_success(self, iteration: int, elapsed_time: float) -> None:
        """After the commit, and only then. `elapsed_time` is in seconds and covers the upload."""

    def on_save_checkpoint_failure(self, iteration: int, error: BaseException) -> None:
        """After a save that was not committed."""

    def on_save_checkpoint_end(self, model: Any, iteration: int) -> None:
        """At the end of the part of a save that training waits for. `model` is always None."""


class Callbacks:
    """Calls each callback in turn. One that lacks a hook is passed over."""

    def __init__(self, callbacks: Sequence[Any] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call `hook` of each callback that has it, in order."""
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is not None:
                method(*args, **kwargs)
