"""Look through a pickle before it is run, for what an allow-list of globals does not stop.

Two tricks need no global at all. A single opcode may make the unpickler's memo as large as it likes, and so take all
memory; and a tuple nested a hundred thousand times deep, used as a key, overflows the C stack when it is hashed. This
scan runs nothing: it follows the opcodes, and with them how deep each tuple on the stack is.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass

MAX_SCANNED_BYTES = 1 << 20
"""Larger files, of more than some six thousand items, are not scanned: that takes three times as long as opening."""

_MAX_DEPTH = 200
_MAX_MEMO_SLACK = 1 << 16

_VARIABLE = {"string1": 1, "unicodestring1": 1, "bytes1": 1, "long1": 1}
_VARIABLE |= {"string4": 4, "unicodestring4": 4, "bytes4": 4, "long4": 4}
_VARIABLE |= {"unicodestring8": 8, "bytes8": 8, "bytearray8": 8}
_FIXED = {"uint1": 1, "uint2": 2, "int4": 4, "uint4": 4, "uint8": 8, "float8": 8}

_PUSH_GET = {"BINGET", "LONG_BINGET"}
_PUT = {"BINPUT", "LONG_BINPUT"}
_REFUSED = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEXT_BUFFER", "READONLY_BUFFER"}


_MARK = -1
_Effect = Callable[["_Machine"], None]


class ScanError(ValueError):
    """The pickle was refused. Nothing was run."""


class _Machine:
    """The unpickler's stack and memo, each value replaced by the depth of tuples in it."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self._memo: dict[int, int] = {}

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
        values = [self.stack.pop() for _ in range(min(count, len(self.stack)))]
        if len(values) < count or _MARK in values:
            raise ScanError("it uses a value that is not there")
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
        depth = 1 + max(values, default=0)
        if depth > _MAX_DEPTH:
            raise ScanError(f"it nests tuples more than {_MAX_DEPTH} deep")
        self.stack.append(depth)

    def tuple_of(self, count: int) -> None:
        self.push_tuple(self._pop(count))

    def tuple_to_mark(self) -> None:
        self.push_tuple(self._pop_to_mark())

    def replace(self, count: int) -> None:
        self._pop(count)
        self.stack.append(0)

    def replace_to_mark(self) -> None:
        self._pop_to_mark()
        self.stack.append(0)

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
    "APPEND": lambda machine: machine.drop(1),
    "APPENDS": _Machine.drop_to_mark,
    "SETITEM": lambda machine: machine.drop(2),
    "SETITEMS": _Machine.drop_to_mark,
    "ADDITEMS": _Machine.drop_to_mark,
    "LIST": _Machine.replace_to_mark,
    "DICT": _Machine.replace_to_mark,
    "FROZENSET": _Machine.replace_to_mark,
    "BUILD": lambda machine: machine.drop(1),
    "REDUCE": lambda machine: machine.replace(2),
    "NEWOBJ": lambda machine: machine.replace(2),
    "NEWOBJ_EX": lambda machine: machine.replace(3),
    "STACK_GLOBAL": lambda machine: machine.replace(2),
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


def scan(data: bytes) -> None:
    """Follow the opcodes of `data` to its end.

    Raises:
        ScanError: it ends early, uses an opcode that metadata never needs, a memo out of proportion, or nests too deep.
    """
    machine = _Machine()
    push = machine.stack.append
    position, end = 0, len(data)
    while position < end:
        op = _OPS[data[position]]
        if op is None:
            raise ScanError(f"opcode {data[position]:#04x} at byte {position} is not used by checkpoint metadata")
        argument = position = position + 1
        if op.fixed:
            position += op.fixed
        elif op.length_bytes:
            position += op.length_bytes
            position += int.from_bytes(data[argument:position], "little")
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
