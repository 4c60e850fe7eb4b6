"""States of real shapes: the tensors of known encoders and decoders, with or without those of their optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a state.

    Attributes:
        name: Its key.
        shape: Of the whole tensor, all ranks together.
        dtype: Of its elements.
        tp_dim: Along which tensor parallelism cuts it; None: not at all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    tp_dim: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shape:
    """The sizes that make a transformer.

    Attributes:
        vocabulary: Tokens.
        hidden: Width.
        layers: Depth.
        inner: Width of the feed-forward part.
        kv: Width of keys and values.
        gated: Three feed-forward matrices, no biases, an output matrix: a decoder of today. Else an encoder.
        positions: Learned positions.
    """

    vocabulary: int
    hidden: int
    layers: int
    inner: int
    kv: int
    gated: bool = True
    positions: int = 0


PRESETS = {
    "minilm-22m": Shape(30522, 384, 6, 1536, 384, gated=False, positions=512),
    "bert-110m": Shape(30522, 768, 12, 3072, 768, gated=False, positions=512),
    "bert-340m": Shape(30522, 1024, 24, 4096, 1024, gated=False, positions=512),
    "decoder-1b": Shape(128256, 2048, 16, 8192, 512),
    "decoder-8b": Shape(128256, 4096, 32, 14336, 1024),
    "decoder-70b": Shape(128256, 8192, 80, 28672, 1024),
}


def preset(name: str, *, dtype: torch.dtype, optimizer: bool, fraction: float = 1.0) -> list[TensorSpec]:
    """Return the tensors of a preset.

    Args:
        name: One of `PRESETS`.
        dtype: Of the parameters.
        optimizer: Add the two moments (float32) and the step of Adam, for each parameter.
        fraction: Keep this share of the rows of each matrix, as the ranks at hand would hold it in a job of more ranks.
    """
    shape = PRESETS[name]
    layer = _decoder_layer if shape.gated else _encoder_layer
    parameters = [*_ends(shape)]
    for number in range(shape.layers):
        parameters += [replace(one, name=f"layers.{number}.{one.name}") for one in layer(shape)]
    model = [replace(one, name=f"model.{one.name}", dtype=dtype) for one in parameters]
    state = [*model, *(moment for one in model for moment in _adam(one))] if optimizer else model
    return [_share(one, fraction) for one in state]


def small_tensors(number: int, num_bytes: int) -> list[TensorSpec]:
    """Return many tensors of `num_bytes` each."""
    elements = max(1, num_bytes // 4)
    return [TensorSpec(f"part{index // 1000}.tensor{index}", (elements,)) for index in range(number)]


def plain_tensors(total_bytes: int, number: int) -> list[TensorSpec]:
    """Return `number` float32 matrices of 1024 columns that make up about `total_bytes`."""
    rows = max(1, total_bytes // number // 4096)
    return [TensorSpec(f"layers.{index}.weight", (rows, 1024), tp_dim=index % 2) for index in range(number)]


def _ends(shape: Shape) -> Iterator[TensorSpec]:
    yield TensorSpec("embeddings.weight", (shape.vocabulary, shape.hidden), tp_dim=0)
    yield TensorSpec("norm.weight", (shape.hidden,))
    if shape.gated:
        yield TensorSpec("output.weight", (shape.vocabulary, shape.hidden), tp_dim=0)
    else:
        yield TensorSpec("positions.weight", (shape.positions, shape.hidden))
        yield TensorSpec("types.weight", (2, shape.hidden))
        yield TensorSpec("norm.bias", (shape.hidden,))


def _attention(shape: Shape) -> Iterator[TensorSpec]:
    yield TensorSpec("attention.wq.weight", (shape.hidden, shape.hidden), tp_dim=0)
    yield TensorSpec("attention.wk.weight", (shape.kv, shape.hidden), tp_dim=0)
    yield TensorSpec("attention.wv.weight", (shape.kv, shape.hidden), tp_dim=0)
    yield TensorSpec("attention.wo.weight", (shape.hidden, shape.hidden), tp_dim=1)


def _decoder_layer(shape: Shape) -> Iterator[TensorSpec]:
    yield from _attention(shape)
    yield TensorSpec("feed_forward.w1.weight", (shape.inner, shape.hidden), tp_dim=0)
    yield TensorSpec("feed_forward.w2.weight", (shape.hidden, shape.inner), tp_dim=1)
    yield TensorSpec("feed_forward.w3.weight", (shape.inner, shape.hidden), tp_dim=0)
    yield TensorSpec("attention_norm.weight", (shape.hidden,))
    yield TensorSpec("ffn_norm.weight", (shape.hidden,))


def _encoder_layer(shape: Shape) -> Iterator[TensorSpec]:
    for one in _attention(shape):
        yield one
        yield TensorSpec(one.name.replace("weight", "bias"), one.shape[:1])
    yield TensorSpec("intermediate.weight", (shape.inner, shape.hidden), tp_dim=0)
    yield TensorSpec("intermediate.bias", (shape.inner,))
    yield TensorSpec("output.weight", (shape.hidden, shape.inner), tp_dim=1)
    yield TensorSpec("output.bias", (shape.hidden,))
    for norm in ("attention_norm", "output_norm"):
        yield TensorSpec(f"{norm}.weight", (shape.hidden,))
        yield TensorSpec(f"{norm}.bias", (shape.hidden,))


def _adam(parameter: TensorSpec) -> Iterator[TensorSpec]:
    name = parameter.name.replace("model.", "optim.state.", 1)
    for moment in ("exp_avg", "exp_avg_sq"):
        yield replace(parameter, name=f"{name}.{moment}", dtype=torch.float32)
    yield TensorSpec(f"{name}.step", ())


def _share(one: TensorSpec, fraction: float) -> TensorSpec:
    if fraction >= 1 or len(one.shape) < 2:
        return one
    return replace(one, shape=(max(1, round(one.shape[0] * fraction)), *one.shape[1:]))
