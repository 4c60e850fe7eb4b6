"""Save plans kept from one save to the next: while nothing has changed, ranks exchange no plans and none are made.

Torch has such a cache too (``enable_plan_caching``), but one for the whole process; this one belongs to one component
of one writer, and is forgotten when a save fails.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

_UNCHANGED = SavePlan([], usable=False)

GlobalStep = Callable[[list[SavePlan]], tuple[list[SavePlan], Metadata]]


class PlanCache:
    """The plans of one component, on one rank. On the coordinator also those of all ranks."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all; the next save plans afresh. Called on every rank when a save has failed on any."""
        self._local: SavePlan | None = None
        self._final: SavePlan | None = None
        self._forms: object = None
        self._all: list[SavePlan] = []
        self._metadata: Metadata | None = None

    def local(self, forms: object, make: Callable[[], SavePlan]) -> SavePlan:
        """Return what this rank sends to the coordinator: its plan, or that it is the one of the last save.

        Args:
            forms: What the plan depends on, to be compared with that of the last save; None: not known.
            make: Makes the plan, which takes a hundred times as long as to compare the forms.
        """
        if self._final is not None and forms is not None and forms == self._forms:
            return _UNCHANGED
        plan = make()
        self._forms = forms
        if self._final is not None and self._local is not None and _equal(plan, self._local):
            return _UNCHANGED
        self._local, self._final = plan, None
        return plan

    def all_ranks(self, plans: list[SavePlan], step: GlobalStep) -> tuple[list[SavePlan], Metadata]:
        """Return the plans of all ranks and the metadata, made anew by `step` if any rank's plan has changed.

        On the coordinator only. The names that the storage writer gives its files come with each rank's plan, changed
        or not.
        """
        if self._metadata is not None and len(plans) == len(self._all):
            if not any(plan.usable for plan in plans):
                return plans, _fresh(self._metadata)
            plans = [
                plan if plan.usable else dataclasses.replace(old, storage_data=plan.storage_data)
                for plan, old in zip(plans, self._all, strict=True)
            ]
        self._all = plans
        made, metadata = step(plans)
        self._metadata = _fresh(metadata)
        return made, metadata

    def final(self, plan: SavePlan) -> SavePlan:
        """Return what this rank writes: the plan from the coordinator, or that of the last save."""
        if plan.usable:
            self._final = plan
            return plan
        assert self._final is not None
        return dataclasses.replace(self._final, storage_data=plan.storage_data)


def _equal(one: SavePlan, other: SavePlan) -> bool:
    return one.items == other.items and one.planner_data == other.planner_data


def _fresh(metadata: Metadata) -> Metadata:
    """Return metadata that a storage writer can complete in place."""
    empty: dict[Any, Any] = {"storage_data": None, "storage_meta": None}
    return dataclasses.replace(metadata, **empty)
