"""The choice of the shortest index codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.adaptive import AdaptiveGolomb
from lightning_sparsecomm.codecs.codec import IndexCodec, IndexCoding
from lightning_sparsecomm.codecs.indices import Bitmap, Golomb, Raw32, RunLength16

# Where a bitmap is as short as Golomb's code, AdaptiveGolomb takes three times as long to write, and rarely saves much.
# So of more positions than this, it has to save such a part by a sample.
_MANY, _SAVES = 2**14, 1 / 16


@dataclass(frozen=True)
class Auto(IndexCoding):
    """The shortest of Raw32, RunLength16, Golomb, AdaptiveGolomb and Bitmap for the positions at hand.

    It computes each codec's length, which is fast, and writes only one. Of equally short ones, it takes the
    first of RunLength16, Raw32, Bitmap, Golomb, AdaptiveGolomb. The payload names the chosen codec, so `Auto` itself
    has no code.

    More than 16,384 positions, if they are 38% or more, go into a Bitmap, which is fast, unless AdaptiveGolomb saves
    more than a sixteenth of it. A sample of one in 16 positions tells.

    >>> from torch import arange, cat
    >>> Auto().chosen(arange(0, 100_000, 100), size=100_000), Auto().chosen(arange(0, 16, 2), size=16)
    (Golomb(), Bitmap())
    >>> Auto().chosen(cat([arange(0, 1000, 2), arange(1000, 100_000, 200)]), size=100_000)
    AdaptiveGolomb()
    """

    _adaptive: ClassVar[AdaptiveGolomb] = AdaptiveGolomb()
    _others: ClassVar[tuple[IndexCodec, ...]] = (RunLength16(), Raw32(), Bitmap(), Golomb())

    def codecs(self) -> Sequence[IndexCodec]:
        return *self._others, self._adaptive

    def chosen(self, indices: Tensor, size: int) -> IndexCodec:
        codec, length = self._plain(indices, size)
        wins = self._may_be_adaptive(indices, size) and self._adaptive.section_bytes(indices, size) < length
        return self._adaptive if wins else codec

    def encoded(self, indices: Tensor, size: int) -> tuple[IndexCodec, Tensor]:
        codec, length = self._plain(indices, size)
        if self._may_be_adaptive(indices, size):
            section = self._adaptive.encode_below(indices, size, length)
            if section is not None:
                return self._adaptive, section
        return codec, codec.encode(indices, size)

    def _plain(self, indices: Tensor, size: int) -> tuple[IndexCodec, int]:
        """The shortest but for AdaptiveGolomb, and its length in bytes."""
        count, bitmap = indices.numel(), Bitmap()
        if _are_many(count, size):
            return bitmap, bitmap.section_bytes(indices, size)
        *others, golomb = self._others
        length = golomb.section_bytes(indices, size)
        if count < size and 2 * count > min(length, (size + 7) // 8):
            # The others have two bytes for each position, or more.
            others = [bitmap]
        lengths = [*(codec.section_bytes(indices, size) for codec in others), length]
        return [*others, golomb][lengths.index(min(lengths))], min(lengths)

    def _may_be_adaptive(self, indices: Tensor, size: int) -> bool:
        many = _are_many(indices.numel(), size)
        return not many or self._adaptive.estimated_bits(indices) < (1 - _SAVES) * size

    def bound_bytes(self, count: int, size: int) -> int | None:
        # For b = 0, Golomb writes the bitmap up to the last position. For b > 0, it writes less than any bound, and
        # padding to the bound would undo the choice.
        if size > 1 and count > 0 and (count == size or Golomb().parameter(count, size)):
            return None
        return min(bound for codec in self.codecs() if (bound := codec.bound_bytes(count, size)) is not None)


def _are_many(count: int, size: int) -> bool:
    return _MANY < count < size and Golomb().parameter(count, size) == 0
