"""What a rank keeps from round to round: it changes what the rank sends, and forgets what was sent."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.basis.layout import add_to_
from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.exchange import Exchanged


class NamedVector:
    """A flat vector of zeros whose parts have parameter names. It grows with the layout and loses nothing.

    Attributes:
        flat: `[n]`; `[0]` before the first `bind`.
        parts: Views of `flat` in the parameters' shapes.
    """

    def __init__(self) -> None:
        self.flat = torch.zeros(0)
        self.parts: list[Tensor] = []
        self._named: dict[str, Tensor] = {}

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates `layout`, and fills in what was held under the same names.

        Raises:
            ValueError: A tensor of the same name and another shape was loaded.
        """
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

    def add_(self, vector: SparseVector | Tensor, factor: float = 1.0) -> None:
        """Adds a sparse or dense vector over the layout, times a factor."""
        add_to_(self.flat, vector, factor)

    def subtract_(self, sent: SparseVector | Tensor) -> None:
        """Subtracts a sparse or dense vector over the layout."""
        self.add_(sent, -1.0)

    def zero_where_(self, sent: SparseVector | Tensor) -> None:
        """Sets to zero each element for which something was sent."""
        if isinstance(sent, SparseVector):
            self.flat.index_fill_(0, sent.indices, 0.0)
        else:
            self.flat.masked_fill_(sent != 0, 0.0)

    def norm(self) -> float:
        """Euclidean norm; 0 before the first `bind`."""
        return float(torch.linalg.vector_norm(self.flat))

    def state_dict(self) -> dict[str, Tensor]:
        """The parts by name; they share storage with this vector."""
        return dict(self._named)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned, before or after `bind`."""
        for name, tensor in state.items():
            held = self._named.get(name)
            if held is None:
                self._named[name] = tensor.clone()
            else:
                held.copy_(tensor)


class Memory(Part, ABC):
    """State of one rank that changes what it sends. A channel passes gradients through its memories in order.

    A round calls `prepare`, and then either `commit` or, after any error, `abort`. What a memory holds it holds in
    named vectors, one for each name given to this constructor: they are allocated, saved, resumed and averaged over
    ranks (in a world of another size) by themselves.

    >>> class Counting(Memory):
    ...     # Counts how often each element was sent.
    ...     def __init__(self) -> None:
    ...         super().__init__("count")
    ...     def prepare(self, contribution: Contribution, context: Round) -> Contribution:
    ...         return contribution
    ...     def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
    ...         self.held["count"].flat[exchanged.sent.indices] += 1
    ...         return exchanged

    Args:
        vectors: Names of the vectors that it holds, such as "residual"; found in `held`.

    Attributes:
        held: The vectors, by name.
    """

    carries: ClassVar[bool] = False
    """Whether a gradient that this rank lacks counts as zero where another rank has one, as momentum goes on there.

    Then `prepare` finds zeros instead of None. Where no rank has a gradient, the channel puts back what was held; a
    memory that keeps more than `held` looks at `exchanged.present`.
    """

    in_common: ClassVar[bool] = False
    """Whether what it holds is equal on all ranks, or of use to any of them. A replica that joins a run gets it from
    another one then; otherwise it begins with an empty one."""

    def __init__(self, *vectors: str) -> None:
        self.held = {name: NamedVector() for name in vectors}

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why this memory is not defined for an optimizer, and what to use instead; None where it is."""
        return None

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Allocates room for the tensors of `layout`, and keeps what is held for names that were there before.

        Args:
            layout: Of the gradients in the rounds that follow.
            dtype: float32 or wider.
            device: Where the gradients are.
        """
        for vector in self.held.values():
            vector.bind(layout, dtype, device)

    @abstractmethod
    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        """The contribution, combined with what earlier rounds left behind.

        The parts given to a memory of your own are finite, and are what the memories before it have made of the
        gradients. They may be `.grad` itself, so do not change them: return `contribution.with_parts(...)`, or
        `contribution.added_to_(...)`. The result may share storage with this memory. Parts that are None stay None: a
        parameter without a gradient sends nothing, and keeps what is held for it (but see `carries`).
        """

    def aside(self, context: Round) -> Tensor | None:
        """A few numbers that ranks sum beside the exchange, for `take_aside`; None for none. Called after `prepare`.

        Its shape and dtype are equal on all ranks, also where this rank's gradients are not finite and `prepare` was
        not called, or was undone.
        """
        return None

    def take_aside(self, total: Tensor) -> None:
        """Takes what `aside` gave, summed over ranks. Called right before `commit`, and not in a round that fails."""

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        """Forgets what was sent (`exchanged.sent`), as receivers decode it.

        Returns:
            `exchanged`, or a replacement whose `shared` is changed, equally on all ranks.
        """
        return exchanged

    def abort(self, contribution: Contribution, context: Round) -> None:
        """Undoes `prepare` with the same arguments: the round has failed. Updates by `Contribution.added_to_` have been
        undone already."""

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What to save: any tensors, in groups. Each group of `held` is a vector's name, with a tensor for each
        parameter name; other names are as good. Tensors may share storage with this memory."""
        return {name: vector.state_dict() for name, vector in self.held.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over what `state_dict` returned, before or after `bind`. Groups and names may be missing."""
        for name, vector in self.held.items():
            vector.load_state_dict(state.get(name, {}))
