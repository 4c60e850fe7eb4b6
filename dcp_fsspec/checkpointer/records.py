"""The commit record of an iteration: a small JSON file whose presence makes the iteration valid. Pure."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dcp_fsspec.checkpointer import layout
from dcp_fsspec.errors import ConfigurationError, CorruptCheckpointError

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class ComponentRecord:
    """What was committed of one component.

    Attributes:
        num_files: Shard files.
        num_bytes: Bytes in them.
        save_id: The id that its ``.metadata`` carries: another save's files are not what was committed.
    """

    num_files: int
    num_bytes: int
    save_id: str


@dataclasses.dataclass(frozen=True)
class CommitRecord:
    """What ``commit.json`` says.

    Attributes:
        iteration: The training iteration.
        utc_time: When it was committed, ISO 8601.
        world_size: Ranks that saved it.
        torch_version: As torch says of itself.
        package_version: Of this package.
        components: By name, in the order in which they were written.
        metrics: Numbers that came with the save; `KeepBest` looks at them.
        metadata: Whatever else the user wanted to be kept; JSON values.
    """

    iteration: int
    utc_time: str
    world_size: int
    torch_version: str
    package_version: str
    components: Mapping[str, ComponentRecord]
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the content of the file."""
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> "CommitRecord":
        """Return what a file says.

        Args:
            data: Content of the file.
            where: Its url, for messages.

        Raises:
            CorruptCheckpointError: it is damaged, or a later version of this package wrote it in a form unknown here.
        """
        try:
            content = json.loads(data)
            version = content.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"its format version is {version}, {FORMAT_VERSION} is known here")
            components = {name: ComponentRecord(**fields) for name, fields in content.pop("components").items()}
            record = cls(components=components, **content)
            layout.folder_of(record.iteration)
            return record
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{where} is not a commit record: {error}") from error


def check_user_values(metrics: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
    """Refuse, before anything is written, what a commit record cannot hold.

    Raises:
        ConfigurationError: a metric is no number, or a value is not JSON.
    """
    for name, value in metrics.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigurationError(f"the metric {name!r} is {value!r}, not a number")
    try:
        json.dumps(dict(metadata))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"metadata of a save must be JSON values: {error}") from error
