"""Ranges of files, fetched side by side and handed to whoever wanted them."""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_fsspec.storage.checksums import Section
from dcp_fsspec.storage.filesystem import Store
from dcp_fsspec.storage.landing import Consumer, Layout, give
from dcp_fsspec.storage.progress import Meter, ProgressCallback
from dcp_fsspec.storage.ranges import Fetch, Wanted, fetch_bytes_for, merge
from dcp_fsspec.storage.scratch import MAX_SCRATCH_BYTES
from dcp_fsspec.storage.torch_internals import ExtensionRegistry
from dcp_fsspec.storage.tracing import OFF, Trace
from dcp_fsspec.storage.transfer import Job, Transfer

_WHOLE_FILE = 1 << 62

_SMALL_ITEM_BYTES = 128 << 10
"""Handing over a smaller item is mostly work of the interpreter, of which one thread at a time can do any. Several
that try take the interpreter's lock from each other at each call that lets go of it, and all end later."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from, and the rules for it.

    Attributes:
        store: Its folder.
        metadata: Its metadata.
        checksums: Its checksums; None if there are none or none are wanted.
        whole_files: Read every shard file that is needed at all as a whole, so that all of it can be checked.
        trust_pickle: See `FsspecStorageReader`.
        extension_registry: Torch's registry of stream transforms.
        trace: Where what the threads do is recorded.
    """

    store: Store
    metadata: Metadata
    checksums: Section | None
    whole_files: bool
    trust_pickle: bool | Sequence[type]
    extension_registry: ExtensionRegistry
    trace: Trace = OFF


class Fetcher:
    """Fetches from one checkpoint.

    Args:
        source: What to read from.
        transfer: How.
    """

    def __init__(self, source: Source, transfer: Transfer) -> None:
        self._source = source
        self._transfer = transfer
        self._small_items = threading.Lock()

    def fetch(self, wanted: Sequence[Wanted[Consumer]], progress: ProgressCallback | None = None) -> int:
        """Fetch what is wanted and hand it over; return how many bytes that took."""
        capabilities = self._source.store.capabilities
        total = sum(one.num_bytes for one in wanted)
        fetches = merge(
            wanted, fetch_bytes_for(total, self._transfer.max_concurrency) if capabilities.ranges else _WHOLE_FILE
        )
        num_bytes = sum(fetch.num_bytes for fetch in fetches)
        meter = Meter(f"load {self._source.store.url}", num_bytes, progress)
        self._transfer.run(self._job(fetch, meter) for fetch in fetches)
        return num_bytes

    def _job(self, fetch: Fetch[Consumer], meter: Meter) -> Job[None]:
        """Prepare a fetch. Called when its turn comes, so that no more memory is asked for than is in flight."""
        if fetch.num_bytes > MAX_SCRATCH_BYTES:
            return Job(2 * fetch.num_bytes, functools.partial(self._run_large, fetch, meter))
        layout = Layout(fetch)
        cost_bytes = layout.scratch_bytes + self._source.store.capabilities.read_copies * fetch.num_bytes
        return Job(cost_bytes, functools.partial(self._run, fetch, layout, meter))

    def _run(self, fetch: Fetch[Consumer], layout: Layout, meter: Meter) -> None:
        with self._transfer.scratch.lent(layout.scratch_bytes) as memory:
            with self._fetching(fetch):
                layout.fill(memory, functools.partial(self._source.store.read_into, fetch.file, fetch.start))
            with self._turn(fetch), self._source.trace.span("copy", items=len(fetch.wanted)):
                layout.hand_over()
        meter.add(fetch.num_bytes)

    def _run_large(self, fetch: Fetch[Consumer], meter: Meter) -> None:
        with self._fetching(fetch):
            data = self._source.store.read_range(fetch.file, fetch.start, fetch.stop)
        with self._turn(fetch), self._source.trace.span("copy", items=len(fetch.wanted)):
            give(fetch, data)
        meter.add(fetch.num_bytes)

    def _turn(self, fetch: Fetch[Consumer]) -> contextlib.AbstractContextManager[object]:
        are_small = fetch.num_bytes < len(fetch.wanted) * _SMALL_ITEM_BYTES
        return self._small_items if are_small else contextlib.nullcontext()

    @contextlib.contextmanager
    def _fetching(self, fetch: Fetch[Consumer]) -> Iterator[None]:
        try:
            with self._source.trace.span("GET", file=fetch.file, bytes=fetch.num_bytes):
                yield
        except CheckpointNotFoundError as error:
            where = self._source.store.url_of(fetch.file)
            raise CorruptCheckpointError(f"{where} is missing, it should hold {self._keys(fetch)}: {error}") from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error} It should hold {self._keys(fetch)}.") from error

    def _keys(self, fetch: Fetch[Consumer]) -> str:
        """Name the items of a fetch, for messages."""
        storage_data = self._source.metadata.storage_data
        keys = sorted(
            index.fqn
            for index, info in storage_data.items()
            if info.relative_path == fetch.file and info.offset < fetch.stop and fetch.start < info.offset + info.length
        )
        return ", ".join(keys[:10]) + (f" and {len(keys) - 10} more" if len(keys) > 10 else "")
