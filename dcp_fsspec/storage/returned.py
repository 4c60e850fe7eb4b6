"""What ``dcp.save`` returns on every rank, in a form that does not take longer than the save.

DCP pickles the finished metadata and sends it to all ranks, most of which never look at it. Of a million items, the
stock objects keep each of them busy for half a minute. What is sent here is the content of ``.metadata``, which is
opened where somebody looks.
"""

import pickle
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_fsspec.storage.bulk import collection_held_off


class Content:
    """The content of ``.metadata``, as this job has written it.

    Args:
        data: All of it.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def opened(self) -> Metadata:
        """What it says."""
        with collection_held_off():
            metadata: Metadata = pickle.loads(self._data)
        return metadata

    def __reduce__(self) -> tuple[Any, ...]:
        return Content, (self._data,)


class Part(UserDict[Any, Any]):
    """One of the two large dicts of a `Metadata`, there as soon as somebody looks at it.

    Args:
        content: What it is taken from.
        attribute: Which.
        known: The dict itself, where it is there already.
    """

    def __init__(self, content: Content, attribute: str, known: dict[Any, Any] | None = None) -> None:
        self._content = content
        self._attribute = attribute
        self._known = known
        self._holder: Callable[[], Metadata | None] = lambda: None

    def held_by(self, metadata: Metadata) -> None:
        """Count as the content of a file no more when another save makes another one of `metadata`.

        A planner may keep the metadata for its next save, which may be by a writer of other software: what that
        pickles into a file must be stock.
        """
        self._holder = weakref.ref(metadata)

    @property
    def _is_as_written(self) -> bool:
        holder = self._holder()
        beside = self if holder is None else holder.storage_data
        return "data" not in vars(self) and isinstance(beside, Part) and beside._content is self._content

    @cached_property
    def data(self) -> dict[Any, Any]:  # type: ignore[override]
        """The entries. From then on they are what counts: whoever has them may change them."""
        return getattr(self._content.opened, self._attribute) if self._known is None else self._known

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_as_written:
            return Part, (self._content, self._attribute)
        # Of the dicts that a class makes, the one that readers of checkpoints by an allow-list know.
        return OrderedDict, (), None, None, iter(self.data.items())

    def __or__(self, other: Any) -> dict[Any, Any]:  # type: ignore[override]
        return self.data | dict(other)

    def __ror__(self, other: Any) -> dict[Any, Any]:  # type: ignore[override]
        return dict(other) | self.data

    def __copy__(self) -> dict[Any, Any]:  # type: ignore[override]
        return dict(self.data)


def finish(metadata: Metadata, data: bytes) -> None:
    """Complete `metadata` in place, for DCP to send to all ranks.

    Args:
        metadata: As it was written, all but ``storage_data``.
        data: Content of its file.
    """
    content = Content(data)
    state = Part(content, "state_dict_metadata", dict(metadata.state_dict_metadata))
    state.held_by(metadata)
    metadata.state_dict_metadata = state  # type: ignore[assignment]
    metadata.storage_data = Part(content, "storage_data")
