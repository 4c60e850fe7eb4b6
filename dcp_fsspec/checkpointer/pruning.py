"""Apply a retention policy beside the training, in a thread of its own on the coordinator."""

import logging
import threading
import time
from collections.abc import Iterable

from dcp_fsspec.checkpointer.background import before_threads_end
from dcp_fsspec.checkpointer.catalog import Catalog
from dcp_fsspec.checkpointer.retention import RetentionPolicy
from dcp_fsspec.errors import DcpFsspecError

logger = logging.getLogger(__name__)


class Pruner:
    """Removes what a policy does not keep; one run at a time. A failure is logged and never fails a save.

    Args:
        catalog: A catalog of its own, which nothing else uses.
        policy: What to keep.
        timeout_seconds: A run that takes longer is not waited for.
    """

    def __init__(self, catalog: Catalog, policy: RetentionPolicy, timeout_seconds: float) -> None:
        self._catalog = catalog
        self._policy = policy
        self._timeout_seconds = timeout_seconds
        self._thread: threading.Thread | None = None
        self._written: set[int] = set()
        self._began = 0.0
        before_threads_end(self.wait)

    def start(self, protected: Iterable[int]) -> None:
        """Begin a run after a commit, unless one is still under way: the next one will do its work.

        Args:
            protected: What was written just now, perhaps in the place of an older save.
        """
        self._written |= set(protected)
        if self._thread is None or not self._thread.is_alive():
            # A daemon: a script that ends waits for the deletes in hand only until the deadline.
            self._thread = threading.Thread(
                target=self._run, args=(frozenset(self._written),), name="dcp_fsspec_prune", daemon=True
            )
            self._written.clear()
            self._began = time.monotonic()
            self._thread.start()

    def _run(self, protected: frozenset[int]) -> None:
        try:
            removed = self._catalog.prune(self._policy, protected=protected)
        except DcpFsspecError as error:
            logger.warning("%s could not be pruned, it will be tried after the next save: %s", self._catalog.url, error)
        else:
            if removed:
                logger.info("%s: pruned the iterations %s", self._catalog.url, ", ".join(map(str, removed)))

    def wait(self) -> None:
        """Wait for the run under way, if there is one, until its deadline."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._thread.join(max(0.0, self._began + self._timeout_seconds - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "%s: what has taken %.0f s to prune is not waited for any longer; the rest goes after a later save",
                self._catalog.url,
                self._timeout_seconds,
            )
