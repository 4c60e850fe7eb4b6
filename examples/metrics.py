"""Checkpoints in numbers, for whatever draws graphs and raises alarms.

    python examples/metrics.py

`Metrics` is a callback that hands plain numbers to a function `log(name, value, iteration)`. That may be TensorBoard's
`SummaryWriter().add_scalar`, `lambda name, value, iteration: wandb.log({name: value}, step=iteration)`, or something
that sets gauges, as `Gauges` does for Prometheus.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from dcp_fsspec import CheckpointCallback, DistributedCheckpointer

Log = Callable[[str, float, int], Any]


class Metrics(CheckpointCallback):
    """Tells what each save and load did. Make it on one rank only, or with a `log` that does nothing on the others."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._failures = 0
        self.checkpointer: DistributedCheckpointer | None = None

    def on_save_checkpoint_success(self, iteration: int, elapsed_time: float) -> None:
        if self.checkpointer is not None and self.checkpointer.last_outcome is not None:
            self._log_all("save", self.checkpointer.last_outcome.numbers, iteration)

    def on_save_checkpoint_failure(self, iteration: int, error: BaseException) -> None:
        self._failures += 1
        self._log("checkpoint/save_failures", self._failures, iteration)

    def on_load_checkpoint_end(self, model: Any, iteration: int, checkpoint_path: str | None) -> None:
        if self.checkpointer is not None and checkpoint_path is not None:
            self._log_all("load", self.checkpointer.last_load_report.numbers, iteration)

    def _log_all(self, what: str, numbers: dict[str, float], iteration: int) -> None:
        for name, value in numbers.items():
            self._log(f"checkpoint/{what}_{name}", value, iteration)


class Gauges:
    """The last value of each number, as Prometheus reads it; its client library's `Gauge.set` does as well."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def set(self, name: str, value: float, iteration: int) -> None:
        self._values[name.replace("/", "_")] = value
        self._values["checkpoint_iteration"] = iteration

    def text(self) -> str:
        return "".join(f"{name} {value:g}\n" for name, value in sorted(self._values.items()))


def main() -> None:
    """Save and load a small model, and print the numbers."""
    model = torch.nn.Linear(256, 256)
    gauges = Gauges()
    metrics = Metrics(gauges.set)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = metrics.checkpointer = DistributedCheckpointer(folder, callbacks=[metrics])
        checkpointer.save(model, None, None, None, 1)
        checkpointer.load(model)
        checkpointer.finalize()
    print(gauges.text(), end="")


if __name__ == "__main__":
    main()
