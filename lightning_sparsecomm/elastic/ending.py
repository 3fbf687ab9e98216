"""The end of a run of replicas that come and go, which those that are away then have to learn."""

from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.elastic.connections import Connections
from lightning_sparsecomm.elastic.last_word import LastWord
from lightning_sparsecomm.elastic.members import NOTHING


class Ending:
    """Tells others that the run has ended, or learns that from them.

    Args:
        quorum: Where word is left, and found.

    Attributes:
        run: The first state of the run; `NOTHING` before.
        reached: Whether the run ends with the last exchange.
    """

    def __init__(self, quorum: Connections) -> None:
        self.run, self.reached = NOTHING, False
        self._quorum = quorum

    def tell(self, state: str, steps: int) -> None:
        """Training is over here: leaves word of it if that ends the run. Arguments as in `LastWord`."""
        if self.reached:
            self._quorum.leave_word(LastWord(self.run, state, steps))

    def is_with(self, state: str) -> bool:
        """Whether others have ended the run with this state."""
        word = self._word()
        return word is not None and word.state == state

    def check(self, state: str, steps: int, exchanges: bool) -> None:
        """Others that were there are gone. Raises `PeerError` if they have ended the run without this replica.

        Args:
            state: What this replica shares with those that are left.
            steps: Optimizer steps that it has made.
            exchanges: Whether it has more to exchange than buffers, which are all that is left after the last step.
        """
        word = self._word()
        if word is not None and word.state != state and (exchanges or word.steps > steps):
            raise PeerError(
                f"the other replicas have ended the run after {word.steps} steps, while this one was away after"
                f" {steps}. It ends too, and saves nothing: the run's last checkpoint has the weights."
            )

    def _word(self) -> LastWord | None:
        return self._quorum.last_word(self.run) if self.run else None
