"""What ``dcp.save`` returns on every rank, in a form that does not take longer than the save.

DCP pickles the finished metadata and sends it to all ranks, most of which never look at it. Of a million items, the
stock objects keep each of them busy for half a minute. What is sent here is the content of ``.metadata``, which is
opened where somebody looks.
"""

import pickle
from collections import UserDict
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

    @cached_property
    def data(self) -> dict[Any, Any]:  # type: ignore[override]
        """The entries. From then on they are what counts: whoever has them may change them."""
        return getattr(self._content.opened, self._attribute) if self._known is None else self._known

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.data,)) if "data" in vars(self) else (Part, (self._content, self._attribute))

    def __copy__(self) -> dict[Any, Any]:  # type: ignore[override]
        return dict(self.data)


def finish(metadata: Metadata, data: bytes) -> None:
    """Complete `metadata` in place, for DCP to send to all ranks.

    Args:
        metadata: As it was written, all but ``storage_data``.
        data: Content of its file.
    """
    content = Content(data)
    metadata.state_dict_metadata = Part(content, "state_dict_metadata", dict(metadata.state_dict_metadata))  # type: ignore[assignment]
    metadata.storage_data = Part(content, "storage_data")
