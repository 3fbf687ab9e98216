"""What runs a sync for one optimizer, with all its state."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, Round, Warmup, Wire
from lightning_sparsecomm.basis.schedules import Every, every_at, every_for
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.sharing.gradients import NamedParameters, wide_dtype

TurnKind = Literal["gradients", "weights", "land", "end"]
"""When a turn takes place: before an optimizer step, after it, or after the last one. "land" uses what is in flight."""


@dataclass(frozen=True)
class Turn:
    """One turn of an optimizer's shares: all exchange together, or none does.

    Attributes:
        kind: When it takes place.
        step: Optimizer steps finished before the step it belongs to.
        epoch: Epochs finished, including a fraction.
        seed: The run's seed, equal on all ranks.
        warmup: Replaces densities early in training; None for no such warm-up.
        gradient_norm: Norm of this rank's whole gradient of the optimizer; NaN where nothing needs it.
        max_norm: The user's threshold for clipping the averaged gradient; None for none.
        length: Optimizer steps of the whole run; infinite where unknown.
        ends_epoch: Whether an epoch ends with it, so that ranks should share their weights then; equal on all ranks.
        may_end_sooner: Whether the run may end at any time before its length; equal on all ranks.
    """

    kind: TurnKind
    step: int
    epoch: float = 0.0
    seed: int = 0
    warmup: Warmup | None = None
    gradient_norm: float = math.nan
    max_norm: float | None = None
    length: float = math.inf
    ends_epoch: bool = False
    may_end_sooner: bool = False

    def every(self, every: Every) -> int:
        """Steps between two exchanges at this time of the run; errors as of `every_at`."""
        return every_at(every_for(every, self.length), self.step, self.epoch)


class Share(ABC):
    """Some parameters of one optimizer, and how they are exchanged.

    In each turn in which it is `due`, it is prepared, exchanged, and then committed, or aborted where any share of the
    turn failed.

    Args:
        optimizer: Whose parameters they are.
        parameters: In named-parameter order; equal on all ranks.
        wire: Where to communicate.

    Attributes:
        channel: Memories and exchange of its own; set by subclasses.
        layout: Layout of the parameters.
    """

    channel: Channel

    torn: bool = False
    """Whether an error has lost what was computed in a step that counts."""

    failure: Exception | None = None
    """An error in flight that was found between turns, where others may have found none: the next turn raises it."""

    def __init__(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self.optimizer = optimizer
        self.wire = wire
        self._bound: Layout | None = None
        self.extend(parameters)

    def extend(self, parameters: NamedParameters) -> None:
        """Takes over more parameters: all of them are given, in named-parameter order. State is kept by name."""
        self.parameters = parameters
        self.layout = Layout.of(parameters)

    @property
    def overlaps(self) -> bool:
        """Whether `prepare` starts communication, so that other shares can do their work meanwhile."""
        return self.channel.exchange.overlaps

    @property
    def closes_round(self) -> bool:
        """Whether all its parameters have had their turn with the last exchange, so that buffers are averaged."""
        return True

    @abstractmethod
    def due(self, turn: Turn) -> bool:
        """Whether it takes part in this turn; equal on all ranks."""

    def before_step(self) -> None:  # noqa: B027
        """Called before each optimizer step, even one that is about to be skipped."""

    def skip(self) -> None:  # noqa: B027
        """Called instead of a turn of gradients that the loss scaler skips: nothing is sent, and no memory changes."""

    def after_step(self) -> None:  # noqa: B027
        """Called after each optimizer step."""

    def before_update(self) -> None:  # noqa: B027
        """Called right before the optimizer changes its weights, and after all hooks that Lightning calls in a step."""

    def after_update(self) -> None:  # noqa: B027
        """Called right after the optimizer has changed its weights, and before any other code sees them."""

    @abstractmethod
    def prepare(self, turn: Turn) -> None:
        """Memories take in gradients or changes of weights; what needs no other rank is started."""

    def exchange(self) -> None:
        """Exchanges what was prepared, or waits for it."""
        with self.wire.ledger.exchanging():
            self.channel.run()

    @abstractmethod
    def commit(self) -> None:
        """Memories forget what was sent; the result is written to `.grad`, or to the weights."""

    @abstractmethod
    def abort(self) -> None:
        """Memories are as before the turn, to round-off. May come without `prepare`, and more than once."""

    def take_back(self) -> None:
        """Makes the turn repeatable after its exchange has failed: memories are as before it, and so is what it read.

        To round-off, as `abort`. What it will read again is not lost, unlike there.
        """
        self.abort()

    def before_view(self) -> None:  # noqa: B027
        """Called on all ranks together, before they validate or save `shared_weights`; it may communicate."""

    def shared_weights(self) -> list[tuple[Tensor, Tensor]] | None:
        """Each weight with the value that all ranks share, where it keeps such values; no collective.

        Returns:
            Empty where weights and shared values are equal now. None where it keeps no shared values.
        """
        return None

    def to_hand_out(self) -> list[tuple[Parameter, Tensor]]:
        """What the last commit has changed and ranks of a node have in common, each tensor with its parameter.

        It holds the result where this rank exchanges the parameter; elsewhere, that of another rank is written to it.
        Parameters and kinds of tensors are equal on all ranks of a node, in the same order for those of each rank.
        """
        return []

    def in_common(self) -> list[tuple[Parameter, Tensor]]:
        """As `to_hand_out`, the weights that all ranks share, where it keeps them."""
        return []

    def handed_out(self) -> None:  # noqa: B027
        """Called when all that `to_hand_out` has returned holds the results."""

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank has not sent yet."""
        return self.channel.residual_norm()

    def hand_back(self) -> dict[int, Tensor]:
        """Gives away what it holds, when another method goes on: to the optimizer, or in what it returns. A collective.

        Returns:
            By the parameter's identity, what its next shared gradient is to be increased by.
        """
        return {}

    @abstractmethod
    def state_dict(self) -> Saved:
        """What it holds, by kind and name; tensors share storage with it."""

    @abstractmethod
    def load_state_dict(self, saved: Saved) -> None:
        """Takes out of `saved` what was held for its parameters, before its next turn."""

    def _bind(self) -> bool:
        """Allocates room for parameters that are new; whether there were any."""
        if self._bound == self.layout or not self.parameters:
            return False
        self.channel.bind(self.layout, wide_dtype(self.parameters), self.parameters[0][1].device)
        self._bound = self.layout
        return True

    def _count_ddp(self) -> None:
        """Enters what ddp would have sent."""
        ledger = self.wire.ledger
        ledger.ddp_bytes += sum(parameter.nbytes for _, parameter in self.parameters if parameter.requires_grad)
        ledger.elements += self.layout.size

    def _count_sent(self, exchanged: Exchanged) -> None:
        self.wire.ledger.sent_elements += self.channel.exchange.elements(exchanged)

    def _context(self, turn: Turn, quantity: str = "gradient") -> Round:
        return Round(
            self.layout,
            step=turn.step,
            epoch=turn.epoch,
            seed=turn.seed,
            rank=self.wire.rank,
            world_size=self.wire.world_size,
            warmup=turn.warmup,
            quantity=quantity,
            length=turn.length,
            may_end_sooner=turn.may_end_sooner,
            dtype=wide_dtype(self.parameters),
        )
