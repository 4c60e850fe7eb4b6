"""Let a job that is told to end (SIGTERM, SIGUSR1) finish its step, save, and end by itself."""

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dcp_fsspec.checkpointer.group import Group

_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class PreemptionGuard:
    """Notices signals, and agrees with the other ranks on the step at which to stop.

    ::

        with PreemptionGuard() as guard:
            for iteration in ...:
                train()
                if guard.should_stop():  # on every rank, at the same place
                    checkpointer.save(model, optimizer, scheduler, grad_scaler, iteration)
                    break

    Enter it in the main thread, on every rank; making it is collective.

    Args:
        signals: What counts as the wish to end. A second signal of the same kind acts as it did before.
        process_group: The ranks. Default: all of them.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = _DEFAULT_SIGNALS,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._signals = tuple(signals)
        self._group = Group(process_group)
        self._previous: dict[int, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> "PreemptionGuard":
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._notice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in list(self._previous):
            self._restore(number)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore(number)

    def _restore(self, number: int) -> None:
        previous = self._previous.pop(number, None)
        signal.signal(number, previous if previous is not None else signal.SIG_DFL)

    def should_stop(self) -> bool:
        """Tell whether any rank was told to end. Collective: one small exchange on the host."""
        told = torch.tensor(int(self.received is not None))
        if self._group.size > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group.process_group)
        return bool(told.item())
