"""A method: which parts it is made of."""

from random_k import RandomK
from scaled_values import ScaledInt8

from lightning_sparsecomm import Channel, ErrorFeedback, GradientSync, Method
from lightning_sparsecomm.codecs import SparseCodec
from lightning_sparsecomm.exchange import Gather


class RandomBytes(Method):
    """Sends random elements, one byte each; the rest waits in the residual.

    Args:
        density: Fraction of elements sent, in (0, 1].
    """

    def __init__(self, density: float = 0.01) -> None:
        compressor = SparseCodec(RandomK(density), ScaledInt8())
        super().__init__([GradientSync(Channel(Gather(compressor), [ErrorFeedback()]))])
