"""A filesystem that passes every call on to another one, writes it down, and fails where it is told to.

    faulty = FaultyFileSystem(fsspec.filesystem("memory"))
    faulty.inject("pipe_file", Fail(OSError(errno.ENOSPC, "full")), nth=3)    # the third write fails
    faulty.inject("cat_file", Flip(), path="*.distcp", times=None)            # every read of a shard file is wrong
    dcp.save(state, storage_writer=FsspecStorageWriter("/run", filesystem=faulty))
    assert faulty.count("pipe_file") == 3

Fail       raise an error, in place of the call or after it
Delay      wait before the call
Truncate   write, or return, only the beginning; then perhaps raise an error
Drop       report success without doing anything
Flip       write, or return, one wrong bit

Only the synchronous methods are watched, each as the caller calls it; what the filesystem behind does within one
call is its own affair.
"""

import dataclasses
import fnmatch
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem

_WRITES = {"pipe_file"}
_READS = {"cat_file"}
_COMMANDS = {"cp_file", "makedirs", "mkdir", "mv", "rm", "rm_file", "touch"}
_QUESTIONS = {"exists", "find", "info", "isdir", "isfile", "ls"}
WATCHED = frozenset(_WRITES | _READS | _COMMANDS | _QUESTIONS | {"invalidate_cache", "open"})
"""Names of the methods that rules can be made for."""


@dataclasses.dataclass(frozen=True)
class Fail:
    """Raise `error`.

    Attributes:
        error: What is raised, the same object each time.
        carried_out: Make the call first, and raise instead of returning: the answer was lost.
    """

    error: BaseException
    carried_out: bool = False


@dataclasses.dataclass(frozen=True)
class Delay:
    """Wait before the call is made."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Truncate:
    """Write or return only the beginning of the data.

    Attributes:
        keep_bytes: How much of it; half if None.
        error: Raised afterwards, as by a filesystem that leaves a broken file behind.
    """

    keep_bytes: int | None = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class Drop:
    """Do nothing and report success."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """Write or return data with one bit inverted.

    Attributes:
        bit: Which one, counted from the lowest bit of the first byte; one in the middle if None.
    """

    bit: int | None = None


Fault = Fail | Delay | Truncate | Drop | Flip


@dataclasses.dataclass(frozen=True)
class Rule:
    """When to do what.

    Attributes:
        verb: Name of the method.
        fault: What happens.
        path: Shell pattern for the (first) path of the call; ``*`` spans slashes.
        nth: The first call that is hit, counted from 1 over the calls that match.
        times: How many calls are hit from there on; None: all.
    """

    verb: str
    fault: Fault
    path: str = "*"
    nth: int = 1
    times: int | None = 1

    def __post_init__(self) -> None:
        """Refuse what could never take effect, rather than let a test pass for nothing."""
        if self.verb not in WATCHED:
            raise ValueError(f"{self.verb!r} is not watched; these are: {', '.join(sorted(WATCHED))}")
        if isinstance(self.fault, Truncate | Flip) and self.verb not in _WRITES | _READS:
            raise ValueError(f"{self.verb} carries no data that {type(self.fault).__name__} could change")
        if isinstance(self.fault, Drop) and self.verb not in _WRITES | _COMMANDS:
            raise ValueError(f"{self.verb} has an answer, so it cannot be dropped")
        if self.nth < 1:
            raise ValueError(f"nth counts from 1, got {self.nth}")


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that was made.

    Attributes:
        verb: Name of the method.
        path: The first path among its arguments, as the caller gave it.
        num_bytes: Length of the data that the caller gave (``pipe_file``) or got (``cat_file``); 0 for others.
    """

    verb: str
    path: str
    num_bytes: int = 0


class _Tally:
    """The calls so far and the rules, with the lock that all threads take."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._lock = threading.Lock()
        self.rules: list[Rule] = list(rules)
        self._seen = [0] * len(self.rules)
        self.calls: list[Call] = []

    def add(self, rule: Rule) -> None:
        with self._lock:
            self.rules.append(rule)
            self._seen.append(0)

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()
            self._seen.clear()

    def record(self, call: Call) -> None:
        with self._lock:
            self.calls.append(call)

    def faults_for(self, verb: str, path: str) -> list[Fault]:
        """Count a call that begins, and return what happens to it."""
        hit: list[Fault] = []
        with self._lock:
            for number, rule in enumerate(self.rules):
                if rule.verb != verb or not fnmatch.fnmatchcase(path, rule.path):
                    continue
                self._seen[number] += 1
                past = self._seen[number] - rule.nth
                if past >= 0 and (rule.times is None or past < rule.times):
                    hit.append(rule.fault)
        return hit


def _watched(verb: str) -> Callable[..., Any]:
    """Return a method that passes `verb` on, through the rules."""

    def method(self: "FaultyFileSystem", path: Any = "", *args: Any, **kwargs: Any) -> Any:
        given = () if verb == "invalidate_cache" and not path else (path,)
        return self._through(verb, path, lambda: getattr(self.fs, verb)(*given, *args, **kwargs))

    method.__name__ = verb
    method.__doc__ = f"Pass on to `{verb}` of the filesystem behind."
    return method


class FaultyFileSystem(DirFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Any filesystem, with faults; see the module's docstring. Safe to use from many threads.

    It counts as the filesystem behind it when it is asked what it can be trusted with. A pickled copy has the same
    rules and begins to count anew.

    Args:
        fs: The filesystem behind.
        rules: Faults to begin with; `inject` adds more.
    """

    cachable = False

    def __init__(self, fs: AbstractFileSystem, rules: Sequence[Rule] = (), **kwargs: Any) -> None:
        super().__init__(path="/", fs=fs, **kwargs)
        self.path = ""  # Paths mean here what they mean behind.
        self.protocol = fs.protocol
        self._strip_protocol = fs._strip_protocol
        self._tally = _Tally(rules)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fs, tuple(self._tally.rules))

    def inject(self, verb: str, fault: Fault, *, path: str = "*", nth: int = 1, times: int | None = 1) -> None:
        """Add a `Rule`; its count begins now. All rules that fit a call take effect on it, in their order.

        Raises:
            ValueError: the fault could never take effect on `verb`.
        """
        self._tally.add(Rule(verb, fault, path, nth, times))

    def heal(self) -> None:
        """Forget all rules, not what was written down."""
        self._tally.clear()

    @property
    def calls(self) -> list[Call]:
        """All calls that have returned or failed so far, in order."""
        return list(self._tally.calls)

    def count(self, verb: str, path: str = "*") -> int:
        """Return how many calls of `verb` there were whose path fits a shell pattern."""
        return len(self._matching(verb, path))

    def num_bytes(self, verb: str, path: str = "*") -> int:
        """Return how many bytes the calls of `verb` moved whose path fits a shell pattern."""
        return sum(call.num_bytes for call in self._matching(verb, path))

    def _matching(self, verb: str, path: str) -> list[Call]:
        return [call for call in self.calls if call.verb == verb and fnmatch.fnmatchcase(call.path, path)]

    # Calls with data -------------------------------------------------------------------------------------

    def pipe_file(self, path: str, value: Any, **kwargs: Any) -> Any:
        """Write `value`, or what the rules make of it."""
        return self._through("pipe_file", path, lambda data: self.fs.pipe_file(path, data, **kwargs), value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        """Return what is there, or what the rules make of it."""
        return self._through("cat_file", path, lambda: self.fs.cat_file(path, start=start, end=end, **kwargs))

    # Calls without ---------------------------------------------------------------------------------------

    cp_file = _watched("cp_file")
    exists = _watched("exists")
    find = _watched("find")
    info = _watched("info")
    invalidate_cache = _watched("invalidate_cache")
    isdir = _watched("isdir")
    isfile = _watched("isfile")
    ls = _watched("ls")
    makedirs = _watched("makedirs")
    mkdir = _watched("mkdir")
    mv = _watched("mv")
    open = _watched("open")
    rm = _watched("rm")
    rm_file = _watched("rm_file")
    touch = _watched("touch")

    def _through(self, verb: str, path: Any, call: Callable[..., Any], *data: Any) -> Any:
        """Make `call` (of `data`, if it writes) as the rules want it, and write it down."""
        name = path if isinstance(path, str) else str(path)
        faults = self._tally.faults_for(verb, name)
        num_bytes = len(data[0]) if data else 0
        try:
            _before(faults)
            for fault in faults if data else ():
                data = (_changed(data[0], fault),)
            answer: Any = None if any(isinstance(fault, Drop) for fault in faults) else call(*data)
            if verb in _READS:
                num_bytes = len(answer)
                for fault in faults:
                    answer = _changed(answer, fault)
            _afterwards(faults)
            return answer
        finally:
            self._tally.record(Call(verb, name, num_bytes))


def _before(faults: Sequence[Fault]) -> None:
    for fault in faults:
        if isinstance(fault, Delay):
            time.sleep(fault.seconds)
        elif isinstance(fault, Fail) and not fault.carried_out:
            raise fault.error


def _afterwards(faults: Sequence[Fault]) -> None:
    for fault in faults:
        if isinstance(fault, Fail | Truncate) and fault.error is not None:
            raise fault.error


def _changed(data: Any, fault: Fault) -> Any:
    if isinstance(fault, Truncate):
        return bytes(data)[: len(data) // 2 if fault.keep_bytes is None else fault.keep_bytes]
    if isinstance(fault, Flip) and len(data):
        flipped = bytearray(data)
        bit = len(data) * 4 if fault.bit is None else fault.bit
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)
    return data
