"""Shares whose exchange goes on while training does."""

from abc import abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

import torch

from lightning_sparsecomm.basis.stream import Flight
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.sharing.share import Share

T = TypeVar("T")


class InFlightShare(Share, Generic[T]):
    """A share with at most one exchange in flight, of the round that its channel has begun.

    Combine it with the share that exchanges the same without delay.
    """

    _flight: Flight[T] | None = None
    _norm = 0.0

    @property
    def overlaps(self) -> bool:
        return False

    def residual_norm(self) -> float:
        """As of the last exchange that has arrived, while another is in flight."""
        if self._flight is None:
            self._norm = super().residual_norm()
        return self._norm

    def _land(self) -> tuple[T, Exchanged] | None:
        """Waits for what is in flight, and lets memories forget what was sent; None where nothing is in flight.

        After an error, memories are as before the round.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if self._flight is None:
            return None
        flight, self._flight = self._flight, None
        with torch.no_grad():
            try:
                result = flight.wait()
                exchanged = self.channel.commit()
            except BaseException:
                self.channel.abort()
                raise
        self._count_sent(exchanged)
        return result, exchanged

    @abstractmethod
    def _finish(self) -> None:
        """Lands what is in flight. Nothing is used yet."""

    def _finish_between_turns(self) -> None:
        """As `_finish`, but the next turn raises the error: a checkpoint after a lost rank is written without it."""
        try:
            self._finish()
        except Exception as error:
            self.failure = error

    def _void(self) -> None:
        """Waits for what is in flight, and forgets it: memories are as before it."""
        if self._flight is not None:
            # The first error is known already.
            with suppress(Exception):
                self._flight.wait()
        self._flight, self.failure = None, None
        self.channel.abort()
