"""How much of the gradients' squares ranks have in common, from a few elements of each tensor that they sum."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout

SAMPLED = 32
"""Elements of a large tensor that ranks sum in each step."""

# Of smaller ones they sum a 32nd, but no fewer than this.
_LEAST_SAMPLED = 8

# How much of earlier sums stays: together they count as ten sampled steps.
_FADING = 0.9

# Each of the first steps is sampled, and then one of eight: by then, what ranks have in common changes slowly, and
# samples are a large part of the few bytes that long runs send.
_FIRST_STEPS, _EVERY = 300, 8
_NEVER = -_EVERY

# From this coherence on, a rank trains ahead by all of its directions. With up to 4 ranks it is never lower.
_WHOLE_FROM = 1 / 4

# Multiples of the golden ratio, modulo 1, spread evenly, and meet no stride of a tensor.
_GOLDEN = 0.6180339887498949


class Coherence:
    """For each tensor, the square of ranks' mean gradient, divided by the mean of their gradients' squares.

    It is 1/W if ranks' gradients are independent noise, and 1 if they agree.

    Ranks sum up to 32 elements of each gradient, others each time, and their squares: in the first 300 steps, and then
    in the first step of every eight that exchanges. Ratios are those of sums that fade by 0.9 each time; they are
    limited to [1/W, 1], and equal on all ranks.
    """

    def __init__(self) -> None:
        # By name, the faded sums of squared means, and of mean squares, and the last step that added to them: `[3]`.
        self._sums: dict[str, Tensor] = {}
        self._last = _NEVER

    def is_due(self, step: int) -> bool:
        """Whether ranks sum elements in this step, if it exchanges."""
        return step < _FIRST_STEPS or step // _EVERY != self._last // _EVERY

    def positions(self, layout: Layout, step: int, device: torch.device) -> Tensor:
        """Which elements are summed in a step: `[segments, 32]` int64, equal on all ranks."""
        multiples = torch.arange(step * SAMPLED, (step + 1) * SAMPLED, dtype=torch.float64) * _GOLDEN % 1
        sizes = torch.tensor([segment.size for segment in layout.segments], dtype=torch.float64)
        return (multiples * sizes[:, None]).long().to(device)

    def summed(self, layout: Layout, device: torch.device) -> Tensor:
        """Of each tensor, which of 32 elements are summed, and the sum of their squares: `[segments, 33]` bool."""
        sizes = torch.tensor([[segment.size] for segment in layout.segments], device=device)
        counts = (sizes // SAMPLED).clamp_(_LEAST_SAMPLED, SAMPLED)
        return torch.cat([torch.arange(SAMPLED, device=device) < counts, torch.ones_like(counts, dtype=torch.bool)], 1)

    def take(self, names: Sequence[str], present: Sequence[bool], total: Tensor, world_size: int, step: int) -> None:
        """Takes in what ranks have summed in a step: `[segments, 33]`, elements and then the sum of their squares.

        Elements that are not summed are 0.
        Tensors of which no rank is `present` with a gradient are left alone.
        """
        means = total[:, :SAMPLED].to("cpu", torch.float64) / world_size
        found = torch.stack([means.square().sum(1), total[:, SAMPLED].to("cpu", torch.float64) / world_size], 1)
        for name, here, sums in zip(names, present, found):
            # Gradients may be zero, and their squares too large for float32.
            if here and sums[1] > 0 and bool(sums.isfinite().all()):
                faded = _FADING * self._sums[name][:2] if name in self._sums else 0.0
                self._sums[name] = torch.cat([sums + faded, sums.new_tensor([step])])
                self._last = step

    def of(self, name: str, world_size: int) -> float:
        """The ratio of a tensor; 1 before anything was summed."""
        if name not in self._sums:
            return 1.0
        squared_mean, mean_square = map(float, self._sums[name][:2])
        return min(1.0, max(1 / world_size, squared_mean / mean_square))

    def ahead(self, name: str, world_size: int) -> float:
        """What part of its own directions a rank trains ahead by: min(1, √(4c)).

        A rank's direction is up to 1/√c times as long as that of all, √W times for pure noise. This limits it to 2
        times, which 4 ranks have.
        """
        if world_size * _WHOLE_FROM <= 1:
            return 1.0
        return min(1.0, math.sqrt(self.of(name, world_size) / _WHOLE_FROM))

    def state_dict(self) -> Mapping[str, Tensor]:
        """The sums, and when they were last added to, by name."""
        return self._sums

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned. Earlier versions saved the two sums alone."""
        for name, sums in state.items():
            unknown = sums.new_full((3 - sums.numel(),), _NEVER)
            self._sums[name] = torch.cat([sums, unknown]).to("cpu", torch.float64)
        self._last = max((int(sums[2]) for sums in self._sums.values()), default=_NEVER)
