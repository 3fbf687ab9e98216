"""The residual: what earlier rounds did not send is added to the next gradient."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.basis.allocation import empty
from lightning_sparsecomm.basis.arguments import check_booleans, is_number
from lightning_sparsecomm.channel.contribution import Contribution, Step
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchanged
from lightning_sparsecomm.kernels import Moments, direction


class _Unit(NamedTuple):
    """The learning rate in which one segment of the residual is measured: residual times `rate` is a change of weights.

    Attributes:
        rate: The learning rate, but at least a fixed part of the largest one so far.
        largest: The largest learning rate so far.
    """

    rate: float
    largest: float


class ErrorFeedback(Memory):
    """Adds what earlier rounds did not send: E ← decay · E + g, then E ← E − sent.

    So with decay 1, the sum of all that was sent, plus E, is the sum of all gradients at any time.

    With SGD, or after `LocalAdam`, that holds of learning rate times gradient (or direction): when the rate changes
    from η to η', E ← E·η/η', so a gradient counts as much as in the step that computed it, however late it is sent.
    Below 1/1000 of its largest value so far the rate is no longer followed, since gradients would be scaled up without
    bound; below 1/10 where the optimizer's own momentum keeps what was sent for later steps. Then E keeps what a step
    with so small a rate, or with none, does not apply.

    Source: Seide et al. 2014 (1-bit SGD); Aji & Heafield 2017 (Gradient Dropping). Learning rate in E: Karimireddy et
    al. 2019, Error Feedback Fixes SignSGD, algorithm 1; Sketched-SGD, algorithm 2.

    >>> ErrorFeedback(decay=0.95)
    ErrorFeedback(decay=0.95, follow_rate=True)

    Args:
        decay: Factor on E in each round, in (0, 1].
        follow_rate: Whether E follows the learning rate. Otherwise E counts at the rate of the step that sends it, as
            in Gradient Dropping and Deep Gradient Compression.

    Raises:
        ValueError: `decay` outside (0, 1].
        TypeError: `follow_rate` is neither True nor False.
    """

    def __init__(self, decay: float = 1.0, follow_rate: bool = True) -> None:
        super().__init__("residual")
        if not (is_number(decay) and 0 < decay <= 1):
            raise ValueError(
                f"decay must be in (0, 1]: the part of the residual that is kept; got {decay!r}. Use 1 to keep all."
            )
        check_booleans(follow_rate=follow_rate)
        self.decay = decay
        self.follow_rate = follow_rate
        self._units: dict[str, _Unit] = {}
        self._next_units: dict[str, _Unit] = {}
        self._keeps: list[float] = []
        self._applied: list[float] = []
        self._taken_in: Contribution | None = None

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        rates = contribution.settings.rates
        self._taken_in = contribution
        self._next_units, self._keeps, self._applied = {}, [], []
        if not (self.follow_rate and rates):
            return contribution.added_to_(self.held["residual"].flat, context.layout, self.decay)
        for segment, rate in zip(context.layout.segments, rates, strict=True):
            before = self._units.get(segment.name)
            largest = max(rate, before.largest if before else 0.0)
            # Where all rates so far were 0, any unit will do, as E is 0.
            unit = _Unit(max(rate, largest * contribution.settings.least_rate) or 1.0, largest)
            self._next_units[segment.name] = unit
            self._keeps.append(before.rate / unit.rate if before else 1.0)
            self._applied.append(rate / unit.rate)
        keeps = [self.decay * keep for keep in self._keeps]
        return contribution.added_to_(self.held["residual"].flat, context.layout, keeps)

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        residual, taken_in = self.held["residual"], self._taken_in
        sent = exchanged.sent
        self._units |= self._next_units
        if taken_in is not None and self._keeps:
            # A segment without a gradient was left alone until now.
            for part, here, view, keep in zip(taken_in.parts, exchanged.present, residual.parts, self._keeps):
                if (part is None or not here) and keep != 1:
                    view.mul_(keep)
            if any(applied != 1 for applied in self._applied):
                sent = scaled_by_segment(sent, self._applied, context.layout)
                self._take_out_unapplied(taken_in, exchanged.present)
        self._taken_in = None
        residual.subtract_(sent)
        return exchanged

    def abort(self, contribution: Contribution, context: Round) -> None:
        self._taken_in = None

    def entering(self) -> list[Tensor | None]:
        """What this round's gradients have added to the residual, by segment, until `commit`; None where nothing.

        With momentum, or moments, that is a velocity, or a direction. Tensors may be a memory's own. Empty where this
        rank's gradients are not finite.
        """
        given = self._taken_in
        if given is None:
            return []
        steps = given.steps or [None] * len(given.parts)
        return [None if part is None else _entering(part, step, given.scale) for part, step in zip(given.parts, steps)]

    def amend(self, index: int, change: Tensor) -> None:
        """Adds to a segment as if what entered it in the last round, in which nothing was sent, had held this too."""
        part = self.held["residual"].parts[index]
        part.add_(change.view(part.shape), alpha=self._applied[index] if self._applied else 1.0)

    def _take_out_unapplied(self, taken_in: Contribution, present: Sequence[bool]) -> None:
        """Where the unit is above the learning rate, E has taken in the gradient as if at the unit."""
        steps = taken_in.steps or [None] * len(taken_in.parts)
        views = self.held["residual"].parts
        for part, here, step, view, applied in zip(taken_in.parts, present, steps, views, self._applied):
            if part is not None and here and applied != 1:
                view.sub_(_entering(part, step, taken_in.scale), alpha=1 - applied)

    def waiting(self, layout: Layout) -> Tensor:
        """What has not been sent yet, times its learning rates: the change of weights that it stands for, `[n]`.

        Where no learning rate is known, it counts as 0.
        """
        rates = [self._units[each.name].rate if each.name in self._units else 0.0 for each in layout.segments]
        waiting = scaled_by_segment(self.held["residual"].flat, rates, layout)
        assert isinstance(waiting, Tensor)
        return waiting

    def forget(self) -> None:
        """Sets the residual to zero, after what was waiting has been applied in another way."""
        self.held["residual"].flat.zero_()

    def norm(self) -> float:
        """Euclidean norm of this rank's residual."""
        return self.held["residual"].norm()

    def state_dict(self) -> Mapping[str, Mapping[str, Tensor]]:
        units = {name: torch.tensor(unit, dtype=torch.float64) for name, unit in self._units.items()}
        return {**super().state_dict(), "unit": units}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state_dict(state)
        self._units |= {name: _Unit(*unit.tolist()) for name, unit in state.get("unit", {}).items()}


def _entering(part: Tensor, step: Step | Moments | None, scale: float) -> Tensor:
    """What a gradient, or the velocity or direction that follows from it, adds to the residual, in the same shape."""
    if isinstance(step, Moments):
        return direction(step).view(part.shape)
    if step is None:
        return part * scale
    velocity = step.velocity.view(part.shape)
    return velocity if step.lookahead is None else velocity * step.lookahead + part.to(velocity.dtype) * scale


def scaled_by_segment(vector: SparseVector | Tensor, factors: Sequence[float], layout: Layout) -> SparseVector | Tensor:
    """The vector, each segment times its factor; in other memory."""
    if isinstance(vector, SparseVector):
        counts = torch.tensor(layout.counts(vector.indices), device=vector.values.device)
        each = torch.tensor(factors, dtype=vector.values.dtype, device=vector.values.device).repeat_interleave(counts)
        return vector._replace(values=vector.values * each)
    result = empty(vector.numel(), vector)
    if len(set(factors)) == 1:
        return torch.mul(vector, factors[0], out=result)
    for view, flat, factor in zip(layout.flats(result), layout.flats(vector), factors):
        torch.mul(flat, factor, out=view)
    return result
