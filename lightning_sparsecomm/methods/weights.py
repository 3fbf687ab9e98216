"""An exchange for weights, with biases and norms sent whole."""

from collections.abc import Sequence

from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange
from lightning_sparsecomm.sharing import GradientSync


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
