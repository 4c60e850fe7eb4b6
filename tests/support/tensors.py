"""Tensors of every kind, and their comparison bit for bit."""

from __future__ import annotations

from typing import Any

import torch

# Not every torch has all of these.
_SMALL_FLOATS = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
_ORDINARY = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)


def all_dtypes() -> list[torch.dtype]:
    """Return every dtype that this torch can save."""
    small_floats = [getattr(torch, name) for name in _SMALL_FLOATS if hasattr(torch, name)]
    return [*_ORDINARY, *small_floats]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements' bytes in logical order, whatever the strides."""
    if tensor.numel() == 0:
        return b""
    contiguous = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return contiguous.reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return a contiguous tensor of random bits, odd NaNs among them; bool gets 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    num_elements = torch.Size(shape).numel()
    num_bytes = num_elements * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    filled = torch.randint(0, limit, (num_bytes,), dtype=torch.uint8, generator=generator)
    # Through the storage: `view(dtype)` is not there for all kinds.
    return torch.empty(0, dtype=dtype).set_(filled.untyped_storage(), 0, shape)  # type: ignore[call-overload, no-any-return]


def assert_bits_equal(got: Any, wanted: Any, path: str = "state") -> None:
    """Compare values, or nested dicts, lists and tuples of them; tensors by dtype, shape and every bit.

    Raises:
        AssertionError: names the first place that differs.
    """
    if isinstance(wanted, torch.Tensor):  # a plain tensor and a parameter may be equal
        assert isinstance(got, torch.Tensor), f"{path}: got {type(got)}, wanted a tensor"
        assert got.dtype == wanted.dtype, f"{path}: got {got.dtype}, wanted {wanted.dtype}"
        assert got.shape == wanted.shape, f"{path}: got {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
        assert raw_bytes(got) == raw_bytes(wanted), f"{path}: bytes differ"
        return
    assert type(got) is type(wanted), f"{path}: got {type(got)}, wanted {type(wanted)}"
    if isinstance(wanted, dict):
        assert list(got) == list(wanted), f"{path}: got keys {list(got)}, wanted {list(wanted)}"
        for key in wanted:
            assert_bits_equal(got[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), f"{path}: got {len(got)} elements, wanted {len(wanted)}"
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_bits_equal(one, other, f"{path}[{index}]")
    else:
        assert got == wanted, f"{path}: got {got!r}, wanted {wanted!r}"


def blank_like(value: Any) -> Any:
    """Return a state of the same structure to load into: zeroed contiguous tensors, emptied other values."""
    if isinstance(value, torch.Tensor):
        zeros = torch.zeros(value.numel() * value.dtype.itemsize, dtype=torch.uint8)
        return torch.empty(0, dtype=value.dtype).set_(zeros.untyped_storage(), 0, value.shape)  # type: ignore[call-overload]
    if isinstance(value, dict):
        return {key: blank_like(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank_like(inner) for inner in value]
    if isinstance(value, tuple):
        return tuple(blank_like(inner) for inner in value)
    return type(value)()


def state_of_all_dtypes() -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype, with rows enough to be cut."""
    return {
        str(dtype).removeprefix("torch."): random_tensor(7, 6, dtype=dtype, seed=number)
        for number, dtype in enumerate(all_dtypes())
    }


def state_of_all_shapes() -> dict[str, torch.Tensor]:
    """Return float32 tensors of every layout that training meets."""
    base = random_tensor(6, 8, seed=1)
    image = random_tensor(2, 3, 4, 5, seed=2)
    return {
        "scalar": random_tensor(seed=3),
        "empty": random_tensor(0),
        "empty_inside": random_tensor(3, 0, 2),
        "one": random_tensor(1, seed=4),
        "ones": random_tensor(1, 1, 1, seed=5),
        "row": random_tensor(1, 9, seed=6),
        "column": random_tensor(9, 1, seed=7),
        "matrix": base,
        "transposed": random_tensor(5, 4, seed=8).t(),
        "channels_last": image.to(memory_format=torch.channels_last),
        "permuted": image.permute(3, 0, 2, 1),
        "expanded": random_tensor(1, 5, seed=9).expand(4, 5),
        "expanded_scalar": random_tensor(seed=10).expand(3),
        "strided": random_tensor(10, 10, seed=11)[::3, 1::2],
        "narrowed": random_tensor(100, seed=12)[37:41],
        "shares_rows_of_matrix": base[2:4],
        "is_matrix_again": base,
        "parameter": torch.nn.Parameter(random_tensor(3, 3, seed=13)),
    }


def state_of_python_values() -> dict[str, Any]:
    """Return values that are no tensors, nested as optimizers and trainers nest them."""
    return {
        "int": 3,
        "big_int": 2**80,
        "float": 0.1,
        "text": "naïve ☃",
        "bytes": b"\x00\xff" * 100,
        "none": None,
        "flag": True,
        "list": [1, 2.5, "three", random_tensor(2, 2, seed=20)],
        "tuple": (1, (2, 3)),
        "nested": {"a": {"b": {"c": random_tensor(4, seed=21), "d": 5}}, "empty": {}},
    }


def state_of_everything(*, large_bytes: int = 3 << 20) -> dict[str, Any]:
    """Return all of the above and a few tensors larger than a shard.

    Args:
        large_bytes: size of each large tensor; choose the writer's `shard_bytes` smaller.
    """
    rows = large_bytes // 1024
    return {
        "dtypes": state_of_all_dtypes(),
        "shapes": state_of_all_shapes(),
        "values": state_of_python_values(),
        "large": {
            "matrix": random_tensor(rows, 256, seed=30),
            "flat": random_tensor(large_bytes // 4 + 3, seed=31),
            "half": random_tensor(rows, 512, dtype=torch.bfloat16, seed=32),
            "one_row": random_tensor(1, large_bytes // 4, seed=33),
        },
    }
