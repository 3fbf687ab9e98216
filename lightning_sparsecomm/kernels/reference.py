"""What every kernel computes, in torch operations that run on any device."""

from typing import NamedTuple

import torch
from torch import Tensor

# What a checked gradient's magnitudes must stay below. An update can be taken back to the round-off of what went in, so
# that of a gradient which explodes would wipe out what is held; no gradient of a training that goes well is so large.
LIMIT = 2.0**16


class OutOfRangeError(ArithmeticError):
    """A gradient that was to be checked holds an infinity, a NaN, or a magnitude of `LIMIT` or more."""


class Update(NamedTuple):
    """How one tensor's gradient goes into what a rank holds back; every operation is rounded by itself, in this order.

        g ← scale·gradient
        u ← momentum·u + gain·g          (only with a velocity)
        v ← keep·v + u                   (or: (keep·v + g) + lookahead·u; or, without a velocity: keep·v + g)

    Attributes:
        residual: v, `[n]` float32 or float64, contiguous; changed in place.
        gradient: `[n]`, contiguous, in the residual's dtype.
        velocity: u, `[n]` in the residual's dtype, contiguous, changed in place; None without momentum.
        keep: Factor on the residual.
        scale: Factor on the gradient.
        momentum: Factor on the velocity.
        gain: Factor on what is added to the velocity: 1 − dampening, or 1 in a tensor's first step.
        lookahead: Nesterov's factor; None for plain momentum.
        checked: Whether the gradient is looked over: then what is not of a magnitude below `LIMIT` counts as 0, and is
            told of.
    """

    residual: Tensor
    gradient: Tensor
    velocity: Tensor | None = None
    keep: float = 1.0
    scale: float = 1.0
    momentum: float = 0.0
    gain: float = 1.0
    lookahead: float | None = None
    checked: bool = False

    def every(self, stride: int) -> "Update":
        """The same update of copies of every `stride`-th element, unchecked."""
        velocity = None if self.velocity is None else self.velocity[::stride].clone()
        return self._replace(
            residual=self.residual[::stride].clone(),
            gradient=self.gradient[::stride],
            velocity=velocity,
            checked=False,
        )


def _in_range(gradient: Tensor) -> Tensor:
    return torch.where(gradient.abs() < LIMIT, gradient, 0.0)


class Reference:
    """The kernels. Subclasses are faster and give the same bits."""

    def probe(self, update: Update, stride: int) -> Tensor:
        """Magnitudes of every `stride`-th element of v as they will be after `update`, of which nothing is changed.

        Returns:
            `[⌈n / stride⌉]`, in the residual's dtype.
        """
        part = update.every(stride)
        self.update_(part, None, 0)
        return part.residual.abs_()

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        """Carries out `update`, and notes where the new magnitude reaches a threshold.

        Args:
            update: What to do.
            threshold: Positive; None notes nothing.
            capacity: How many positions there may be.

        Returns:
            Sorted positions, int64, none of them of a zero; None where they are more than `capacity`.

        Raises:
            OutOfRangeError: Once all is done, where a gradient that was to be checked holds what counts as 0.
        """
        residual, gradient, velocity = update.residual, update.gradient, update.velocity
        in_range = not update.checked or bool((gradient.abs() < LIMIT).all())
        if not in_range:
            gradient = _in_range(gradient)
        if update.scale != 1:
            gradient = gradient * update.scale
        if update.keep != 1:
            residual.mul_(update.keep)
        if velocity is None:
            residual.add_(gradient)
        else:
            # Not add_(alpha=…), which rounds once where the kernels round twice.
            velocity.mul_(update.momentum).add_(gradient if update.gain == 1 else gradient * update.gain)
            if update.lookahead is None:
                residual.add_(velocity)
            else:
                residual.add_(gradient).add_(velocity * update.lookahead)
        if not in_range:
            raise OutOfRangeError
        if threshold is None:
            return residual.new_empty(0, dtype=torch.int64)
        return self.reaching(residual, threshold, capacity)

    def take_back_(self, update: Update) -> None:
        """Undoes `update_`, to round-off; its gradient may be of any dtype, shape and memory format here.

        A velocity whose factor was 0 has kept nothing of what it was: it becomes zero, as it is before its first step.
        """
        residual, velocity = update.residual, update.velocity
        gradient = update.gradient.to(residual.dtype).reshape(residual.shape)
        gradient = (_in_range(gradient) if update.checked else gradient) * update.scale
        if velocity is None:
            residual.sub_(gradient)
        else:
            if update.lookahead is None:
                residual.sub_(velocity)
            else:
                residual.sub_(velocity * update.lookahead).sub_(gradient)
            if update.momentum:
                velocity.sub_(gradient * update.gain).div_(update.momentum)
            else:
                velocity.zero_()
        residual.div_(update.keep)

    def reaching(self, x: Tensor, threshold: float, capacity: int) -> Tensor | None:
        """Where the magnitude of `x` (`[n]`) reaches a positive threshold; arguments and result as for `update_`."""
        found = (x.abs() >= threshold).nonzero().view(-1)
        return found if found.numel() <= capacity else None

    def kth_largest(self, magnitudes: Tensor, k: int) -> float:
        """The k-th largest of `magnitudes` (`[n]`, none negative), 1 <= k <= n."""
        return float(torch.topk(magnitudes, k, sorted=False).values.min())

    def largest(self, x: Tensor, k: int, seed: int) -> Tensor:
        """Sorted positions of the min(k, non-zeros) largest magnitudes of `x` (`[n]`), int64.

        Of T elements that tie for the last m places, numbered in order of position, those numbered
        (seed + ⌊j·T/m⌋) mod T are taken, j = 0 … m − 1.
        """
        if k >= x.numel():
            return x.nonzero().view(-1)
        magnitudes = x.abs()
        threshold = torch.topk(magnitudes, k, sorted=False).values.min()
        if threshold == 0:
            return x.nonzero().view(-1)
        reached = (magnitudes >= threshold).nonzero().view(-1)
        if reached.numel() == k:
            return reached
        tied = (magnitudes == threshold).nonzero().view(-1)
        above = (magnitudes > threshold).nonzero().view(-1)
        places, ties = k - above.numel(), tied.numel()
        spaced = torch.arange(places, device=x.device) * ties // places
        return torch.cat([above, tied[(spaced + seed % ties) % ties]]).sort().values

    def add_up(self, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Sums the values of equal indices, in the order in which they stand.

        Args:
            indices: `[m]` int64, sorted runs one after the other.
            values: `[m]` floating point.

        Returns:
            Strictly increasing indices and their sums.
        """
        ordered, order = torch.sort(indices, stable=True)
        unique, slots, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        # The sum of a single −0 is −0.
        sums = values.new_full((unique.numel(),), -0.0)
        values = values[order]
        # One addition per place and round, so that the order does not depend on the device.
        ordinals = torch.arange(ordered.numel(), device=indices.device) - (counts.cumsum(0) - counts)[slots]
        for ordinal in range(int(counts.max()) if counts.numel() else 0):
            chosen = ordinals == ordinal
            sums[slots[chosen]] += values[chosen]
        return unique, sums

    def energies(self, x: Tensor, bounds: Tensor) -> Tensor:
        """The sum of squares of each stretch of `x` (`[n]`), in float64.

        Not the same bits on each device, since the order of the sums is not. Only a stretch of zeros has 0.

        Args:
            x: What to sum up.
            bounds: `[stretches + 1]` int64, not decreasing, from 0 to n.

        Returns:
            `[stretches]` float64.
        """
        if bounds.numel() == 1:
            return x.new_empty(0, dtype=torch.float64)
        energies = torch.segment_reduce(x.to(torch.float64).square(), "sum", offsets=bounds)
        # The square of a float64 may be too small for one.
        lost = (energies == 0) & (torch.segment_reduce(x.abs(), "max", offsets=bounds, initial=0) > 0)
        return energies.masked_fill_(lost, torch.finfo(torch.float64).tiny)
