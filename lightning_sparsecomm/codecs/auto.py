"""The choice of the shortest index codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.adaptive import AdaptiveGolomb
from lightning_sparsecomm.codecs.codec import IndexCodec, IndexCoding
from lightning_sparsecomm.codecs.indices import Bitmap, Golomb, Raw32, RunLength16


@dataclass(frozen=True)
class Auto(IndexCoding):
    """The shortest of Raw32, RunLength16, Golomb, AdaptiveGolomb and Bitmap for the positions at hand.

    It computes each codec's length, which is fast, and writes only the shortest. Of equally short ones, it takes the
    first of RunLength16, Raw32, Bitmap, Golomb, AdaptiveGolomb. The payload names the chosen codec, so `Auto` itself
    has no code.

    >>> from torch import arange, cat
    >>> Auto().chosen(arange(0, 100_000, 100), size=100_000), Auto().chosen(arange(0, 16, 2), size=16)
    (Golomb(), Bitmap())
    >>> Auto().chosen(cat([arange(0, 1000, 2), arange(1000, 100_000, 200)]), size=100_000)
    AdaptiveGolomb()
    """

    _adaptive: ClassVar[AdaptiveGolomb] = AdaptiveGolomb()
    _others: ClassVar[tuple[IndexCodec, ...]] = (RunLength16(), Raw32(), Bitmap(), Golomb())
    # Those that can be shortest where two bytes for each position are more than a bitmap has.
    _dense: ClassVar[tuple[IndexCodec, ...]] = (Bitmap(), Golomb())

    def codecs(self) -> Sequence[IndexCodec]:
        return *self._others, self._adaptive

    def chosen(self, indices: Tensor, size: int) -> IndexCodec:
        return min(self.codecs(), key=lambda codec: codec.section_bytes(indices, size))

    def encoded(self, indices: Tensor, size: int) -> tuple[IndexCodec, Tensor]:
        count = indices.numel()
        others = self._dense if count < size and 2 * count > (size + 7) // 8 else self._others
        lengths = [codec.section_bytes(indices, size) for codec in others]
        section = self._adaptive.encode_below(indices, size, min(lengths))
        if section is not None:
            return self._adaptive, section
        codec = others[lengths.index(min(lengths))]
        return codec, codec.encode(indices, size)

    def bound_bytes(self, count: int, size: int) -> int | None:
        # For b = 0, Golomb writes the bitmap up to the last position. For b > 0, it writes less than any bound, and
        # padding to the bound would undo the choice.
        if size > 1 and count > 0 and (count == size or Golomb().parameter(count, size)):
            return None
        return min(bound for codec in self.codecs() if (bound := codec.bound_bytes(count, size)) is not None)
