"""Turns of an optimizer's shares: all of them exchange, or none does."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.clipping import norm_to_clip
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.sharing.share import Share, Turn


class Turns:
    """Exchanges of weights between ranks that are the same during the whole run.

    Args:
        registry: The optimizers of the run.
        replicas: Whose buffers are averaged with the weights.
    """

    def __init__(self, registry: Registry, replicas: Replicas) -> None:
        self._registry = registry
        self._replicas = replicas

    def skipping(self, tracked: TrackedOptimizer, wire: Wire) -> Wire | None:
        """Between those that skip a step together, where `wire` is between all; None where a rank skips alone."""
        return wire if any(sync.shares_gradients for sync in tracked.shares) else None

    def norm_to_clip(self, tracked: TrackedOptimizer) -> float:
        """Norm by which methods clip what they share; NaN if none does. Called before `take_gradients`."""
        return norm_to_clip(tracked)

    def take_gradients(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """A turn of those of an optimizer's shares whose gradients are due; errors as for `take`. A collective."""
        take_turn(due, turn)

    def take(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """A turn of those of an optimizer's shares that are due; nothing where none is. A collective.

        After an error, the shares that are due have aborted.
        """
        take_turn(due, turn)

    def average_buffers(self, tracked: TrackedOptimizer, due: Sequence[Share], turn: Turn) -> None:
        """Averages buffers after a turn in which weights of their syncs were exchanged. A collective then."""
        closing = [sync for sync, share in tracked.shares.items() if share in due and share.closes_round]
        if turn.kind == "weights" and any(sync.buffers == "average" for sync in closing):
            # Of several optimizers, the first that exchanges weights averages the buffers.
            self._registry.leading = self._registry.leading or tracked
            if self._registry.leading is tracked:
                self._replicas.untrained.average()

    def settle_buffers(self, tracked: TrackedOptimizer, turn: Turn) -> None:
        """Averages buffers after the last turn of all; that of one optimizer is given. A collective."""
        self._replicas.untrained.average()


def take_turn(
    due: Sequence[Share], turn: Turn, agree: Callable[[BaseException | None], None] = lambda error: None
) -> None:
    """Prepares all shares, exchanges all, and then commits all; after any error it aborts all.

    So memories, gradients and weights change only after all shares have exchanged. `due` must have the same order on
    all ranks. `agree` tells ranks that commit or abort with this one of an error, or of none; it raises another's.
    """
    try:
        # Exchanges that start early come first, so that the others' work overlaps with them.
        try:
            for share in sorted(due, key=lambda share: not share.overlaps):
                share.prepare(turn)
            for share in sorted(due, key=lambda share: share.overlaps):
                share.exchange()
        except BaseException as error:
            with suppress(Exception):
                agree(error)
            raise
        agree(None)
        # After this only an interrupt, or a fault in a part, can stop the turn. Shares that have committed stay so.
        for share in due:
            share.commit()
    except BaseException:
        for share in reversed(due):
            share.abort()
        raise
