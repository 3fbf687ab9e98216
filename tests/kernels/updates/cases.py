"""Updates to compare kernels with, on the CPU and on GPUs."""

import torch
from torch import Tensor

from lightning_sparsecomm.kernels import LIMIT, Moments, Update
from tests.kernels.bits import numbers, same_bits

# No factor is exact in binary, so an unrounded product or a factor in the wrong precision changes bits.
KINDS = {
    "sum": {},
    "scaled": {"scale": 1 / 3},
    "fading": {"keep": 0.9, "scale": 1 / 3},
    "momentum": {"momentum": 0.7},
    "dampened": {"keep": 0.9, "scale": 1 / 3, "momentum": 0.7, "gain": 0.3},
    "nesterov": {"momentum": 0.7, "lookahead": 0.7},
    "dampened nesterov": {"keep": 0.9, "scale": 1 / 3, "momentum": 0.7, "gain": 0.3, "lookahead": 0.6},
    "moments": {"moments": {"unbias": 1 / 0.3, "unbias_squares": 1 / 0.7}},
    "shared moments": {
        "keep": 0.9,
        "scale": -1 / 3,
        "moments": {
            "beta1": 0.7,
            "beta2": 0.9,
            "unbias": 1 / 0.6,
            "unbias_squares": 1 / 0.3,
            "epsilon": 0.1,
            "coherence": 1 / 3,
            "decay": 0.1,
        },
    },
}


def update_of(kind: str, size: int, dtype: torch.dtype) -> Update:
    factors = dict(KINDS[kind])
    velocity = numbers(size, dtype, 3) if "momentum" in factors else None
    moments = None
    if (options := factors.pop("moments", None)) is not None:
        weights = numbers(size, dtype, 5) if "decay" in options else None
        first = numbers(size, dtype, 3)
        # As of gradients, the mean of the squares is never below the square of the mean.
        second = first * first * (1 + numbers(size, dtype, 4).abs())
        moments = Moments(first, second, **options, weights=weights)
    return Update(numbers(size, dtype, 1), numbers(size, dtype, 2), velocity, **factors, moments=moments)


def copy_of(update: Update, device: torch.device | str = "cpu") -> Update:
    tensors = (update.residual, update.gradient, update.velocity)
    residual, gradient, velocity = (None if x is None else x.clone().to(device) for x in tensors)
    moments = update.moments
    if moments is not None:
        first, second = moments.first.clone().to(device), moments.second.clone().to(device)
        weights = None if moments.weights is None else moments.weights.to(device)
        moments = moments._replace(first=first, second=second, weights=weights)
    return update._replace(residual=residual, gradient=gradient, velocity=velocity, moments=moments)


def same_update(ours: Update, theirs: Update) -> bool:
    return (
        same_bits(ours.residual, theirs.residual)
        and same_bits(ours.gradient, theirs.gradient)
        and same_bits(ours.velocity, theirs.velocity)
        and all(same_bits(mine, other) for mine, other in zip(_moments(ours), _moments(theirs), strict=True))
    )


def _moments(update: Update) -> list[Tensor]:
    return [] if update.moments is None else [update.moments.first, update.moments.second]


def thresholds_for(x: Tensor) -> list[float]:
    """Thresholds reached by no element, by the largest, by half, and by all non-zeros."""
    magnitudes = x.abs()
    largest = float(magnitudes.max()) if x.numel() else 1.0
    median = float(magnitudes.median()) if x.numel() else 1.0
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    return [2 * largest or 1.0, largest or 1.0, median or 1.0, least]


def out_of_range(update: Update) -> list[Update]:
    """Checked copies of `update` with values out of range in the gradient: at an end, in the middle, or at random."""
    size, dtype = update.gradient.numel(), update.gradient.dtype
    some = numbers(size, dtype, 7).abs() < 0.1
    middle = torch.tensor([size // 2])
    places = [torch.tensor([0]), torch.tensor([size - 1]), middle, some.nonzero().view(-1), middle, middle]
    updates = []
    for value, positions in zip((float("nan"), -float("inf"), float("inf"), float("nan"), LIMIT, -3e38), places):
        if positions.numel():
            gradient = update.gradient.clone()
            gradient[positions] = value
            updates.append(copy_of(update)._replace(gradient=gradient, checked=True))
    return updates
