"""How a save in the background ended, as far as all ranks, or this one alone, can find out."""

import dataclasses
import logging
import threading
from collections.abc import Mapping

from dcp_fsspec.checkpointer.background import is_agreed
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.group import Group, portable
from dcp_fsspec.checkpointer.outcome import Outcome
from dcp_fsspec.checkpointer.records import CommitRecord
from dcp_fsspec.errors import AsyncSaveError, DcpFsspecError

logger = logging.getLogger(__name__)

_CLEAN_UP_SECONDS = 60.0


class Verdict:
    """Turns what the ranks' uploaders report into one outcome.

    Args:
        catalog: The iterations.
        group: The ranks.
    """

    def __init__(self, catalog: Catalog, group: Group) -> None:
        self._catalog = catalog
        self._group = group

    def agreed(self, outcome: Outcome) -> Outcome:
        """Return the outcome that holds for all ranks: committed, or failed for the reasons of those that know one."""
        errors = self._group.gather(portable(outcome.error) if outcome.error is not None else None)
        failures = {rank: error for rank, error in enumerate(errors) if error is not None}
        if not failures:
            return outcome
        record = self._group.decide(lambda: self._clean_up(outcome, failures))
        if record is not None:
            return Outcome(outcome.iteration, outcome.seconds, record)
        return dataclasses.replace(outcome, record=None, error=_async_error(outcome.iteration, failures))

    def own(self, outcome: Outcome) -> Outcome:
        """Return the outcome as far as this rank alone can find it out."""
        if outcome.error is None:
            return outcome
        failures = {self._group.rank: outcome.error}
        record = self._clean_up(outcome, failures)
        if record is not None:
            return Outcome(outcome.iteration, outcome.seconds, record)
        return dataclasses.replace(outcome, error=_async_error(outcome.iteration, failures))

    def _clean_up(self, outcome: Outcome, failures: Mapping[int, BaseException]) -> CommitRecord | None:
        """After a failure, return the record if the iteration was committed all the same, else remove what is left.

        Not for long, and whatever the store says: it may be the store that fails.
        """
        if all(is_agreed(error) and not isinstance(error, AsyncSaveError) for error in failures.values()):
            return None  # The writers lived to the end, and have removed what they wrote.
        found: list[CommitRecord] = []
        catalog = self._catalog.copy()

        def look() -> None:
            try:
                record = catalog.record(outcome.iteration)
                if record is not None:
                    catalog.advance(outcome.iteration)
                    found.append(record)
                elif self._group.is_coordinator and not outcome.may_be_committed:
                    catalog.discard(outcome.iteration)
            except DcpFsspecError as error:
                logger.warning("leftovers of iteration %d may stay: %s", outcome.iteration, error)

        looking = threading.Thread(target=look, name="dcp_fsspec_clean_up", daemon=True)
        looking.start()
        looking.join(_CLEAN_UP_SECONDS)
        if found:
            logger.warning("iteration %d was committed although an upload was lost afterwards", outcome.iteration)
            return found[0]
        return None


def _async_error(iteration: int, failures: Mapping[int, BaseException]) -> AsyncSaveError:
    # All ranks often have the same to say.
    ranks_by_text: dict[str, list[int]] = {}
    for rank, error in sorted(failures.items()):
        ranks_by_text.setdefault(str(error), []).append(rank)
    texts = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_text.items())
    failure = AsyncSaveError(
        f"iteration {iteration} was not saved, the pointer and older iterations are as they were. {texts}"
    )
    failure.__cause__ = failures[min(failures)]
    return failure
