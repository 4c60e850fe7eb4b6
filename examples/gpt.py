"""A small GPT on the bytes of a text: enough to learn how words are spelled, small enough for any machine."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT = Path(__file__).with_name("lighthouse.txt")
BYTES = 256  # every byte is a token
CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2
DROPOUT = 0.1


class Layer(nn.Module):
    """Attention to what came before, then the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_output = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:-1], HEADS, WIDTH // HEADS).transpose(1, 2)

        query, key, value = map(heads, self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.attention_output(attended.transpose(1, 2).flatten(2)))
        output: Tensor = hidden + self.dropout(self.feed_forward(hidden))
        return output


class GPT(nn.Module):
    """Predicts the next byte. Called with a batch of `Text`, it returns the loss."""

    learning_rate = 3e-3

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross entropy of `following`, the bytes that come after each of `tokens`."""
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.output(self.norm(hidden)).flatten(0, 1), following.flatten())


class Text:
    """All windows of a text, one beginning at each byte."""

    def __init__(self, path: Path = TEXT) -> None:
        self._bytes = torch.tensor(list(path.read_bytes()))

    def __len__(self) -> int:
        return len(self._bytes) - CONTEXT

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that begin at `places`, and the bytes that follow."""
        windows = self._bytes[places[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]
