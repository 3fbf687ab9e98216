"""Memory and exchange: one round of communication, from what a rank has to what all ranks share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.exchange.base import Exchange, Exchanged
from lightning_sparsecomm.gradients import first_nonfinite
from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.memory import Contribution, ErrorFeedback, Memory
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.wire import Wire


class Channel:
    """What a method is made of: memories that compensate, in order, and an exchange.

    The law that every channel obeys: what its memories forget is what was sent, as receivers decode it.

    Args:
        exchange: The round of communication.
        memories: State kept from round to round; none by default.
    """

    def __init__(self, exchange: Exchange, memories: Sequence[Memory] = ()) -> None:
        self.exchange = exchange
        self.memories = tuple(memories)

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Makes room for `layout`; called again when the layout grows."""
        self.dtype, self.device = dtype, device
        for memory in self.memories:
            memory.bind(layout, dtype, device)

    def reduce(self, gradients: Sequence[Tensor | None], round: Round, wire: Wire) -> Exchanged:
        """Exchanges one gradient per segment of `round.layout`; None where this rank has none.

        Raises:
            NonFiniteGradientError, PayloadError: As the exchange says.
        """
        present = [gradient is not None for gradient in gradients]
        nonfinite = first_nonfinite(gradients)
        if nonfinite is None:
            contribution = Contribution(gradients)
            for memory in self.memories:
                contribution = memory.compensate(contribution, round)
            x = self._vector(contribution, round.layout)
        else:
            x = torch.zeros(round.layout.size, dtype=self.dtype, device=self.device)
        exchanged = self.exchange.run(x, present, nonfinite, round, wire)
        for memory in reversed(self.memories):
            memory.update(exchanged.sent)
        for memory in self.memories:
            exchanged = exchanged._replace(shared=memory.finish(exchanged.shared))
        return exchanged

    def _vector(self, contribution: Contribution, layout: Layout) -> Tensor:
        if contribution.flat is not None and all(part is not None for part in contribution.parts):
            return contribution.flat
        # Zeros are never sent, so a segment without a gradient keeps all that is held for it.
        x = torch.zeros(layout.size, dtype=self.dtype, device=self.device)
        for view, part in zip(layout.views(x), contribution.parts):
            if part is not None:
                view.copy_(part)
        return x

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet; 0 without error feedback."""
        norms = [memory.norm() for memory in self.memories if isinstance(memory, ErrorFeedback)]
        return math.hypot(*norms)

    def state_dict(self) -> list[dict[str, Tensor]]:
        """What each memory holds, by parameter name."""
        return [memory.state_dict() for memory in self.memories]

    def load_state_dict(self, state: list[dict[str, Tensor]]) -> None:
        """Takes over what `state_dict` gave."""
        if len(state) != len(self.memories):
            raise ValueError(
                f"the state holds {len(state)} memories, but the method has {len(self.memories)}."
                " Resume with the method that wrote it."
            )
        for memory, part in zip(self.memories, state):
            memory.load_state_dict(part)

    def __repr__(self) -> str:
        return f"Channel({self.exchange!r}, {list(self.memories)!r})"
