"""One shard file on its way up: the data of its items, framed, checksummed and published in one write."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp_fsspec.errors import IncompatibleStateError
from dcp_fsspec.storage import checksums
from dcp_fsspec.storage.filesystem import Buffer, Store
from dcp_fsspec.storage.framing import frame_tensor, template
from dcp_fsspec.storage.results import Written
from dcp_fsspec.storage.scratch import HostCopies, Scratch
from dcp_fsspec.storage.splitting import Piece, item_bytes, whole_of
from dcp_fsspec.storage.torch_internals import StorageInfo, StreamTransformExtension
from dcp_fsspec.storage.tracing import OFF, Trace


class Upload:
    """Frame the items of one shard file and publish it. Runs in a thread."""

    def __init__(
        self,
        store: Store,
        name: str,
        items: Sequence[WriteItem],
        planner: SavePlanner,
        extensions: Sequence[StreamTransformExtension],
        trace: Trace = OFF,
    ) -> None:
        self._store, self._name, self._items = store, name, items
        self._planner, self._extensions = planner, extensions
        self._trace = trace

    def __call__(self, scratch: Scratch) -> list[WriteResult]:
        """Publish the file, with copies in `scratch`, and return where each item lies in it."""
        # Touched only as far as copies are made; see frame_tensor.
        with scratch.lent(sum(HostCopies.num_bytes(item_bytes(item)) for item in self._items)) as memory:
            return self._published(HostCopies(memory))

    def _published(self, copies: HostCopies) -> list[WriteResult]:
        with self._trace.span("frame", items=len(self._items)):
            framed = [self._frame(item, copies) for item in self._items]
        with self._trace.span("checksum"):
            file, places = self._checksummed(framed)
        with self._trace.span("PUT", file=self._name, bytes=file.num_bytes):
            self._store.publish(self._name, list(itertools.chain.from_iterable(framed)), file.crc)
        return [
            WriteResult(index=item.index, size_in_bytes=info.length, storage_data=Written(info, record, file))
            for item, (info, record) in zip(self._items, places, strict=True)
        ]

    def _checksummed(
        self, framed: Sequence[list[Buffer]]
    ) -> tuple[checksums.FileChecksums, list[tuple[StorageInfo, checksums.ItemRecord]]]:
        """Return the record of the file, and for each item its place and its record."""
        places: list[tuple[StorageInfo, checksums.ItemRecord]] = []
        offset = crc = 0
        for item, buffers in zip(self._items, framed, strict=True):
            length = sum(memoryview(buffer).nbytes for buffer in buffers)
            record = checksums.ItemRecord(checksums.crc_of(buffers), _payload_at(item, buffers))
            crc = checksums.extend(crc, buffers, record.crc, length)
            places.append((StorageInfo(self._name, offset, length, self._descriptors()), record))
            offset += length
        return checksums.FileChecksums(offset, crc), places

    def _frame(self, item: WriteItem, copies: HostCopies) -> list[Buffer]:
        try:
            return self._framed(item, copies)
        except IncompatibleStateError as error:
            raise IncompatibleStateError(f"{item.index.fqn}: {error}") from error
        except Exception as error:
            error.add_note(f"while the item {item.index.fqn!r} was prepared for {self._store.url_of(self._name)}")
            raise

    def _framed(self, item: WriteItem, copies: HostCopies) -> list[Buffer]:
        data = self._planner.resolve_data(whole_of(item))
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"{item.index.fqn}: the planner gave a {type(data).__name__} for bytes")
            return self._transformed([data.getbuffer()])
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"{item.index.fqn}: the planner gave a {type(data).__name__} for a tensor")
        return self._transformed(frame_tensor(item.narrow(data) if isinstance(item, Piece) else data, copies))

    def _transformed(self, buffers: list[Buffer]) -> list[Buffer]:
        if not self._extensions:
            return buffers
        raw = _Uncloseable()
        stream: Any = raw
        # The last one is nearest to the file: readers undo them in the order of the descriptors, which begin with it.
        for extension in reversed(self._extensions):
            stream = extension.transform_to(stream)
        for buffer in buffers:
            stream.write(buffer)
        stream.close()
        return [raw.getbuffer()]

    def _descriptors(self) -> list[str] | None:
        return [extension.get_descriptor() for extension in reversed(self._extensions)] or None


def _payload_at(item: WriteItem, buffers: Sequence[Buffer]) -> int:
    """Return where the elements begin in the frame of exactly the tensor that the plan describes, or 0."""
    if item.tensor_data is None or len(buffers) != 3:
        return 0
    made = template(item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes))
    return len(made.head) if made is not None and made.head == buffers[0] else 0


class _Uncloseable(io.BytesIO):
    """Transforms close the stream that they write to; its content is wanted afterwards."""

    def close(self) -> None:
        self.flush()
