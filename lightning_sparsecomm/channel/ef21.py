"""Estimates of gradients: ranks send how their own has changed, and share the mean estimate."""

from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchanged

_OWN, _MEAN = "own", "mean"


class EF21(Memory):
    """Sends changes: each rank keeps an estimate h of its own gradient, and all keep the mean H of the ranks' h.

        a rank sends C(g − h);   h ← h + sent;   H ← H + the mean of what ranks sent;   the optimizer is given H

    So g = h + what is not sent, and h is the sum of all that its rank has sent. Nothing that is not sent adds up: it is
    measured anew in each step, against the gradient of that step. H is equal on all ranks, to the bit, and the mean of
    their h to round-off, which adds up like that of a sum. At density 1, H is the mean gradient.

    It must come last in a channel, without `ErrorFeedback`. What comes before tells what g is. With noise in gradients,
    use `MomentumCorrection`, or `LocalAdam`: a rank then sends how its velocity, or its direction, has changed. Without
    either, most of what is sent is the noise of one step, which stays in H until its element is sent again. A gradient
    that this rank lacks counts as zero where another rank has one. Where no rank has one, both estimates stay.

    `Exchanged.sent` stays what was sent, and `Exchanged.shared` becomes H. Memory: two numbers for each element, in
    float32 or wider, and a vector while a round lasts.

    Source: Richtárik et al. 2021, EF21, algorithm 2, from h = 0. After `MomentumCorrection`: Fatkhullin et al. 2023,
    Momentum Provably Improves Error Feedback, algorithm 1 (EF21-SGDM), with the velocity of torch's SGD, which is its v
    divided by η.

    >>> Channel(Gather(SparseCodec(TopK(0.01))), [MomentumCorrection(), EF21()]).memories[-1]
    EF21()
    """

    carries = True

    def __init__(self) -> None:
        super().__init__(_OWN, _MEAN)

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return contribution.added_to_(self.held[_OWN].flat.neg(), context.layout)

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        own, mean = self.held[_OWN], self.held[_MEAN]
        own.add_(exchanged.sent)
        mean.add_(exchanged.shared)
        return exchanged._replace(shared=mean.flat.clone())
