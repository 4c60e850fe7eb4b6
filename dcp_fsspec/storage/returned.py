"""What ``dcp.save`` returns on every rank, in a form that does not take longer than the save.

DCP pickles the finished metadata and sends it to all ranks, most of which never look at it. Of a million items, the
stock objects keep each of them busy for half a minute. These two are read as the dicts that they stand for, and are
pickled as columns.
"""

import itertools
import pickle
from collections import UserDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, MetadataIndex

from dcp_fsspec.storage import metadata_pickle
from dcp_fsspec.storage.bulk import collection_held_off
from dcp_fsspec.storage.results import FileResult
from dcp_fsspec.storage.torch_internals import StorageInfo


class Records(dict[str, STORAGE_TYPES]):
    """``Metadata.state_dict_metadata``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _records, (metadata_pickle.dumps(Metadata(dict(self)), ()),)


def _records(data: bytes) -> Records:
    with collection_held_off():
        return Records(pickle.loads(data).state_dict_metadata)


class Places(UserDict[MetadataIndex, StorageInfo]):
    """``Metadata.storage_data``. Its entries are made when somebody looks at them.

    Args:
        files: What was written.
    """

    def __init__(self, files: Sequence[FileResult]) -> None:
        self._files = files

    @cached_property
    def data(self) -> dict[MetadataIndex, StorageInfo]:  # type: ignore[override]
        """The entries. From then on they are what counts: whoever has them may change them."""
        with collection_held_off():
            return dict(itertools.chain.from_iterable(file.places() for file in self._files))

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self.data,)) if "data" in vars(self) else (Places, (self._files,))

    def __copy__(self) -> dict[MetadataIndex, StorageInfo]:  # type: ignore[override]
        return dict(self.data)


def finish(metadata: Metadata, files: Sequence[FileResult]) -> None:
    """Complete `metadata` in place, for DCP to send to all ranks."""
    metadata.state_dict_metadata = Records(metadata.state_dict_metadata)
    metadata.storage_data = Places(files)
