"""Positions in whichever codec writes them shortest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_sparsecomm.codecs.indices.base import IndexCodec, IndexCoding
from lightning_sparsecomm.codecs.indices.bits import Bitmap, Golomb
from lightning_sparsecomm.codecs.indices.words import Raw32, RunLength16


@dataclass(frozen=True)
class Auto(IndexCoding):
    """The shortest of Raw32, RunLength16, Golomb and Bitmap for these very positions: their lengths are computed, which
    is quick, and one of them is written. The payload names it, so this is no codec of its own.

    Of several that are as short, the one that decodes quickest: the first of RunLength16, Raw32, Bitmap, Golomb.
    """

    _codecs: ClassVar[tuple[IndexCodec, ...]] = (RunLength16(), Raw32(), Bitmap(), Golomb())

    def codecs(self) -> Sequence[IndexCodec]:
        return self._codecs

    def chosen(self, indices: Tensor, size: int) -> IndexCodec:
        return min(self._codecs, key=lambda codec: codec.section_bytes(indices, size))

    def bound_bytes(self, count: int, size: int) -> int | None:
        # Golomb's bits for b = 0 are a bitmap's up to the last position. For b > 0 they are fewer than any bound, and
        # padding them to that would undo the choice.
        if size > 1 and count > 0 and (count == size or Golomb().parameter(count, size)):
            return None
        return min(bound for codec in self._codecs if (bound := codec.bound_bytes(count, size)) is not None)
