"""A stand-in for training: the same work in each step, so that its speed shows what else the machine does."""

from __future__ import annotations

import time

import torch

_STEADY_SECONDS = 3.0


class Trainer:
    """Multiplies matrices.

    Args:
        device: Where.
        width: Of the matrices; on a GPU they should be large enough to keep it busy.
    """

    def __init__(self, device: torch.device | None = None, width: int = 384) -> None:
        self._device = device or torch.device("cpu")
        self._weight = torch.randn(width, width, device=self._device) / width**0.5
        self._state = torch.randn(width, width, device=self._device)

    def step(self) -> None:
        """Do one step, and wait for it."""
        for _ in range(4):
            self._state = (self._state @ self._weight).tanh()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def speed(self, seconds: float = _STEADY_SECONDS) -> float:
        """Return the undisturbed steps a second."""
        began = time.perf_counter()
        steps = 0
        while (passed := time.perf_counter() - began) < seconds:
            self.step()
            steps += 1
        return steps / passed
