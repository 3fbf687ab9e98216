"""The choice between one and two bits for each value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_sparsecomm.codecs.codec import ValueCodec, ValueCoding
from lightning_sparsecomm.codecs.grouped import TwoBit
from lightning_sparsecomm.codecs.one_bit import OneBit


@dataclass(frozen=True)
class FewBits(ValueCoding):
    """`TwoBit` where more than 60% of the elements are sent, and `OneBit` where fewer are.

    At high densities a second bit for each value loses less than sending more elements does; at lower ones it is the
    other way round. The payload names the codec, so `FewBits` itself has no code.

    Source: ours; measured with Adam's directions (docs/results/default_choices.md).

    >>> FewBits().chosen(80, size=100), FewBits().chosen(50, size=100)
    (TwoBit(group=64), OneBit(group=128))
    """

    _dense: ClassVar[TwoBit] = TwoBit()
    _sparse: ClassVar[OneBit] = OneBit()

    def codecs(self) -> Sequence[ValueCodec]:
        return self._sparse, self._dense

    def chosen(self, count: int, size: int) -> ValueCodec:
        return self._dense if count > 0.6 * size else self._sparse
