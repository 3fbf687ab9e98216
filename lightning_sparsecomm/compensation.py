"""From gradients to the vector that is sent from: a sum that memories describe, carried out in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.kernels import Update, kernels_for
from lightning_sparsecomm.layout import Layout

# Elements sampled of n, in units of √n: few enough to rank in well under a millisecond, enough to leave few times k.
_SAMPLE = 8

# The least positive numbers: every non-zero reaches them.
_LEAST = {
    dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)
}


class Wanted(NamedTuple):
    """A stretch of the vector, of which the k largest elements will be sought.

    Attributes:
        start: Its first element.
        stop: The one behind its last.
        k: How many; from 1 to its length.
    """

    start: int
    stop: int
    k: int


Carry = Callable[[Update, float | None, int], Tensor | None]
"""Carries out an update, as `Reference.update_` does."""


class Step(NamedTuple):
    """How momentum takes in one tensor's gradient; see `kernels.Update`."""

    velocity: Tensor
    momentum: float
    gain: float
    lookahead: float | None


@dataclass(frozen=True)
class Contribution:
    """What one rank brings to a round: gradients, and what memories would have done with them.

    Attributes:
        parts: One tensor per segment of the layout, in its shape; None where this rank has no gradient.
        scale: Factor that is still to be applied to the parts.
        steps: For each segment, the momentum that is still to be applied after it; None for none.
        wanted: What will be sought in the vector, so that whoever computes it can note candidates on the way.
        flat: The `[n]` vector whose views the parts are, where all that was to be done is done.
        candidates: For each of `wanted`, sorted positions that hold its k largest elements, or all its non-zeros; None
            where that is not known.
        checked: Whether the parts are looked over when memories take them in.
        done: What has been carried out, in order, of this contribution and of those that came of it; see `take_back`.
    """

    parts: Sequence[Tensor | None]
    scale: float = 1.0
    steps: Sequence[Step | None] = ()
    wanted: Sequence[Wanted] = ()
    flat: Tensor | None = None
    candidates: Sequence[Tensor | None] = field(default=())
    checked: bool = False
    done: list[Update] = field(default_factory=list)

    def vector(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> "Contribution":
        """The same contribution, carried out, as a vector that is zero where parts are None."""
        if self.flat is not None and all(part is not None for part in self.parts):
            return self
        # Zeros are never sent, so a segment without a gradient keeps all that is held for it.
        x = torch.zeros(layout.size, dtype=dtype, device=device)
        if self.flat is None and (self.steps or self.scale != 1):
            return self.added_to_(x, layout)
        views = layout.views(x)
        for view, part in zip(views, self.parts):
            if part is not None:
                view.copy_(part)
        return Contribution(views, wanted=self.wanted, flat=x, candidates=self.candidates, done=self.done)

    def added_to_(self, residual: Tensor, layout: Layout, keep: float = 1.0) -> "Contribution":
        """Adds scaled gradients, through their momentum, to `residual` (`[n]`); candidates are noted in the same pass.

        Segments without a gradient are left as they are, and so is their momentum.

        Raises:
            OutOfRangeError: Parts that are to be checked are not all finite and below `kernels.LIMIT`; what had been
                done by then is in `done`.
        """
        views, flats = layout.views(residual), layout.flats(residual)
        kernels = kernels_for(residual.device, residual.dtype)
        updates: list[Update | None] = []
        for index, (flat, part) in enumerate(zip(flats, self.parts)):
            if part is None:
                updates.append(None)
                continue
            # Positions count in row-major order, which is not how a channels-last gradient lies in memory.
            gradient = part.to(flat.dtype).contiguous().view(-1)
            update = Update(flat, gradient, keep=keep, scale=self.scale, checked=self.checked)
            step = self.steps[index] if self.steps else None
            if step is not None:
                velocity, momentum, gain, lookahead = step
                update = update._replace(velocity=velocity.view(-1), momentum=momentum, gain=gain, lookahead=lookahead)
            updates.append(update)
        before = len(self.done)

        def carry(update: Update, threshold: float | None, capacity: int) -> Tensor | None:
            # Noted before it is done: an interrupt that comes while a kernel runs is raised right behind it.
            self.done.append(update)
            return kernels.update_(update, threshold, capacity)

        candidates = _carry_out(updates, layout, self.wanted, carry)
        # What was converted need not be held for as long as an exchange takes.
        given = zip(updates, self.parts)
        self.done[before:] = [update._replace(gradient=part) for update, part in given if update and part is not None]
        parts = [None if part is None else view for part, view in zip(self.parts, views)]
        return Contribution(parts, wanted=self.wanted, flat=residual, candidates=candidates, done=self.done)

    def take_back(self) -> None:
        """Undoes, to round-off, all that has been carried out, from parts that are still what they were then."""
        while self.done:
            update = self.done.pop()
            kernels_for(update.residual.device, update.residual.dtype).take_back_(update)


def candidates_of(x: Tensor, k: int) -> Tensor | None:
    """Sorted positions that hold the k largest elements of `x` (`[n]`) or all its non-zeros, and not many more; None
    where a sample of `x` does not lead to such."""
    sample = x[:: sample_stride(x.numel())].abs()
    threshold = reached_by_k(sample, x.numel(), k)
    if threshold is None:
        return None
    found = kernels_for(x.device, x.dtype).reaching(x, threshold, candidate_room(k))
    return found if found is not None and _enough(found, k, threshold) else None


def sample_stride(size: int) -> int:
    """Odd, so that a matrix whose rows are a power of two long is not sampled in a few columns only."""
    return int(size**0.5 / _SAMPLE) | 1


def reached_by_k(sample: Tensor, size: int, k: int) -> float | None:
    """A threshold that most likely at least k of `size` magnitudes reach, and few more.

    Four standard deviations more than are expected among the k largest: too few is rare, and costs only time.

    Args:
        sample: Some of the magnitudes.
        size: How many there are in all.
        k: How many are wanted.

    Returns:
        None where most elements would reach it; the least positive number where all non-zeros do.
    """
    expected = k * sample.numel() / size
    rank = int(expected + 4 * expected**0.5 + 8)
    if 2 * rank > sample.numel():
        return None
    threshold = kernels_for(sample.device, sample.dtype).kth_largest(sample, rank)
    # Where the sample says that there are fewer than k non-zeros, all of them are candidates.
    return threshold or _LEAST[sample.dtype]


def _carry_out(
    updates: Sequence[Update | None], layout: Layout, wanted: Sequence[Wanted], carry: Carry
) -> list[Tensor | None]:
    candidates: list[Tensor | None] = []
    segments = layout.segments
    index = 0
    for start, stop, k in wanted:
        while index < len(segments) and segments[index].offset < start:
            if (update := updates[index]) is not None:
                carry(update, None, 0)
            index += 1
        stretch: list[tuple[Update, int]] = []
        while index < len(segments) and segments[index].offset + segments[index].size <= stop:
            if (update := updates[index]) is not None and segments[index].size:
                stretch.append((update, segments[index].offset))
            index += 1
        candidates.append(_note(stretch, k, carry))
    for update in updates[index:]:
        if update is not None:
            carry(update, None, 0)
    return candidates


def _note(stretch: Sequence[tuple[Update, int]], k: int, carry: Carry) -> Tensor | None:
    """Carries out the updates of one stretch; its candidates, unless they turn out too few or too many."""
    if not stretch:
        return None
    kernels = kernels_for(stretch[0][0].residual.device, stretch[0][0].residual.dtype)
    size = sum(update.residual.numel() for update, _ in stretch)
    stride = sample_stride(size)
    sample = [kernels.probe(update, stride) for update, _ in stretch]
    threshold = reached_by_k(sample[0] if len(sample) == 1 else torch.cat(sample), size, k)
    room = candidate_room(k)
    found: list[Tensor] | None = []
    for update, offset in stretch:
        positions = carry(update, threshold if found is not None else None, room)
        if positions is None or found is None:
            found = None
        else:
            found.append(positions.add_(offset))
            room -= positions.numel()
    if threshold is None or found is None:
        return None
    candidates = torch.cat(found) if len(found) > 1 else found[0]
    return candidates if _enough(candidates, k, threshold) else None


def _enough(candidates: Tensor, k: int, threshold: float) -> bool:
    return candidates.numel() >= k or threshold in _LEAST.values()


def candidate_room(k: int) -> int:
    """How many candidates are kept for the k largest: beyond, ranking all elements is as quick."""
    return 8 * k + 4096
