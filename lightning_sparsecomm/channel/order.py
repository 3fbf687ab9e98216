"""Which memories go together in a channel, and in what order."""

from collections.abc import Sequence

from lightning_sparsecomm.channel.adam_moments import AdamMoments
from lightning_sparsecomm.channel.clipping import ClipLocalNorm
from lightning_sparsecomm.channel.ef21 import EF21
from lightning_sparsecomm.channel.error_feedback import ErrorFeedback
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.channel.momentum import MomentumCorrection, Velocity
from lightning_sparsecomm.exchange import Exchange

# Of these, an earlier kind must come before a later one.
_ORDER: tuple[type[Memory] | tuple[type[Memory], ...], ...] = (
    ClipLocalNorm,
    (MomentumCorrection, AdamMoments),
    (ErrorFeedback, EF21),
)


def check_parts(exchange: Exchange, memories: Sequence[Memory]) -> None:
    """Raises `ValueError` where memories cannot work in their order, and `TypeError` for other objects."""
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be an Exchange; got {exchange!r}. Use DenseAllReduce(), for example.")
    if not isinstance(memories, Sequence) or not all(isinstance(memory, Memory) for memory in memories):
        raise TypeError(f"memories must be a list of memories; got {memories!r}. Use [ErrorFeedback()], or [].")
    ranks = [rank for memory in memories for rank, kind in enumerate(_ORDER) if isinstance(memory, kind)]
    if ranks != sorted(ranks):
        raise ValueError(
            "memories must be in the order ClipLocalNorm, MomentumCorrection or LocalAdam, ErrorFeedback or EF21; got"
            f" {list(memories)!r}. Change their order."
        )
    if any(isinstance(memory, EF21) for memory in memories) and (
        not isinstance(memories[-1], EF21) or any(isinstance(memory, (ErrorFeedback, EF21)) for memory in memories[:-1])
    ):
        raise ValueError(
            "memories must end with EF21, after which ranks share an estimate, and hold neither ErrorFeedback nor a"
            f" second EF21; got {list(memories)!r}. Change their order, or leave one out."
        )
    if sum(isinstance(memory, Velocity) for memory in memories) > 1:
        raise ValueError(
            "memories must hold at most one of MomentumCorrection and Momentum, or momentum is applied twice; got"
            f" {list(memories)!r}. Leave one out."
        )
