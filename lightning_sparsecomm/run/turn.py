"""One turn of an optimizer's shares: all of them exchange, or none does."""

from collections.abc import Sequence

from lightning_sparsecomm.sharing.share import Share, Turn


def take_turn(due: Sequence[Share], turn: Turn) -> None:
    """Prepares all shares, exchanges all, and then commits all; after any error it aborts all.

    So memories, gradients and weights change only after all shares have exchanged. `due` must have the same order on
    all ranks.
    """
    try:
        # Exchanges that start early come first, so that the others' work overlaps with them.
        for share in sorted(due, key=lambda share: not share.overlaps):
            share.prepare(turn)
        for share in sorted(due, key=lambda share: share.overlaps):
            share.exchange()
        # After this only an interrupt, or a fault in a part, can stop the turn. Shares that have committed stay so.
        for share in due:
            share.commit()
    except BaseException:
        for share in reversed(due):
            share.abort()
        raise
