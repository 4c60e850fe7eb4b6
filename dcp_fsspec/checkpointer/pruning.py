"""Apply a retention policy beside the training, in a thread of its own on the coordinator."""

import logging
import threading
from collections.abc import Iterable

from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.retention import RetentionPolicy
from dcp_fsspec.errors import DcpFsspecError

logger = logging.getLogger(__name__)


class Pruner:
    """Removes what a policy does not keep; one run at a time. A failure is logged and never fails a save.

    Args:
        catalog: A catalog of its own, which nothing else uses.
        policy: What to keep.
    """

    def __init__(self, catalog: Catalog, policy: RetentionPolicy) -> None:
        self._catalog = catalog
        self._policy = policy
        self._thread: threading.Thread | None = None
        self._written: set[int] = set()

    def start(self, protected: Iterable[int]) -> None:
        """Begin a run after a commit, unless one is still under way: the next one will do its work.

        Args:
            protected: What was written just now, perhaps in the place of an older save.
        """
        self._written |= set(protected)
        if self._thread is None or not self._thread.is_alive():
            # Not a daemon: a script that ends waits for the deletes in hand.
            self._thread = threading.Thread(target=self._run, args=(frozenset(self._written),), name="dcp_fsspec_prune")
            self._written.clear()
            self._thread.start()

    def _run(self, protected: frozenset[int]) -> None:
        try:
            removed = self._catalog.prune(self._policy, protected=protected)
        except DcpFsspecError as error:
            logger.warning("%s could not be pruned, it will be tried after the next save: %s", self._catalog.url, error)
        else:
            if removed:
                logger.info("%s: pruned the iterations %s", self._catalog.url, ", ".join(map(str, removed)))

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the run under way, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
