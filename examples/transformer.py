"""A small GPT that reads characters, and the texts that it learns from."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import TensorDataset


def heads_of(width: int) -> int:
    """How many heads a GPT of so many dimensions has: of 64 dimensions each, or one of fewer."""
    return max(1, width // 64)


class Layer(nn.Module):
    """Causal attention and a two-layer perceptron, each with a normalization before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.linear = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.linear(self.before_linear(x))
        return out


class GPT(nn.Module):
    """A character model; of 6 layers and 384 dimensions, with 10.7 million parameters.

    Args:
        symbols: Number of different characters.
        length: Most characters that it reads at once.
        width: Dimensions; there is a head for each 64.
        layers: Number of layers.
    """

    def __init__(self, symbols: int, length: int, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, width), nn.Embedding(length, width)
        heads = heads_of(width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.output = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[batch, length, symbols]` of the next character, given characters `[batch, length]`."""
        scores: Tensor = self.output(self.layers(self.symbols(x) + self.positions.weight[: x.shape[1]]))
        return scores


class Characters(NamedTuple):
    """A text as numbers.

    Attributes:
        numbers: `[characters]` int64, each below `symbols`.
        symbols: How many different characters there are.
    """

    numbers: Tensor
    symbols: int


def read_characters(path: Path) -> Characters:
    """A text in UTF-8."""
    text = path.read_text(encoding="utf-8")
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    return Characters(torch.tensor([known[character] for character in text]), len(known))


def windows(sequence: Tensor, length: int) -> TensorDataset:
    """Consecutive pieces of a text as inputs, and the same shifted by one symbol as targets.

    Raises:
        ValueError: The text is shorter than one piece.
    """
    count = (len(sequence) - 1) // length
    if count < 1:
        raise ValueError(f"the text must have at least {length + 1} symbols; got {len(sequence)}. Name a longer text.")
    return TensorDataset(
        sequence[: count * length].view(count, length), sequence[1 : count * length + 1].view(count, length)
    )
