"""A memory with two states: EF21."""

from lightning_sparsecomm.basis import Round
from lightning_sparsecomm.channel import Contribution, Memory
from lightning_sparsecomm.exchange import Exchanged


class EF21(Memory):
    """Sends changes: each rank keeps an estimate of its own gradient, and all keep the mean of the ranks' estimates.

    A rank sends part of its gradient minus its estimate. Both estimates take in what was sent, and the optimizer is
    given the mean estimate. Unlike a residual, nothing that was not sent adds up.

    Source: Richtárik et al. 2021, EF21, algorithm 2.
    """

    def __init__(self) -> None:
        super().__init__("own", "mean")

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        pairs = zip(contribution.parts, self.held["own"].parts)
        return contribution.with_parts([None if part is None else part - own for part, own in pairs])

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        self.held["own"].add_(exchanged.sent)
        self.held["mean"].add_(exchanged.shared)
        return exchanged._replace(shared=self.held["mean"].flat.clone())
