"""Which iterations to keep: small policies that compose.

A policy sees the committed iterations only, up to the one that the pointer names; what it does not keep may go. The
checkpointer never removes the iteration that the pointer names, nor one that is being written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dcp_fsspec.errors import ConfigurationError


@dataclass(frozen=True)
class Committed:
    """A committed iteration, as a policy sees it.

    Attributes:
        iteration: The training iteration.
        metrics: Numbers that came with the save; empty if it was not asked for or written by others.
    """

    iteration: int
    metrics: Mapping[str, float]


class RetentionPolicy(Protocol):
    """Says what stays."""

    def keep(self, committed: Sequence[Committed]) -> set[int]:
        """Return the iterations to keep, of `committed`, which is in order of iteration."""
        ...


@dataclass(frozen=True)
class KeepLatest:
    """Keep the newest `n` committed iterations.

    Raises:
        ConfigurationError: `n` is less than 1. To keep everything, use no policy.
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLatest", self.n)

    def keep(self, committed: Sequence[Committed]) -> set[int]:
        """Return the newest `n`."""
        return {one.iteration for one in committed[-self.n :]}


@dataclass(frozen=True)
class KeepEvery:
    """Keep each iteration that is a multiple of `n`.

    Raises:
        ConfigurationError: `n` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", self.n)

    def keep(self, committed: Sequence[Committed]) -> set[int]:
        """Return the multiples of `n`."""
        return {one.iteration for one in committed if one.iteration % self.n == 0}


@dataclass(frozen=True)
class KeepBest:
    """Keep the best `k` iterations by `metric`, as passed to ``save(metrics=...)``. Equals: the newer one.

    Iterations without the metric are not kept by this policy; NaN is worse than every number.

    Raises:
        ConfigurationError: `k` is less than 1, or `mode` is neither ``"min"`` nor ``"max"``.
    """

    k: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.k)
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f"KeepBest takes mode 'min' or 'max', got {self.mode!r}")

    def keep(self, committed: Sequence[Committed]) -> set[int]:
        """Return the `k` best."""
        sign = 1 if self.mode == "min" else -1

        def badness(one: Committed) -> tuple[bool, float, int]:
            value = one.metrics[self.metric]
            is_nan = value != value
            return is_nan, 0.0 if is_nan else sign * value, -one.iteration

        known = [one for one in committed if self.metric in one.metrics]
        return {one.iteration for one in sorted(known, key=badness)[: self.k]}


class AnyOf:
    """Keep what any of `policies` keeps."""

    def __init__(self, *policies: RetentionPolicy) -> None:
        if not policies:
            raise ConfigurationError("AnyOf needs at least one policy")
        self.policies = policies

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.policies))})"

    def keep(self, committed: Sequence[Committed]) -> set[int]:
        """Return the union."""
        return set().union(*(policy.keep(committed) for policy in self.policies))


def _check_count(policy: str, count: int) -> None:
    if type(count) is not int or count < 1:
        raise ConfigurationError(f"{policy} takes a count of at least 1, got {count!r}; without a policy all is kept")
