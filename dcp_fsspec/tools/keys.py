"""Which keys of a checkpoint to take, and how to call them elsewhere. Pure."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from dcp_fsspec.errors import ConfigurationError, IncompatibleStateError

EMA_PREFIX = "net_ema."
REGULAR_PREFIX = "net."


@dataclass(frozen=True)
class KeyChoice:
    """A choice of keys and a rule for their names.

    Attributes:
        only: Patterns, as in a shell; a key is taken if any fits. None: all keys.
        ema: Take the averaged weights (``net_ema.``) alone, under the names of the regular ones (``net.``).
        strip_prefix: What to remove from the beginning of names that begin so.
        add_prefix: What to put before all names, in the end.
    """

    only: tuple[str, ...] = ()
    ema: bool = False
    strip_prefix: str = ""
    add_prefix: str = ""

    def names(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the new name of each key that is taken, in order.

        Raises:
            IncompatibleStateError: none is taken.
            ConfigurationError: two would have the same name.
        """
        keys = list(keys)
        taken: dict[str, str] = {}
        owners: dict[str, str] = {}
        for key in keys:
            if not self._fits(key):
                continue
            name = REGULAR_PREFIX + key.removeprefix(EMA_PREFIX) if self.ema else key
            name = self.add_prefix + name.removeprefix(self.strip_prefix)
            if name in owners or not name:
                raise ConfigurationError(f"the keys {owners.get(name, '')!r} and {key!r} would both be {name!r}")
            owners[name] = key
            taken[key] = name
        if not taken:
            some = ", ".join(keys[:5]) or "nothing"
            raise IncompatibleStateError(f"of {len(keys)} keys none is taken by {self}; there are {some} ...")
        return taken

    def _fits(self, key: str) -> bool:
        if self.ema and not key.startswith(EMA_PREFIX):
            return False
        return not self.only or any(fnmatch.fnmatchcase(key, pattern) for pattern in self.only)
