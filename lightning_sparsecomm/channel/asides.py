"""A few numbers of memories that ranks sum beside an exchange, in the same round."""

from collections.abc import Callable, Sequence

from torch import Tensor

from lightning_sparsecomm.basis import Round, Wire
from lightning_sparsecomm.channel.memory import Memory


class Asides:
    """Sums what memories give, while the exchange goes on. Making it starts all-reduces, on all ranks alike."""

    def __init__(self, memories: Sequence[Memory], context: Round, wire: Wire) -> None:
        self._sums: list[tuple[Memory, Tensor, Callable[[], None]]] = []
        for memory in memories:
            if (aside := memory.aside(context)) is not None:
                self._sums.append((memory, aside, wire.all_reduce_later_(aside)))

    def wait(self) -> None:
        """Waits for the sums."""
        for _, _, wait in self._sums:
            wait()

    def hand_over(self) -> None:
        """Gives the memories the sums, once the round counts."""
        for memory, total, _ in self._sums:
            memory.take_aside(total)
