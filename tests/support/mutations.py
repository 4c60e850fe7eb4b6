"""Damage and malice for the fuzzer: from good bytes to bad ones, all by one seeded generator of random numbers."""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from random import Random

_NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, -1)
_GLOBALS = (
    "torch Size",
    "torch float32",
    "torch int8",
    "torch Tensor",
    "torch FloatTensor",
    "torch FloatStorage",
    "torch device",
    "torch.storage UntypedStorage",
    "torch.serialization _get_layout",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage",
    "torch._utils _rebuild_nested_tensor",
    "torch._utils _rebuild_wrapper_subclass",
    "torch._tensor _rebuild_from_type_v2",
    "torch.nn.parameter Parameter",
    "collections OrderedDict",
    "collections Counter",
    "builtins set",
    "builtins bytearray",
    "builtins complex",
    "builtins getattr",
    "builtins eval",
    "os system",
    "_codecs encode",
    "pathlib PosixPath",
    *(
        f"torch.distributed.checkpoint.metadata {name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
)
_TEXTS = ("storage", "0", "cpu", "w", "values", "__0_0.distcp", "../x", "state_dict_metadata", "storage_data", "latin1")
_PLAIN_OPS = b"().]}\x8fNtebRauds0lo\x88\x89\x85\x86\x87\x81\x92\x94\x93\x90\x91Q2"


def mutated(random: Random, data: bytes, others: list[bytes]) -> bytes:
    """Return `data`, changed in one to four places, perhaps with pieces of `others`."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice((_flip, _cut, _delete, _insert, _repeat, _splice, _number))(random, data, others)
    return data


def _place(random: Random, data: bytes) -> int:
    return random.randrange(len(data) + 1)


def _flip(random: Random, data: bytes, others: list[bytes]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(random: Random, data: bytes, others: list[bytes]) -> bytes:
    return data[: _place(random, data)]


def _delete(random: Random, data: bytes, others: list[bytes]) -> bytes:
    at = _place(random, data)
    return data[:at] + data[at + random.choice((1, 2, 8, 100)) :]


def _insert(random: Random, data: bytes, others: list[bytes]) -> bytes:
    at = _place(random, data)
    return data[:at] + random.randbytes(random.choice((1, 2, 4, 9))) + data[at:]


def _repeat(random: Random, data: bytes, others: list[bytes]) -> bytes:
    at = _place(random, data)
    piece = data[at : at + random.choice((1, 3, 40, 400))]
    return data[:at] + piece * random.choice((2, 3, 50)) + data[at:]


def _splice(random: Random, data: bytes, others: list[bytes]) -> bytes:
    other = random.choice(others)
    start, at = _place(random, other), _place(random, data)
    length = random.choice((4, 60, 1000))
    return data[:at] + other[start : start + length] + data[at + random.choice((0, length)) :]


def _number(random: Random, data: bytes, others: list[bytes]) -> bytes:
    at, width = _place(random, data), random.choice((1, 2, 4, 8))
    number = random.choice(_NUMBERS) % (1 << 8 * width)
    return data[:at] + number.to_bytes(width, random.choice(("little", "big"))) + data[at + width :]


def mutated_program(random: Random, program: bytes) -> bytes:
    """Return a pickle of which some opcodes were dropped, doubled, moved or given another argument."""
    try:
        starts = [position for _, _, position in pickletools.genops(program) if position is not None]
    except Exception:
        return program
    ops = [program[start:stop] for start, stop in zip(starts, [*starts[1:], len(program)], strict=True)]
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        at = random.randrange(len(ops))
        kind = random.randrange(5)
        if kind == 0:
            del ops[at]
        elif kind == 1:
            ops.insert(at, ops[random.randrange(len(ops))])
        elif kind == 2:
            ops[at] = ops[random.randrange(len(ops))]
        elif kind == 3:
            ops[at : at + 1] = [random_op(random), *([ops[at]] if random.random() < 0.5 else [])]
        else:
            ops[at : at + 1] = [ops[at]] * random.choice((2, 2, 300))
        if not ops:
            break
    # The frames of protocol 4 would no longer fit, and pickle does without them.
    return b"".join(op for op in ops if not op.startswith(b"\x95"))


def random_op(random: Random) -> bytes:
    """Return an opcode with its argument."""
    kind = random.randrange(7)
    if kind == 0:
        module, name = random.choice(_GLOBALS).split()
        return b"c%b\n%b\n" % (module.encode(), name.encode())
    if kind == 1:
        number = random.choice(_NUMBERS)
        return b"\x8a\x0a" + number.to_bytes(10, "little", signed=True)
    if kind == 2:
        text = random.choice(_TEXTS).encode()
        return b"X" + len(text).to_bytes(4, "little") + text
    if kind == 3:
        return random.choice((b"h", b"q")) + bytes([random.randrange(30)])
    if kind == 4:
        return random.choice((b"j", b"r")) + random.choice((3, 300, 1 << 30)).to_bytes(4, "little")
    if kind == 5:
        return b"K" + bytes([random.randrange(256)])
    return bytes([random.choice(_PLAIN_OPS)])


def random_program(random: Random) -> bytes:
    """Return a pickle of random opcodes, of which many find on the stack what they need."""
    ops = [b"\x80" + bytes([random.choice((2, 4))])]
    for _ in range(random.choice((3, 10, 40, 200))):
        shape = random.randrange(4)
        if shape == 0:
            ops.append(random_op(random))
        elif shape == 1:  # A call.
            arguments = b"".join(random_op(random) for _ in range(random.randrange(4)))
            module, name = random.choice(_GLOBALS).split()
            call = random.choice((b"R", b"\x81"))
            ops.append(b"c%b\n%b\n(%bt%b" % (module.encode(), name.encode(), arguments, call))
        elif shape == 2:  # A dict, perhaps as the state of what lies below it.
            ops.append(b"}" + b"X\1\0\0\0k" + random_op(random) + b"s" + random.choice((b"", b"b")))
        else:
            ops.append(random.choice((b"]K\1a", b"(K\1K\2t", b"N", b"(NN\x90")))
    return b"".join(ops) + b"."


def mutated_archive(random: Random, archive: bytes, others: list[bytes]) -> bytes:
    """Return an archive of torch.save with another pickle, a record that is compressed, renamed, doubled or cut."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as good:
            records = [(entry.filename, good.read(entry)) for entry in good.infolist()]
    except Exception:
        return mutated(random, archive, others)
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if random.random() < 0.2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as bad:
        for name, content in records:
            if name.endswith("data.pkl"):
                kind = random.randrange(4)
                changed = random_program(random) if kind == 0 else mutated_program(random, content)
            else:
                changed = mutated(random, content, others) if random.random() < 0.1 else content
            if random.random() < 0.02:
                name = random.choice((name.upper(), name + "x", "../x", "/x", "other/data.pkl"))
            if name in bad.namelist() or random.random() < 0.01:
                continue
            bad.writestr(name, changed)
    return stream.getvalue()


def mutated_json(random: Random, data: bytes) -> bytes:
    """Return a JSON document with one value replaced by a strange one."""
    try:
        document = json.loads(data)
    except ValueError:
        return data
    inner = document
    while isinstance(inner, dict | list) and inner:
        key = random.choice(list(inner)) if isinstance(inner, dict) else random.randrange(len(inner))
        if not isinstance(inner[key], dict | list) or not inner[key] or random.random() < 0.2:
            inner[key] = random.choice((*_NUMBERS, None, "", "x", [], {}, 1e300, float("inf"), float("nan"), True))
            break
        inner = inner[key]
    return json.dumps(document).encode()
