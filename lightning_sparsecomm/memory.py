"""What a rank keeps from step to step: compensation before the exchange, forgetting after it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round


class Contribution(NamedTuple):
    """What one rank brings to a round, tensor by tensor, so that nothing is copied before it must be.

    Attributes:
        parts: One tensor per segment of the layout, in its shape; None where this rank has no gradient.
        flat: The `[n]` vector whose views the parts are, where there is one.
    """

    parts: Sequence[Tensor | None]
    flat: Tensor | None = None


class Memory(ABC):
    """State of one rank that changes what it sends. A channel passes the gradients through its memories in order."""

    @abstractmethod
    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Makes room for the tensors of `layout`, keeping what is held for names that were there before.

        Args:
            layout: What `compensate` will be called with from now on.
            dtype: float32 or wider.
            device: Where the gradients are.
        """

    @abstractmethod
    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        """The contribution with what earlier steps left behind; it may share storage with this memory, and None stays
        None: a parameter without a gradient sends nothing and keeps what is held for it."""

    @abstractmethod
    def update(self, sent: SparseVector | Tensor) -> None:
        """Forgets what was sent, as receivers decode it: a sparse or dense vector over the layout."""

    def finish(self, shared: SparseVector | Tensor) -> SparseVector | Tensor:
        """A last change of the shared gradient, equal on all ranks; none by default."""
        return shared

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """What is held, by parameter name. The tensors share storage with this memory."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave, before or after `bind`. Names that the layout lacks are kept for later."""


class NamedVector:
    """A flat vector of zeros whose parts are found by parameter name; it grows with the layout and loses nothing."""

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self.parts: list[Tensor] = []
        self._named: dict[str, Tensor] = {}

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """New room for `layout`, filled from the parts of the same names."""
        flat = torch.zeros(layout.size, dtype=dtype, device=device)
        parts = layout.views(flat)
        for segment, part in zip(layout.segments, parts):
            held = self._named.get(segment.name)
            if held is not None:
                if held.shape != part.shape:
                    raise ValueError(
                        f"the state held for {segment.name!r} has shape {tuple(held.shape)}, but the parameter has"
                        f" {tuple(part.shape)}. Load a checkpoint of the same model, or start without one."
                    )
                part.copy_(held)
            self._named[segment.name] = part
        self.flat, self.parts = flat, parts

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._named)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            held = self._named.get(name)
            if held is None:
                self._named[name] = tensor.clone()
            else:
                held.copy_(tensor)


def forget_(vector: Tensor, sent: SparseVector | Tensor) -> None:
    """Subtracts a sparse or dense `sent` from `vector` (`[n]`), in place."""
    if isinstance(sent, SparseVector):
        vector.index_add_(0, sent.indices, sent.values.to(vector.dtype), alpha=-1)
    else:
        vector.sub_(sent)


class ErrorFeedback(Memory):
    """Adds what earlier steps did not send: E <- decay * E + g, then E <- E - sent.

    So at any time the sum of what was sent, plus E, is the sum of the gradients (with decay 1).

    Source: Seide et al. 2014 (1-bit SGD); Aji & Heafield 2017 (Gradient Dropping).

    Args:
        decay: Factor on E at each step, in (0, 1].

    Raises:
        ValueError: `decay` outside (0, 1].
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(
                f"decay must be in (0, 1]: the part of the residual that is kept; got {decay!r}. Use 1 to keep all."
            )
        self.decay = decay
        self._residual = NamedVector()

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._residual.bind(layout, dtype, device)

    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        for part, gradient in zip(self._residual.parts, contribution.parts):
            if gradient is not None:
                if self.decay != 1:
                    part.mul_(self.decay)
                part.add_(gradient)
        parts = [None if gradient is None else part for part, gradient in zip(self._residual.parts, contribution.parts)]
        return Contribution(parts, self._residual.flat)

    def update(self, sent: SparseVector | Tensor) -> None:
        assert self._residual.flat is not None
        forget_(self._residual.flat, sent)

    def norm(self) -> float:
        """Euclidean norm of this rank's residual."""
        return 0.0 if self._residual.flat is None else float(torch.linalg.vector_norm(self._residual.flat))

    def state_dict(self) -> dict[str, Tensor]:
        return self._residual.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._residual.load_state_dict(state)

    def __repr__(self) -> str:
        return f"ErrorFeedback(decay={self.decay})"
