"""The definition of every update kernel, in torch operations that run on any device."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.kernels.updates.moments import Moments, advance_, direction, retreat_
from lightning_sparsecomm.kernels.updates.rows import Rows
from lightning_sparsecomm.kernels.updates.sums import Sums

# Checked gradients must stay below this magnitude. `take_back_` is exact only up to the round-off of the gradient, so
# taking back an exploding gradient would destroy the residual. Healthy training never has gradients this large.
LIMIT = 2.0**16

# The kinds of update, by their last line below.
PLAIN, MOMENTUM, NESTEROV = range(3)


class OutOfRangeError(ArithmeticError):
    """A checked gradient holds an infinity, a NaN, or a magnitude of `LIMIT` or more."""


class Update(NamedTuple):
    """How one tensor's gradient changes its residual and velocity.

    Kernels round each operation separately, in this order:

        g ← scale·gradient
        u ← momentum·u + gain·g               (only with a velocity)
        v ← keep·v + g                        (without a velocity)
        v ← keep·v + u                        (with momentum)
        v ← (keep·v + g) + lookahead·u        (with Nesterov momentum)
        v ← keep·v + x                        (with moments, which g changes and which give x; see `Moments`)

    Attributes:
        residual: v, `[n]` float32 or float64, contiguous; changed in place.
        gradient: `[n]` in the residual's dtype, contiguous.
        velocity: u, `[n]` in the residual's dtype, contiguous; changed in place. None without momentum.
        keep: Factor on the residual.
        scale: Factor on the gradient.
        momentum: Factor on the velocity.
        gain: Factor on the gradient that enters the velocity: 1 − dampening, or 1 in a tensor's first step.
        lookahead: Nesterov's factor; None for plain momentum.
        checked: Whether to check the gradient. If so, elements that are NaN or not below `LIMIT` in magnitude count as
            0, and kernels report them with `OutOfRangeError`.
        moments: Adam's moments, instead of a velocity; None without.
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
    moments: Moments | None = None

    @property
    def kind(self) -> int:
        """`PLAIN`, `MOMENTUM` or `NESTEROV`."""
        if self.velocity is None:
            return PLAIN
        return MOMENTUM if self.lookahead is None else NESTEROV


Stretch = tuple[int, int, int]
"""Where elements of a vector begin and stop, and k: how many of the largest of them are asked for, at least 1."""


class Reference(Rows, Sums):
    """The kernels in torch. Subclasses are faster and give the same bits.

    Attributes:
        many_at_once: Whether `update_all_` and `largest_of_each` are as fast for many tensors as for one. Then nothing
            is gained by candidates that were noted before.
    """

    many_at_once: ClassVar[bool] = False

    def probe(self, update: Update, stride: int) -> Tensor:
        """The magnitudes that `update` would give every `stride`-th element of the residual; changes nothing."""
        velocity = None if update.velocity is None else update.velocity[::stride].clone()
        moments = None if update.moments is None else copied(update.moments.part(slice(None, None, stride)))
        residual, gradient = update.residual[::stride].clone(), update.gradient[::stride].contiguous()
        sample = update._replace(
            residual=residual, gradient=gradient, velocity=velocity, moments=moments, checked=False
        )
        self.update_(sample, None, 0)
        return sample.residual.abs_()

    def update_(self, update: Update, threshold: float | None, capacity: int) -> Tensor | None:
        """Applies `update` in place and finds the elements of the new residual that reach a threshold in magnitude.

        Args:
            update: Its residual and velocity are changed.
            threshold: Positive; None finds nothing.
            capacity: The most positions to return.

        Returns:
            Sorted positions, `[m]` int64, never that of a zero. None if there are more than `capacity`.

        Raises:
            OutOfRangeError: `update.checked` is set and the gradient is out of range. The update has been applied
                nevertheless, with those elements as 0.
        """
        residual, gradient, velocity = update.residual, update.gradient, update.velocity
        in_range = not update.checked or bool((gradient.abs() < LIMIT).all())
        if not in_range:
            gradient = _in_range(gradient)
        if update.scale != 1:
            gradient = gradient * update.scale
        if update.keep != 1:
            residual.mul_(update.keep)
        if update.moments is not None:
            for chunk in update.moments.chunks():
                moments = update.moments.part(chunk)
                advance_(moments, gradient[chunk])
                residual[chunk].add_(direction(moments))
        elif velocity is None:
            residual.add_(gradient)
        else:
            # Not add_(alpha=…): it rounds once where the other kernels round twice.
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

    def update_all_(self, updates: Sequence[Update], done: list[Update] | None = None) -> None:
        """Applies updates of different tensors, in any order, and finds nothing.

        Args:
            updates: As for `update_`.
            done: Each is appended to it right before it is applied, once all that may fail or wait has been done.

        Raises:
            OutOfRangeError: As for `update_`; all have been applied.
        """
        in_range = True
        for update in updates:
            if done is not None:
                done.append(update)
            try:
                self.update_(update, None, 0)
            except OutOfRangeError:
                in_range = False
        if not in_range:
            raise OutOfRangeError

    def take_back_(self, update: Update) -> None:
        """Undoes `update_` in place, up to round-off. Here the gradient may have any dtype, shape and memory format.

        With a momentum of 0, the old velocity is lost. It becomes zero, as it was before its first step. The same goes
        for a moment whose factor is 0.
        """
        residual, velocity = update.residual, update.velocity
        gradient = update.gradient.to(residual.dtype).reshape(residual.shape)
        gradient = (_in_range(gradient) if update.checked else gradient) * update.scale
        if update.moments is not None:
            for chunk in update.moments.chunks():
                moments = update.moments.part(chunk)
                residual[chunk].sub_(direction(moments))
                retreat_(moments, gradient[chunk])
        elif velocity is None:
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
        """Finds the elements of `x` (`[n]`) that reach a positive threshold in magnitude, as `update_` does."""
        found = (x.abs() >= threshold).nonzero().view(-1)
        return found if found.numel() <= capacity else None

    def kth_largest(self, magnitudes: Tensor, k: int) -> float:
        """The k-th largest of `magnitudes` (`[n]`, none negative), 1 <= k <= n."""
        return float(torch.topk(magnitudes, k, sorted=False).values.min())

    def largest(self, x: Tensor, k: int, seed: int) -> Tensor:
        """Finds the k largest magnitudes of `x` (`[n]`): sorted positions, `[min(k, non-zeros)]` int64.

        Suppose T elements tie for the last m places. Numbered by position from 0, the elements
        (seed + ⌊j·T/m⌋) mod T for j = 0 … m − 1 are taken.
        """
        if k >= x.numel():
            return x.nonzero().view(-1)
        if k == 0:
            return torch.zeros(0, dtype=torch.int64, device=x.device)
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

    def largest_of_each(self, x: Tensor, stretches: Sequence[Stretch], seed: int) -> Tensor:
        """What `largest` finds in each stretch of `x`: sorted positions in `x`. Stretches are in order, not empty."""
        found = [self.largest(x[start:stop], k, seed).add_(start) for start, stop, k in stretches]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)

    def energies(self, x: Tensor, bounds: Tensor) -> Tensor:
        """Sums the squares of each stretch of `x` (`[n]`): `[stretches]` float64, 0 only for stretches of zeros.

        `bounds` is `[stretches + 1]` int64, non-decreasing, from 0 to n. Bits may differ between devices, because the
        order of additions does.
        """
        if bounds.numel() == 1:
            return x.new_empty(0, dtype=torch.float64)
        energies = torch.segment_reduce(x.to(torch.float64).square(), "sum", offsets=bounds)
        # The square of a float64 may underflow to 0.
        lost = (energies == 0) & (torch.segment_reduce(x.abs(), "max", offsets=bounds, initial=0) > 0)
        return energies.masked_fill_(lost, torch.finfo(torch.float64).tiny)

    def is_ahead_by(self, weight: Tensor, shared: Tensor, ahead: Tensor, sign: int) -> bool:
        """Whether each element of `weight` is that of `shared` − sign · `ahead`, or both are NaN; `[n]` each."""
        left = torch.sub(shared, ahead, alpha=sign)
        return torch.equal(weight, left) or torch.allclose(weight, left, rtol=0, atol=0, equal_nan=True)


def copied(moments: Moments) -> Moments:
    """The same moments in memory of their own."""
    return moments._replace(first=moments.first.clone(), second=moments.second.clone())


def _in_range(gradient: Tensor) -> Tensor:
    return torch.where(gradient.abs() < LIMIT, gradient, 0.0)
