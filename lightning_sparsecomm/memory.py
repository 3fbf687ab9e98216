"""What a rank keeps from step to step: compensation before the exchange, forgetting after it."""

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.checks import check_switches, is_number
from lightning_sparsecomm.compensation import Contribution, Step
from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round


class Memory(ABC):
    """State of one rank that changes what it sends. A channel passes the gradients through its memories in order."""

    corrects_momentum = False
    """Whether it applies the optimizer's momentum, which the optimizer must then not apply again."""

    clips = False
    """Whether it clips each rank's own gradient, after which the shared one is not clipped again."""

    checks = False
    """Whether `compensate` holds on to nothing of gradients that are not finite, and so can be given such: it leaves
    them to others, or takes them in by `Contribution.added_to_`. Else they are looked over before it is called. Who
    overrides `compensate` says it anew."""

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why this memory is not defined for an optimizer, and what to use instead; None where it is."""
        return None

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

    def take_back(self, contribution: Contribution, round: Round) -> None:  # noqa: B027
        """Undoes `compensate` of the same arguments, whose exchange has failed. What `Contribution.added_to_` has done
        is undone already; nothing by default."""

    @abstractmethod
    def update(self, sent: SparseVector | Tensor) -> None:
        """Forgets what was sent, as receivers decode it: a sparse or dense vector over the layout."""

    def finish(self, exchanged: Exchanged, round: Round) -> Exchanged:
        """A last change of the shared gradient, equal on all ranks; none by default."""
        return exchanged

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

    checks = True

    def __init__(self, decay: float = 1.0) -> None:
        if not (is_number(decay) and 0 < decay <= 1):
            raise ValueError(
                f"decay must be in (0, 1]: the part of the residual that is kept; got {decay!r}. Use 1 to keep all."
            )
        self.decay = decay
        self._residual = NamedVector()

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._residual.bind(layout, dtype, device)

    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        assert self._residual.flat is not None
        return contribution.added_to_(self._residual.flat, round.layout, self.decay)

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


class ClipLocalNorm(Memory):
    """Scales each rank's own gradient down to a norm of τ·√W, before anything is added to it.

    The norm is that of the rank's whole gradient: of all the optimizer's parameters, in whichever sync. τ is the
    threshold that one would give for the averaged gradient. The paper's τ/√W is for a gradient that carries 1/W
    already, which DDP's local gradients do not.

    Source: Deep Gradient Compression, section 3.2.

    Args:
        max_norm: τ; None takes the threshold of the Trainer's `gradient_clip_val`, or of a clipping call.

    Raises:
        ValueError: `max_norm` is not positive.
    """

    clips = True
    checks = True

    def __init__(self, max_norm: float | None = None) -> None:
        if max_norm is not None and not (is_number(max_norm) and 0 < max_norm < math.inf):
            raise ValueError(
                f"clip must be a positive number: the largest norm of the averaged gradient; got {max_norm!r}."
                " Use None for the Trainer's gradient_clip_val, or for no clipping without one."
            )
        self.max_norm = max_norm

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        max_norm = round.max_norm if self.max_norm is None else self.max_norm
        if max_norm is None:
            return contribution
        limit = max_norm * math.sqrt(round.world_size)
        # Not so where the norm is not finite: then some sync's exchange is about to say so.
        if not limit < round.gradient_norm < math.inf:
            return contribution
        return replace(_untouched(contribution, self), scale=contribution.scale * limit / round.gradient_norm)

    def update(self, sent: SparseVector | Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def __repr__(self) -> str:
        return f"ClipLocalNorm(max_norm={self.max_norm})"


def _untouched(contribution: Contribution, memory: Memory) -> Contribution:
    if contribution.flat is not None or contribution.steps:
        raise ValueError(
            "memories must be in the order ClipLocalNorm, MomentumCorrection, ErrorFeedback;"
            f" {memory!r} comes too late."
        )
    return contribution


class _Velocity(Memory):
    """Momentum that the method applies in the place of torch.optim.SGD, with what its groups say in each step."""

    corrects_momentum = True

    def __init__(self) -> None:
        self._velocity = NamedVector()
        self._begun: set[str] = set()
        self._beginning: set[str] = set()
        self._names: list[str] = []

    def objection(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, SGD):
            return None
        return (
            f"momentum correction takes momentum, dampening and Nesterov's method from torch.optim.SGD, and"
            f" {type(optimizer).__name__} has its own averages, which this method does not know how to correct."
            " Use methods.gradient_dropping(), which works with any optimizer, or"
            " dgc(momentum_correction=False) or sketched_sgd(momentum_correction=False)."
        )

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._velocity.bind(layout, dtype, device)
        self._names = [segment.name for segment in layout.segments]

    def steps(self, present: list[bool], round: Round) -> list[Step | None]:
        """What momentum does to each segment in this step; None where it has no momentum or no gradient.

        A velocity begins as the gradient itself, without dampening, as in torch. It has begun once `begin` is called.
        """
        steps: list[Step | None] = []
        self._beginning = set()
        for name, here, velocity, rule in zip(self._names, present, self._velocity.parts, round.momentum, strict=True):
            if not here or rule.momentum == 0:
                steps.append(None)
                continue
            begun = rule.begun or name in self._begun
            self._beginning.add(name)
            factors = (rule.momentum, 1 - rule.dampening) if begun else (0.0, 1.0)
            steps.append(Step(velocity, *factors, rule.momentum if rule.nesterov else None))
        return steps

    def begin(self) -> None:
        """Notes that the last `steps` have been made for good."""
        self._begun |= self._beginning

    def state_dict(self) -> dict[str, Tensor]:
        return {name: part for name, part in self._velocity.state_dict().items() if name in self._begun}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._velocity.load_state_dict(state)
        self._begun |= state.keys()


class MomentumCorrection(_Velocity):
    """Momentum before the exchange: u <- m u + g, and u is what the residual takes in; then u <- 0 where sent.

    Momentum of what has waited in the residual is so discounted as it would have been had it been sent at once. It
    must come before `ErrorFeedback`. At density 1 and without masking it is torch's SGD.

    Source: Deep Gradient Compression, sections 3.2 (momentum correction) and 3.3 (momentum factor masking), appendix B
    (Nesterov; here in a form that equals torch's also where momentum changes from step to step).

    Args:
        mask: Whether momentum is set to zero wherever something was sent.
    """

    checks = True

    def __init__(self, mask: bool = True) -> None:
        super().__init__()
        check_switches(mask=mask)
        self.mask = mask

    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        steps = self.steps([part is not None for part in contribution.parts], round)
        return replace(_untouched(contribution, self), steps=steps)

    def update(self, sent: SparseVector | Tensor) -> None:
        self.begin()
        if not self.mask or not self._begun:
            return
        assert self._velocity.flat is not None
        if isinstance(sent, SparseVector):
            self._velocity.flat.index_fill_(0, sent.indices, 0.0)
        else:
            self._velocity.flat.masked_fill_(sent != 0, 0.0)

    def __repr__(self) -> str:
        return f"MomentumCorrection(mask={self.mask})"


class Momentum(_Velocity):
    """Momentum after the exchange: u <- m u + shared, equal on all ranks, as torch's SGD would do with it.

    For parameters that a method sends whole while it corrects the momentum of others, so that all see one rule.
    """

    checks = True

    def compensate(self, contribution: Contribution, round: Round) -> Contribution:
        return contribution

    def update(self, sent: SparseVector | Tensor) -> None:
        pass

    def finish(self, exchanged: Exchanged, round: Round) -> Exchanged:
        shared = exchanged.shared
        x = shared.dense() if isinstance(shared, SparseVector) else shared
        moved = torch.zeros_like(x)
        gradients = [view if here else None for view, here in zip(round.layout.views(x), exchanged.present)]
        steps = self.steps(list(exchanged.present), round)
        Contribution(gradients, steps=steps).added_to_(moved, round.layout)
        self.begin()
        return exchanged._replace(shared=moved)

    def __repr__(self) -> str:
        return "Momentum()"
