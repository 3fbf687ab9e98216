"""Ranks send what is largest in a transform of what they keep."""

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.channel import Channel, ErrorFeedback, SharedSign
from lightning_sparsecomm.codecs import TiledDCT, TileTopK
from lightning_sparsecomm.exchange import GatherContributions, Sparse, Transformed
from lightning_sparsecomm.methods.dropping import PositionName, ValueName, codec_of
from lightning_sparsecomm.sharing import GradientSync, Method


class demo(Method):
    """Decoupled momentum: each rank keeps momentum of its own, sends its largest cosines, and all step by signs.

    In every tile of 64 × 64 elements of what a rank has kept, the 32 largest coefficients of the discrete cosine
    transform are sent, and taken out of what it keeps. The optimizer is given the sign of their mean, transformed back.
    Use torch.optim.SGD without momentum, at a learning rate for signs, such as 1e-3: its `weight_decay` is then
    decoupled, as in the paper. Momentum or Adam's moments would average
    the signs once more, and learn little: at the start of a run a line says so.

    Bytes per step and rank: 192 for each tile (2 of position, 4 of value for each coefficient): 0.05 for each element
    of large weights, but 3 for each of biases and norms. And 32 of headers.

    Source: Peng, Quesnelle and Kingma 2024, DeMo: Decoupled Momentum Optimization, algorithm 1. Learning rates are
    in the momentum, as in its public code. That averages a coefficient over the ranks that sent it: `of_senders=True`.

    >>> demo(k=16)
    demo(k=16)

    Args:
        k: Coefficients sent of each tile.
        side: Elements in a row of a tile, and rows in it. Tensors of one dimension have chunks of so many elements.
        decay: β, the factor on what is kept, in each step, in (0, 1].
        sign: Whether the optimizer is given signs. Otherwise it is given the mean itself, at any learning rate, and
            what still waits after the last step is applied.
        of_senders: Whether a coefficient is divided by the number of ranks that sent it, and not by that of all.
        values: As for `dgc`. What is rounded off is kept.
        positions: How positions are coded: "fast" takes 2 bytes for each coefficient; "short" is the shortest of five
            codes.

    Raises:
        ValueError: `k` or `side` below 1, `k` above side², `decay` outside (0, 1], or an unknown dtype or code.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        k: int = 32,
        side: int = 64,
        decay: float = 0.999,
        sign: bool = True,
        of_senders: bool = False,
        values: ValueName = "float32",
        positions: PositionName = "fast",
    ) -> None:
        check_booleans(sign=sign, of_senders=of_senders)
        coding = codec_of(TileTopK(k, side), values, positions)
        inner = GatherContributions(coding, of_senders=True) if of_senders else Sparse(coding)
        memories = [*([SharedSign()] if sign else []), ErrorFeedback(decay)]
        super().__init__([GradientSync(Channel(Transformed(inner, TiledDCT(side)), memories), finish=not sign)])
