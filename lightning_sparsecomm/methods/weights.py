"""An exchange for weights, with biases and norms sent whole."""

from collections.abc import Sequence
from typing import Literal

from lightning_sparsecomm.channel import Channel, ErrorFeedback, Memory
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, QuantizedAllReduce
from lightning_sparsecomm.sharing import GradientSync

RestBits = Literal[32, 8, 4]


def rest(bits: RestBits, exact: Sequence[Memory], rounded: Sequence[Memory]) -> GradientSync:
    """All parameters that no other sync takes, whole: as they are with 32 bits, else rounded.

    Args:
        bits: For each element.
        exact: The memories with 32 bits.
        rounded: Those with fewer; the last one is error feedback.

    Raises:
        ValueError: `bits` is neither 32, 8 nor 4.
    """
    if isinstance(bits, bool) or bits not in (32, 8, 4):
        raise ValueError(f"rest_bits must be 32, 8 or 4, for each element of biases and norms; got {bits!r}. Use 8.")
    if bits == 32:
        return GradientSync(Channel(DenseAllReduce(), exact), rest=True)
    return GradientSync(Channel(QuantizedAllReduce(bits, 64), rounded), rest=True)


def weights_by(
    exchange: Exchange, error_feedback: bool, exclude: Sequence[str], follow_rate: bool
) -> list[GradientSync]:
    """Parameters of two or more dimensions by an exchange; all others, and those that are excluded, whole.

    Args:
        exchange: How the gradients of weights are shared.
        error_feedback: Whether to keep what it does not send.
        exclude: Patterns of the names of weights that are sent whole.
        follow_rate: Whether what is kept follows the learning rate.
    """
    memories = [ErrorFeedback(follow_rate=follow_rate)] if error_feedback else []
    return [
        GradientSync(Channel(exchange, memories), exclude=exclude, min_dimensions=2),
        GradientSync(Channel(DenseAllReduce()), rest=True),
    ]
