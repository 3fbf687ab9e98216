"""Small whole numbers, negative ones too, as digits: as many as fit in each 16-bit word."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import PayloadError

_WORDS = 1 << 16


@dataclass(frozen=True)
class Digits:
    """Writes numbers from −most to most as digits of base 2 · most + 1: 1.6 bits for each with most 1, 2.7 with 2.

    A word has as many digits as fit in 16 bits, the first one lowest. A number is its digit less most.

    >>> digits = Digits(1)
    >>> digits.decode(digits.encode(torch.tensor([1, -1, 0])), 3)
    tensor([ 1, -1,  0], dtype=torch.int16)

    Args:
        most: The largest number, from 1 to 32767.

    Raises:
        ValueError: `most` is outside 1 to 32767.
    """

    most: int

    def __post_init__(self) -> None:
        if self.most not in range(1, _WORDS // 2):
            raise ValueError(
                f"most must be from 1 to {_WORDS // 2 - 1}, or a digit does not fit in 16 bits; got {self.most!r}. Use"
                " fewer ranks."
            )

    @property
    def base(self) -> int:
        return 2 * self.most + 1

    @property
    def per_word(self) -> int:
        """How many digits a word has."""
        number = 1
        while self.base ** (number + 1) <= _WORDS:
            number += 1
        return number

    def size_bytes(self, count: int) -> int:
        """The bytes of so many numbers."""
        return 2 * -(-count // self.per_word)

    def encode(self, numbers: Tensor) -> Tensor:
        """`[bytes]` uint8 on the device of `numbers`: `[n]` of any dtype, whole, from −most to most."""
        padding = -numbers.numel() % self.per_word
        digits = torch.nn.functional.pad(numbers, (0, padding)).to(torch.int32).add_(self.most)
        columns = digits.view(-1, self.per_word).unbind(1)
        words = torch.zeros_like(columns[0])
        for column in reversed(columns):
            words.mul_(self.base).add_(column)
        return torch.stack([words & 0xFF, words >> 8], 1).to(torch.uint8).view(-1)

    def decode(self, data: Tensor, count: int) -> Tensor:
        """The `[count]` int16 in what `encode` wrote.

        Args:
            data: `[bytes]` uint8, from any source.
            count: How many numbers are expected.

        Raises:
            PayloadError: The bytes are not those of so many numbers.
        """
        if data.numel() != self.size_bytes(count):
            raise PayloadError(
                f"digits: has {data.numel()} bytes, expected {self.size_bytes(count)} for {count} numbers."
            )
        low, high = data.view(-1, 2).to(torch.int32).unbind(1)
        words = low | high << 8
        table = _numbers(self.base, self.per_word).to(data.device)
        if bool((words >= len(table)).any()):
            raise PayloadError(f"digits: a word is {int(words.max())}, expected less than {len(table)}.")
        numbers = table.index_select(0, words).view(-1)
        if bool(numbers[count:].any()):
            raise PayloadError("digits: the last word has digits that are not 0, as they are no number's.")
        return numbers[:count]


@lru_cache(maxsize=8)
def _numbers(base: int, per_word: int) -> Tensor:
    """`[words, per_word]` int16: the numbers in each word."""
    words = torch.arange(base**per_word)
    return torch.stack([words // base**place % base - base // 2 for place in range(per_word)], 1).to(torch.int16)
