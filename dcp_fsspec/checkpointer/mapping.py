"""How a model's keys are called in a checkpoint: rules on whole names, applied one way and back. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dcp_fsspec.errors import ConfigurationError

KeyMapping = Callable[[Collection[str]], Mapping[str, str]]
"""Takes all keys of the model and returns, for those that are called otherwise in the checkpoint, how."""

_BASE = "base_layer"
_LORA = "lora_"


@dataclass(frozen=True)
class Renaming:
    """Names of keys in a model and in a checkpoint, one to one.

    Attributes:
        to_checkpoint: Name in the checkpoint by name in the model.
        to_model: The reverse.
    """

    to_checkpoint: Mapping[str, str]
    to_model: Mapping[str, str]

    @classmethod
    def of(cls, keys: Iterable[str], *mappings: KeyMapping) -> "Renaming":
        """Apply `mappings`, one after the other, to the model's `keys`.

        Raises:
            ConfigurationError: two keys would have the same name.
        """
        names = {key: key for key in keys}
        for mapping in mappings:
            renamed = mapping(tuple(names.values()))
            names = {key: renamed.get(name, name) for key, name in names.items()}
        back: dict[str, str] = {}
        for key, name in names.items():
            if name in back:
                raise ConfigurationError(
                    f"the keys {back[name]!r} and {key!r} would both be {name!r} in the checkpoint"
                )
            back[name] = key
        return cls(MappingProxyType(names), MappingProxyType(back))


def prefixes(renames: Mapping[str, str]) -> KeyMapping:
    """Replace the beginning of keys: ``{"net.": "net_ema."}``. Of several that fit, the longest is replaced."""

    def rename(keys: Collection[str]) -> dict[str, str]:
        found = {}
        for key in keys:
            fitting = [prefix for prefix in renames if key.startswith(prefix)]
            if fitting:
                prefix = max(fitting, key=len)
                found[key] = renames[prefix] + key.removeprefix(prefix)
        return found

    return rename


def lora_base_layers(keys: Collection[str]) -> dict[str, str]:
    """Call the weights of layers wrapped for LoRA as they were called before: ``q.base_layer.weight``, ``q.weight``.

    A layer is wrapped if it has ``lora_`` parameters beside its base layer; another module that happens to be called
    so keeps its name.
    """
    wrapped = {key[: key.index(f".{_LORA}")] for key in keys if f".{_LORA}" in key}
    found = {}
    for key in keys:
        head, separator, tail = key.rpartition(f".{_BASE}.")
        if separator and head in wrapped:
            found[key] = f"{head}.{tail}"
    return found


EMA_TO_REGULAR = prefixes({"net.": "net_ema."})
"""Load averaged weights into the regular ones."""


def is_replaced_by_ema(name: str, asked: Collection[str]) -> bool:
    """Tell whether a name in a checkpoint is that of a regular weight whose averaged one is `asked` for instead."""
    return EMA_TO_REGULAR([name]).get(name) in asked
