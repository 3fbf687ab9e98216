"""An exchange for weights, with biases and norms sent whole."""

from collections.abc import Sequence
from typing import Literal

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.channel import Channel, ErrorFeedback, Memory
from lightning_sparsecomm.codecs import BFloat16
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, GatherNonZero, QuantizedAllReduce
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


def with_rows(
    syncs: Sequence[GradientSync], few_rows: bool, exclude: Sequence[str], memories: Sequence[Memory] = ()
) -> list[GradientSync]:
    """These syncs and, with `few_rows`, one for tables whose gradients have few rows, which the first leaves to it.

    It sends these rows in bfloat16 in each step, and the optimizer sees their mean, as with ddp.

    Args:
        syncs: For weights, and then for what is sent whole.
        few_rows: Whether to add it.
        exclude: Patterns of names that are sent whole in any case.
        memories: Its own: such as keep nothing from being sent.

    Raises:
        TypeError: `few_rows` is neither True nor False.
        ValueError: It is True, and the first sync has a local mode.
    """
    check_booleans(few_rows=few_rows)
    if not few_rows:
        return list(syncs)
    if syncs[0].local != "none":
        raise ValueError(
            "few_rows must be False with a local mode, in which ranks' other gradients differ, and so does what clips"
            f" them together; got few_rows=True and local={syncs[0].local!r}. Leave one of them out."
        )
    channel = Channel(GatherNonZero(BFloat16(), may_reduce=True), memories)
    rows = GradientSync(channel, exclude=exclude, min_dimensions=2, few_rows=True)
    return [syncs[0].taking_few_rows(False), *syncs[1:], rows]


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
