"""Every change that a save makes to its store, one by one: a place to be killed at, to die at or to fail at.

A change is one call that writes: of the operating system for a local folder, of the filesystem for any other. Its name
says what is called and for what kind of file, such as `replace commit` or `pipe_file shard`.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

_OF_SYSTEM = ("open", "mkdir", "writev", "fsync", "replace", "link", "unlink", "remove")
_OF_FILESYSTEM = ("pipe_file", "rm_file")
_KINDS = {".metadata": "commit", "checksums": "checksums", "__": "shard"}
_COMMITS = ("pipe_file commit", "replace commit", "link commit")


@dataclass(frozen=True)
class Change:
    """One call.

    Attributes:
        name: what is called, and for what.
        number: how many of that name came before.
        index: how many of any name came before.
    """

    name: str
    number: int
    index: int

    @property
    def commits(self) -> bool:
        """Whether this is the one write that makes the new checkpoint valid."""
        return self.name in _COMMITS


class Changes:
    """Calls `before` and `after` around each change, from whatever thread makes it. What they raise, the call raises.

    Args:
        url: of the checkpoint.
        filesystem: whose calls are meant; None for those of the operating system.
        before: called with the change that is about to be made.
        after: called once it has been made.
    """

    def __init__(
        self, url: str, filesystem: Any, before: Callable[[Change], object], after: Callable[[Change], object]
    ) -> None:
        self._folder = (url.partition("://")[2] or url).rstrip("/")
        self._owner = os if filesystem is None else filesystem
        self._verbs = _OF_SYSTEM if filesystem is None else _OF_FILESYSTEM
        self._before, self._after = before, after
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for verb in self._verbs:
            self._originals[verb] = getattr(self._owner, verb)
            setattr(self._owner, verb, self._watched(verb, self._originals[verb]))
        return self

    def __exit__(self, *exception_info: object) -> None:
        for verb, original in self._originals.items():
            setattr(self._owner, verb, original)

    def _watched(self, verb: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            path = _path_of(arguments[1] if verb in ("replace", "link") else arguments[0])
            ours = path.lstrip("/").startswith(os.path.dirname(self._folder).lstrip("/"))
            if not ours or (verb == "open" and not arguments[1] & os.O_WRONLY):
                return original(*arguments, **options)
            change = self._next(f"{verb} {self._kind(path)}")
            self._before(change)
            result = original(*arguments, **options)
            self._after(change)
            return result

        return watched

    def _next(self, name: str) -> Change:
        with self._lock:
            change = Change(name, self._seen[name], self._seen.total())
            self._seen[name] += 1
        return change

    def _kind(self, path: str) -> str:
        folder, _, file = path.rpartition("/")
        if path == self._folder:
            return "folder"
        if folder.lstrip("/") != self._folder.lstrip("/"):
            return "above"
        return next((kind for beginning, kind in _KINDS.items() if file.startswith(beginning)), "other")


def _path_of(file: Any) -> str:
    return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
