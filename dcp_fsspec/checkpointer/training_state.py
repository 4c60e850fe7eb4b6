"""What of a training job is neither model nor optimizer: schedulers, and the trainer's own counters."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from dcp_fsspec.errors import IncompatibleStateError

logger = logging.getLogger(__name__)


class SchedulerState:
    """One learning rate scheduler, or a list of them."""

    def __init__(self, schedulers: Any) -> None:
        self._is_list = isinstance(schedulers, list | tuple)
        self._schedulers: Sequence[Any] = list(schedulers) if self._is_list else [schedulers]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, or those of all by their number."""
        if not self._is_list:
            return dict(self._schedulers[0].state_dict())
        return {str(number): one.state_dict() for number, one in enumerate(self._schedulers)}

    def check(self, state: dict[str, Any]) -> None:
        """Look whether `state` can be loaded.

        Raises:
            IncompatibleStateError: it was made for another number of schedulers or of parameter groups.
        """
        if self._is_list and len(state) != len(self._schedulers):
            raise IncompatibleStateError(
                f"the checkpoint has {len(state)} schedulers, the job has {len(self._schedulers)}; nothing was loaded"
            )
        for scheduler, one in self._pairs(state):
            _check_num_groups(scheduler, one)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each scheduler its state.

        Raises:
            IncompatibleStateError: as `check`; nothing was loaded.
        """
        self.check(state)
        for scheduler, one in self._pairs(state):
            _say_changed_rates(scheduler, one)
            scheduler.load_state_dict(one)

    def _pairs(self, state: dict[str, Any]) -> Iterable[tuple[Any, dict[str, Any]]]:
        states = [state[number] for number in sorted(state, key=int)] if self._is_list else [state]
        return zip(self._schedulers, states, strict=True)

    def set_learning_rates(self) -> None:
        """Put the learning rates that the schedulers arrived at into their optimizers, whose state was not loaded."""
        for scheduler in self._schedulers:
            optimizer, rates = getattr(scheduler, "optimizer", None), getattr(scheduler, "_last_lr", None)
            if optimizer is not None and rates is not None:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate


def _base_lrs(scheduler: Any, state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the stored ones and those here; none if either side does not have them."""
    stored, here = state.get("base_lrs"), getattr(scheduler, "base_lrs", None)
    return (stored, here) if isinstance(stored, list) and isinstance(here, list) else ([], [])


def _check_num_groups(scheduler: Any, state: dict[str, Any]) -> None:
    stored, here = _base_lrs(scheduler, state)
    if len(stored) != len(here):
        raise IncompatibleStateError(
            f"the checkpoint's scheduler has {len(stored)} parameter groups (base_lrs {stored}), this one {len(here)}; "
            "nothing was loaded. Leave the scheduler out by keys_not_to_resume, or use as many groups."
        )


def _say_changed_rates(scheduler: Any, state: dict[str, Any]) -> None:
    stored, here = _base_lrs(scheduler, state)
    if list(map(float, stored)) != list(map(float, here)):
        logger.warning(
            "the scheduler goes on with the checkpoint's base_lrs %s, not with the configured %s", stored, here
        )


class TrainerState:
    """The iteration, and the state of the gradient scaler if there is one.

    Attributes:
        iteration: What `load_state_dict` found, or what is to be saved; None if the checkpoint does not say.
    """

    def __init__(self, grad_scaler: Any, iteration: int | None) -> None:
        self._grad_scaler = grad_scaler
        self.iteration = iteration

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        state: dict[str, Any] = {}
        if self._grad_scaler is not None:
            state["grad_scaler"] = self._grad_scaler.state_dict()
        return {**state, "iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler, and note the iteration."""
        iteration = state.get("iteration")
        self.iteration = int(iteration) if iteration is not None else None
        stored = state.get("grad_scaler")
        if self._grad_scaler is None:
            if stored:
                logger.warning("the checkpoint has the state of a gradient scaler, the job has none; it is left out")
        elif stored:
            self._grad_scaler.load_state_dict(stored)
        elif self._grad_scaler.is_enabled():
            logger.warning(
                "the checkpoint has no gradient scaler state (it was disabled when it was saved); the scaler starts "
                "with its initial scale"
            )
