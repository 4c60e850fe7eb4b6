"""Look through a pickle before it is run, for what an allow-list of globals does not stop.

Four tricks need no dangerous global. A single opcode may make the unpickler's memo as large as it likes, and so take
all memory; a tuple nested a hundred thousand times deep, used as a key, overflows the C stack when it is hashed; one
long list, written once, may be handed to thousands of calls, each of which copies it; and a class or function that a
pickle names may be given attributes, which stay. This scan runs nothing: it follows the opcodes, and with them how deep
each tuple on the stack is, how much each container holds, and what was named.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass

MAX_SCANNED_BYTES = 1 << 20
"""Larger files, of more than some six thousand items, are not scanned: that takes three times as long as opening."""

_MAX_DEPTH = 200
_MAX_MEMO_SLACK = 1 << 16
_LONG_STRING_BYTES = 64
_MAX_SMALL = 16
"""Copies of tuples with so few elements are not counted: those made of opcodes alone grow as fast."""


_VARIABLE = {"string1": 1, "unicodestring1": 1, "bytes1": 1, "long1": 1}
_VARIABLE |= {"string4": 4, "unicodestring4": 4, "bytes4": 4, "long4": 4}
_VARIABLE |= {"unicodestring8": 8, "bytes8": 8, "bytearray8": 8}
_FIXED = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}

_PUSH_GET = {"BINGET", "LONG_BINGET"}
_PUT = {"BINPUT", "LONG_BINPUT"}
_REFUSED = {"PERSID", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEXT_BUFFER", "READONLY_BUFFER"}
# The memo in the words of protocol 0, which nobody has written for decades.
_REFUSED |= {"GET", "PUT"}


_MARK = -1
_Effect = Callable[["_Machine"], None]


class ScanError(ValueError):
    """The pickle was refused. Nothing was run."""


class LastingChangeError(ScanError):
    """It would change what lives on after it."""


class _Sized(int):
    """A value that a call would copy: its depth, and `size`, the number of its elements or bytes."""

    size = 0


def _sized(size: int, depth: int = 0) -> _Sized:
    value = _Sized(depth)
    value.size = size
    return value


class _Named(int):
    """A class, a function or another thing that lasts, of which the pickle says the name."""


class _Machine:
    """The unpickler's stack and memo, each value replaced by the depth of tuples in it.

    Args:
        max_copied: How many elements and bytes all calls together may be handed.
    """

    def __init__(self, max_copied: int) -> None:
        self.stack: list[int] = []
        self._memo: dict[int, int] = {}
        self._left = max_copied

    def memo(self, put: bool, index: int, size: int) -> None:
        if not put:
            self.stack.append(self._memo.get(index, 0))
            return
        if index > size + _MAX_MEMO_SLACK:
            raise ScanError(f"it asks for a memo of {index} entries")
        self._memo[index] = self._top()

    def _top(self) -> int:
        if not self.stack or self.stack[-1] == _MARK:
            raise ScanError("it uses a value that is not there")
        return self.stack[-1]

    def _pop(self, count: int) -> list[int]:
        values = self.stack[-count:]
        if len(values) < count or _MARK in values:
            raise ScanError("it uses a value that is not there")
        del self.stack[-count:]
        return values

    def _pop_to_mark(self) -> list[int]:
        values: list[int] = []
        while self.stack:
            value = self.stack.pop()
            if value == _MARK:
                return values
            values.append(value)
        raise ScanError("it uses a mark that is not there")

    def push_tuple(self, values: list[int]) -> None:
        depth, size = 1, len(values)
        for value in values:
            if value >= depth:
                depth = value + 1
            if isinstance(value, _Sized):
                size += value.size
        if depth > _MAX_DEPTH:
            raise ScanError(f"it nests tuples more than {_MAX_DEPTH} deep")
        self.stack.append(_sized(size, depth) if size > _MAX_SMALL else depth)

    def tuple_of(self, count: int) -> None:
        self.push_tuple(self._pop(count))

    def tuple_to_mark(self) -> None:
        self.push_tuple(self._pop_to_mark())

    def container(self) -> None:
        self.stack.append(_Sized())

    def container_to_mark(self) -> None:
        self.stack.append(_sized(len(self._pop_to_mark())))

    def add(self, count: int) -> None:
        """Put `count` values into the container below them."""
        self._pop(count)
        self._grow(count)

    def add_to_mark(self) -> None:
        self._grow(len(self._pop_to_mark()))

    def _grow(self, count: int) -> None:
        container = self._top()
        if isinstance(container, _Sized):
            container.size += count

    def call(self, count: int) -> None:
        """Replace a function and what it is handed by what it returns."""
        size = sum(_size(value) for value in self._pop(count))
        self._copy(size)
        self.stack.append(_sized(size) if size else 0)

    def build(self) -> None:
        self._copy(_size(*self._pop(1)))
        if isinstance(self._top(), _Named):
            raise LastingChangeError("it tries to change a class or a function")

    def _copy(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ScanError("it makes many copies of the same values")

    def replace(self, count: int) -> None:
        self._pop(count)
        self.stack.append(0)

    def name(self, count: int) -> None:
        """Replace the parts of a name, if they are on the stack, by what it stands for."""
        if count:
            self._pop(count)
        self.stack.append(_Named())

    def drop(self, count: int) -> None:
        self._pop(count)

    def drop_to_mark(self) -> None:
        self._pop_to_mark()

    def mark(self) -> None:
        self.stack.append(_MARK)

    def remember(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def duplicate(self) -> None:
        self.stack.append(self._top())

    def pop_any(self) -> None:
        if not self.stack:
            raise ScanError("it uses a value that is not there")
        self.stack.pop()

    def nothing(self) -> None:
        return None


def _size(value: int) -> int:
    return value.size if isinstance(value, _Sized) else 0


def _stop(machine: _Machine) -> None:
    """Mark the opcode that ends a pickle."""


def _uses_memo(machine: _Machine) -> None:
    """Mark the opcodes that need their argument."""


# Opcodes that are not named here push one plain value.
_EFFECTS: dict[str, _Effect] = {
    "STOP": _stop,
    **dict.fromkeys(_PUT | _PUSH_GET, _uses_memo),
    "PROTO": _Machine.nothing,
    "FRAME": _Machine.nothing,
    "MARK": _Machine.mark,
    "POP": _Machine.pop_any,
    "POP_MARK": _Machine.drop_to_mark,
    "DUP": _Machine.duplicate,
    "MEMOIZE": _Machine.remember,
    "TUPLE": _Machine.tuple_to_mark,
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "APPEND": lambda machine: machine.add(1),
    "APPENDS": _Machine.add_to_mark,
    "SETITEM": lambda machine: machine.add(2),
    "SETITEMS": _Machine.add_to_mark,
    "ADDITEMS": _Machine.add_to_mark,
    "EMPTY_LIST": _Machine.container,
    "EMPTY_DICT": _Machine.container,
    "EMPTY_SET": _Machine.container,
    "LIST": _Machine.container_to_mark,
    "DICT": _Machine.container_to_mark,
    "FROZENSET": _Machine.container_to_mark,
    "BUILD": _Machine.build,
    "REDUCE": lambda machine: machine.call(2),
    "NEWOBJ": lambda machine: machine.call(2),
    "NEWOBJ_EX": lambda machine: machine.call(3),
    "BINPERSID": lambda machine: machine.replace(1),
    "GLOBAL": lambda machine: machine.name(0),
    "STACK_GLOBAL": lambda machine: machine.name(2),
}


@dataclass(frozen=True)
class _Op:
    name: str
    fixed: int
    length_bytes: int
    lines: int
    effect: _Effect | None


def _table() -> list[_Op | None]:
    table: list[_Op | None] = [None] * 256
    for op in pickletools.opcodes:
        kind = op.arg.name if op.arg else ""
        lines = 2 if kind == "stringnl_noescape_pair" else 0 if not kind else 1
        fixed, variable = _FIXED.get(kind, 0), _VARIABLE.get(kind, 0)
        if op.name not in _REFUSED:
            lines = 0 if fixed or variable else lines
            table[ord(op.code)] = _Op(op.name, fixed, variable, lines, _EFFECTS.get(op.name))
    return table


_OPS = _table()


def scan(data: bytes, *, persistent_ids: bool = False) -> None:
    """Follow the opcodes of `data` to its end.

    Args:
        data: A pickle.
        persistent_ids: It may refer to storages beside it.

    Raises:
        ScanError: it ends early, uses an opcode that is not needed, a memo out of proportion, nests too deep, or
            copies much more than it is long.
    """
    machine = _Machine(4 * len(data) + _MAX_MEMO_SLACK)
    push = machine.stack.append
    position, end = 0, len(data)
    while position < end:
        op = _OPS[data[position]]
        if op is None or (op.name == "BINPERSID" and not persistent_ids):
            raise ScanError(f"opcode {data[position]:#04x} at byte {position} is not used by checkpoints")
        argument = position = position + 1
        if op.fixed:
            position += op.fixed
        elif op.length_bytes:
            position += op.length_bytes
            length = int.from_bytes(data[argument:position], "little")
            position += length
            if length > _LONG_STRING_BYTES:
                push(_sized(length))
                continue
        elif op.lines:
            for _ in range(op.lines):
                position = data.find(b"\n", position) + 1 or end + 1
        if position > end:
            raise ScanError("it is cut short")
        if op.effect is None:
            push(0)
        elif op.effect is _stop:
            return
        elif op.effect is _uses_memo:
            machine.memo(op.name in _PUT, int.from_bytes(data[argument:position], "little"), end)
        else:
            op.effect(machine)
    raise ScanError("it is cut short")
