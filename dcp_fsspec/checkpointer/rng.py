"""The state of the random number generators of a rank, as a component: ``{"rng": PerRank(RandomState())}``."""

import random
import sys
from typing import Any

import torch


class RandomState:
    """Python's, NumPy's (if it is in use), torch's and each CUDA device's random number generators."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators of this process."""
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, list(internal), gauss],
            "torch": torch.get_rng_state(),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [name, torch.from_numpy(keys.copy()), position, has_gauss, cached]
        if torch.cuda.is_available():
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators that are in use and that `state` knows."""
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy

            name, keys, position, has_gauss, cached = state["numpy"]
            numpy.random.set_state((name, keys.numpy(), position, has_gauss, cached))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
