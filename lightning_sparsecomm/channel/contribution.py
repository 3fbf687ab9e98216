"""From gradients to the vector that is sent: memories describe one sum, and the last one carries it out in one pass."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.selectors.candidates import (
    Wanted,
    candidate_room,
    enough,
    sample_stride,
    threshold_for,
)
from lightning_sparsecomm.kernels import Moments, Update, kernels_for


class MomentumRule(NamedTuple):
    """One parameter's momentum in this step, as torch.optim.SGD defines it.

    Attributes:
        momentum: Factor on the velocity; 0 for none.
        dampening: 1 minus the factor on the gradient.
        nesterov: Whether the step looks ahead.
        begun: Whether the optimizer already has a momentum buffer, so that this is not the velocity's first step.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    begun: bool = False


class AdamRule(NamedTuple):
    """One parameter's settings in this step, as torch.optim.Adam and AdamW define them.

    Attributes:
        beta1: β1, the factor on the first moment.
        beta2: β2, the factor on the second moment.
        epsilon: Added to the root of the second moment.
        sign: −1 where the optimizer maximizes, else 1.
        decay: L2 decay: this part of the weights is added to the gradient. 0 where decay is decoupled, as in AdamW.
        weights: The parameter's weights; None without L2 decay.
        begun: The optimizer's own state of the parameter (`step`, `exp_avg`, `exp_avg_sq`), from which moments go on;
            empty where there is none.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    sign: float = 1.0
    decay: float = 0.0
    weights: Tensor | None = None
    begun: Mapping[str, Tensor] = {}


class StepSettings(NamedTuple):
    """What an optimizer and the Trainer prescribe for one step.

    Attributes:
        momentum: A rule for each segment; empty where no memory applies momentum.
        gradient_norm: Euclidean norm of this rank's whole gradient, over all of the optimizer's parameters; NaN where
            nothing needs it.
        max_norm: The user's threshold for clipping the averaged gradient; None for none.
        rates: The learning rate of each segment; empty where a step is not proportional to it.
        least_rate: The part of the largest learning rate so far below which what waits does not follow the rate.
        adam: A rule for each segment; empty where no memory keeps Adam's moments.
        weight: Factor that was applied to the gradients already, of a replica that counts more or less in the mean.
    """

    momentum: Sequence[MomentumRule] = ()
    gradient_norm: float = math.nan
    max_norm: float | None = None
    rates: Sequence[float] = ()
    adam: Sequence[AdamRule] = ()
    weight: float = 1.0
    least_rate: float = 1e-3


class Step(NamedTuple):
    """How momentum takes in one tensor's gradient; see `kernels.Update`."""

    velocity: Tensor
    momentum: float
    gain: float
    lookahead: float | None


@dataclass(frozen=True)
class Contribution:
    """What one rank brings to a round: its gradients, and what memories want done with them.

    Attributes:
        parts: One tensor for each segment of the layout, in its shape; None where this rank has no gradient.
        settings: What the optimizer prescribes for this step.
        scale: Factor still to be applied to the parts.
        steps: For each segment, momentum or Adam's moments still to be applied after that; None for none.
        wanted: Stretches whose largest elements will be selected: whoever computes the vector notes candidates.
        flat: The `[n]` vector that the parts are views of, once everything has been carried out.
        hints: The candidates noted for `wanted`, where there are such; see `Vector.hints`.
        checked: Whether the parts have yet to be checked for values that are not finite, as they are taken in.
        done: Updates carried out so far, in order, for this contribution and those derived from it; for `abort`.
    """

    parts: Sequence[Tensor | None]
    settings: StepSettings = StepSettings()  # noqa: RUF009
    scale: float = 1.0
    steps: Sequence[Step | Moments | None] = ()
    wanted: Sequence[Wanted] = ()
    flat: Tensor | None = None
    hints: Mapping[tuple[int, int, int], Tensor] = field(default_factory=dict)
    checked: bool = False
    done: list[Update] = field(default_factory=list)

    @property
    def present(self) -> list[bool]:
        """For each segment, whether this rank has a gradient for it."""
        return [part is not None for part in self.parts]

    def with_parts(self, parts: Sequence[Tensor | None]) -> "Contribution":
        """A contribution of other tensors instead, to which nothing is still to be applied; for a memory of your own.

        Args:
            parts: One tensor for each segment, in its shape; None exactly where `self.parts` has None.
        """
        return Contribution(parts, self.settings, wanted=self.wanted, done=self.done)

    def vector(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> "Contribution":
        """The contribution carried out, as a vector that is zero in segments without a gradient."""
        if self.flat is not None and all(self.present):
            return self
        # Zeros are never sent, so a segment without a gradient keeps all that is held for it.
        x = torch.zeros(layout.size, dtype=dtype, device=device)
        if self.flat is None and (self.steps or self.scale != 1):
            return self.added_to_(x, layout)
        views = layout.views(x)
        for view, part in zip(views, self.parts):
            if part is not None:
                view.copy_(part)
        parts = [None if part is None else view for part, view in zip(self.parts, views)]
        return Contribution(parts, self.settings, wanted=self.wanted, flat=x, hints=self.hints, done=self.done)

    def added_to_(self, residual: Tensor, layout: Layout, keep: float | Sequence[float] = 1.0) -> "Contribution":
        """Adds the scaled gradients, through momentum or moments, to `residual`; notes candidates in the same pass.

        Segments without a gradient, their momentum and their moments stay as they are.

        Args:
            residual: `[n]` float32 or wider; changed in place.
            layout: Of the residual.
            keep: Factor on what `residual` holds before, or one for each segment.

        Returns:
            The contribution carried out, whose parts are views of `residual`.

        Raises:
            OutOfRangeError: Parts to be checked are not all finite and below `kernels.LIMIT`. What was carried out by
                then is in `done`.
        """
        views, flats = layout.views(residual), layout.flats(residual)
        keeps = [keep] * len(flats) if isinstance(keep, (int, float)) else keep
        updates: list[tuple[int, Update]] = []
        given: list[Tensor] = []
        for index, (flat, part) in enumerate(zip(flats, self.parts)):
            if part is None or not part.numel():
                continue
            # Positions count in row-major order; a channels-last gradient lies differently in memory.
            gradient = part.to(flat.dtype).contiguous().view(-1)
            update = Update(flat, gradient, keep=keeps[index], scale=self.scale, checked=self.checked)
            step = self.steps[index] if self.steps else None
            if isinstance(step, Moments):
                update = update._replace(moments=step)
            elif step is not None:
                velocity, momentum, gain, lookahead = step
                update = update._replace(velocity=velocity.view(-1), momentum=momentum, gain=gain, lookahead=lookahead)
            updates.append((layout.segments[index].offset, update))
            given.append(part)
        before = len(self.done)
        hints = self._apply_all(updates)
        # Converted gradients need not be kept for as long as an exchange takes.
        self.done[before:] = [update._replace(gradient=part) for (_, update), part in zip(updates, given)]
        parts = [None if part is None else view for part, view in zip(self.parts, views)]
        return Contribution(parts, self.settings, wanted=self.wanted, flat=residual, hints=hints, done=self.done)

    def _apply_all(self, updates: Sequence[tuple[int, Update]]) -> dict[tuple[int, int, int], Tensor]:
        """Applies updates, given with their offsets in order; the candidates found for the wanted stretches."""
        hints: dict[tuple[int, int, int], Tensor] = {}
        if updates:
            residual = updates[0][1].residual
            kernels = kernels_for(residual.device, residual.dtype)
            if kernels.many_at_once:
                kernels.update_all_([update for _, update in updates], self.done)
                return hints
        waiting = deque(updates)
        for stretch in self.wanted:
            if stretch.wants_many:
                continue
            while waiting and waiting[0][0] < stretch.start:
                self._apply(waiting.popleft()[1])
            inside: list[tuple[int, Update]] = []
            while waiting and waiting[0][0] + waiting[0][1].residual.numel() <= stretch.stop:
                inside.append(waiting.popleft())
            found = self._apply_noting(inside, stretch.k) if inside else None
            if found is not None:
                hints[stretch] = found
        for _, update in waiting:
            self._apply(update)
        return hints

    def _apply_noting(self, inside: Sequence[tuple[int, Update]], k: int) -> Tensor | None:
        """Applies the updates of one stretch; its candidates, unless there are too few or too many."""
        residual = inside[0][1].residual
        kernels = kernels_for(residual.device, residual.dtype)
        size = sum(update.residual.numel() for _, update in inside)
        stride = sample_stride(size)
        sample = [kernels.probe(update, stride) for _, update in inside]
        threshold = threshold_for(sample[0] if len(sample) == 1 else torch.cat(sample), size, k)
        room = candidate_room(k)
        found: list[Tensor] | None = []
        for offset, update in inside:
            positions = self._apply(update, threshold if found is not None else None, room)
            if positions is None or found is None:
                found = None
            else:
                found.append(positions.add_(offset))
                room -= positions.numel()
        if threshold is None or found is None:
            return None
        candidates = torch.cat(found) if len(found) > 1 else found[0]
        return candidates if enough(candidates, k, threshold) else None

    def _apply(self, update: Update, threshold: float | None = None, room: int = 0) -> Tensor | None:
        # Noted first: an interrupt that arrives during a kernel is raised right after it.
        self.done.append(update)
        return kernels_for(update.residual.device, update.residual.dtype).update_(update, threshold, room)

    def abort(self) -> None:
        """Undoes, to round-off, all that has been carried out. The gradients must still be what they were then."""
        while self.done:
            update = self.done.pop()
            kernels_for(update.residual.device, update.residual.dtype).take_back_(update)
