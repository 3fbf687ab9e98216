"""Positions as runs of neighbours."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import IndexCodec, everything
from lightning_sparsecomm.codecs.indices.words import read_words, write_words
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.kernels import position_kernels_for


@dataclass(frozen=True)
class Runs(IndexCodec):
    """Every run of neighbouring positions as its first one and its length, each an unsigned 32-bit integer: 8 bytes, as
    many as torch spends on the index of a row of a sparse gradient. No bytes at all where everything is selected.

    For whole blocks, such as the rows of an embedding.
    """

    code: ClassVar[int] = 5

    def section_bytes(self, indices: Tensor, size: int) -> int:
        return 8 * _firsts(indices).numel() if indices.numel() < size else 0

    def encode(self, indices: Tensor, size: int) -> Tensor:
        if indices.numel() == size:
            return indices.new_empty(0, dtype=torch.uint8)
        firsts = _firsts(indices)
        lengths = torch.diff(firsts, append=firsts.new_tensor([indices.numel()]))
        return write_words(torch.stack([indices[firsts], lengths], 1).view(-1))

    def decode(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        self.check_parameter(parameter)
        if count == size:
            return everything("runs", section, size)
        if section.numel() % 8:
            raise PayloadError(f"runs index section: has {section.numel()} bytes, expected a multiple of 8.")
        firsts, lengths = read_words(section).view(-1, 2).unbind(1)
        ends = firsts + lengths
        # A run begins behind the one before it, with at least one position between: else they would be one.
        wrong = (lengths == 0) | (ends > size)
        wrong[1:] |= firsts[1:] <= ends[:-1]
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            before = f", from {int(ends[at - 1]) + 1} on" if at else ""
            raise PayloadError(
                f"runs index section: run at byte {8 * at} is {int(lengths[at])} positions from {int(firsts[at])} on,"
                f" expected at least 1{before}, below {size}."
            )
        # At most `size` together, since they do not overlap.
        if (held := int(lengths.sum())) != count:
            raise PayloadError(f"runs index section: its runs hold {held} positions, expected {count}.")
        return position_kernels_for(section.device).spans(firsts, lengths)

    def bound_bytes(self, count: int, size: int) -> int | None:
        # Positions without neighbours cost far more than what this codec is for.
        return None if count and size > 1 else 0


def _firsts(indices: Tensor) -> Tensor:
    """Where in `indices` each run of neighbours begins."""
    begins = torch.ones_like(indices, dtype=torch.bool)
    begins[1:] = indices[1:] != indices[:-1] + 1
    return begins.nonzero().view(-1)
