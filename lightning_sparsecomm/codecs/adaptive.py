"""A codec for positions that come in clusters: each block of them has a code of its own."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.indices import PartialCodec
from lightning_sparsecomm.codecs.registry import register_index_codec
from lightning_sparsecomm.kernels import position_kernels_for
from lightning_sparsecomm.kernels.positions.blocks import BLOCK

# A sample is stretches of so many successive positions, each of which begins so many after the one before.
_STRETCH, _APART = 8 * BLOCK, 128 * BLOCK


@register_index_codec
@dataclass(frozen=True)
class AdaptiveGolomb(PartialCodec):
    """Golomb or Exp-Golomb codes for the gaps between positions, chosen anew for each block of 64 positions.

    A full selection costs no bytes. Selected elements come in clusters, because tensors, rows and columns differ: what
    trainings select at a density of 21% takes 2.8 to 3.4 bits a position, and 3.7 in `Golomb`'s one code for all. Each
    block has its own divisor, 2^b or 3·2^b; or, where a few gaps are far longer than the others, an Exp-Golomb code,
    whose length grows with the gap's logarithm. That costs a bit for each block, and 6 more where the code changes. Of
    elements selected at random, each takes 7.49 bits at a density of 1/64, where the entropy is 7.43.

    Source: Golomb 1966, Rice 1979 for a parameter in each block, Teuhola 1978 for Exp-Golomb codes. The set of codes,
    the choice and the order of bits are ours; see docs/formats.md.

    >>> from torch import arange, cat
    >>> dense_then_sparse = cat([arange(0, 1024, 2), arange(1024, 100_000, 200)])
    >>> Golomb().section_bytes(dense_then_sparse, 100_000), AdaptiveGolomb().section_bytes(dense_then_sparse, 100_000)
    (1067, 688)
    """

    code: ClassVar[int] = 6
    reads_on_gpus: ClassVar[bool] = True
    name: ClassVar[str] = "adaptive Golomb"

    def part_bytes(self, indices: Tensor, size: int) -> int:
        kernels = position_kernels_for(indices.device)
        return (kernels.blocks_bits(indices, kernels.choose_codes(indices)) + 7) // 8

    def write_part(self, indices: Tensor, size: int) -> Tensor:
        kernels = position_kernels_for(indices.device)
        return kernels.write_blocks(indices, kernels.choose_codes(indices))

    def encode_below(self, indices: Tensor, size: int, limit: int) -> Tensor | None:
        """What `encode` returns, if it has fewer bytes than `limit`. It chooses codes once, to measure and to write."""
        if indices.numel() == size:
            return self.encode(indices, size) if limit > 0 else None
        return position_kernels_for(indices.device).encode_blocks(indices, 8 * (limit - 1))

    def estimated_bits(self, indices: Tensor) -> float:
        """About how many bits `write_part` needs for 8,192 positions or more, by one in 16 of them."""
        stretches = indices[: indices.numel() // _APART * _APART].view(-1, _APART)[:, : _STRETCH + 1]
        # As if each stretch began where the one before it ends.
        sample = stretches.diff(dim=1).view(-1).cumsum(0) - 1
        kernels = position_kernels_for(indices.device)
        return kernels.blocks_bits(sample, kernels.choose_codes(sample)) / sample.numel() * indices.numel()

    def read_part(self, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
        length = section.numel()
        least = (count + -(-count // BLOCK) + 7) // 8
        if length < least:
            raise self.wrong(f"has {length} bytes", f"at least {least} for {count} positions")
        indices, held, end, repeated = position_kernels_for(section.device).read_blocks(section, count, size)
        if repeated >= 0:
            raise self.wrong(f"block {repeated} names the code of the block before", "another code")
        if held < count:
            raise self.wrong(f"position {held} is cut off or too large", f"less than {size} within {8 * length} bits")
        self.check_length(section, (end + 7) // 8, f"its {end} bits of {count} positions")
        if end % 8 and int(section[-1]) >> end % 8:
            raise self.wrong(f"padding at bit {end} is {int(section[-1]) >> end % 8}", "0")
        return indices

    def bound_bytes(self, count: int, size: int) -> int | None:
        # As for Golomb: padding to the longest section would cost more than the codes save.
        return None if count and size > 1 else 0
