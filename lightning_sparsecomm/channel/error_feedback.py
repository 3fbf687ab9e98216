"""The residual: what earlier rounds did not send is added to the next gradient."""

from lightning_sparsecomm.basis import Round
from lightning_sparsecomm.basis.arguments import is_number
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchanged


class ErrorFeedback(Memory):
    """Adds what earlier rounds did not send: E ← decay · E + g, then E ← E − sent.

    So with decay 1, the sum of all that was sent, plus E, is the sum of all gradients at any time.

    Source: Seide et al. 2014 (1-bit SGD); Aji & Heafield 2017 (Gradient Dropping).

    Args:
        decay: Factor on E in each round, in (0, 1].

    Raises:
        ValueError: `decay` outside (0, 1].
    """

    def __init__(self, decay: float = 1.0) -> None:
        super().__init__("residual")
        if not (is_number(decay) and 0 < decay <= 1):
            raise ValueError(
                f"decay must be in (0, 1]: the part of the residual that is kept; got {decay!r}. Use 1 to keep all."
            )
        self.decay = decay

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return contribution.added_to_(self.held["residual"].flat, context.layout, self.decay)

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        self.held["residual"].subtract_(exchanged.sent)
        return exchanged

    def norm(self) -> float:
        """Euclidean norm of this rank's residual."""
        return self.held["residual"].norm()
