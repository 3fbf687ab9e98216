"""The largest magnitudes of many stretches at once, in Triton: a radix selection, one digit in each pass."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lightning_sparsecomm.kernels.triton_jit import compiled, inlined, launch
from lightning_sparsecomm.kernels.updates.reference import Stretch

# Elements per program.
_BLOCK = 4096
# The digits of a magnitude's 31 bits, from the highest: where each begins, and how many bits it has.
_DIGITS = ((20, 11), (10, 10), (0, 10))


class Ranked(NamedTuple):
    """Where programs look, on the device: each at a block of one stretch.

    Attributes:
        owners: `[programs]` int32, the number of the stretch.
        starts: `[programs]` int64, the block's first element.
        stops: `[stretches]` int64.
        counts: `[stretches]` int64: k of each.
    """

    owners: Tensor
    starts: Tensor
    stops: Tensor
    counts: Tensor


def largest_of_each(x: Tensor, stretches: Sequence[Stretch], seed: int) -> Tensor:
    """See `Reference.largest_of_each`; for float32 on CUDA. The host waits twice, and more often for ties."""
    x = x.contiguous()
    ranked = _ranked(stretches, x.device)
    if all(k >= stop - start for start, stop, k in stretches):
        # All non-zeros: nothing is to be ranked.
        least = ties = places = torch.zeros_like(ranked.counts)
    else:
        least, ties, places = _thresholds(x, ranked, len(stretches))
    reached = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    launch(_mark, ranked.owners.shape, x.device, x, *ranked[:3], least, reached, block=_BLOCK)
    positions = reached.nonzero().view(-1)
    asked = torch.stack([least.to(torch.int64), ties, places, ranked.stops]).tolist()
    kept = None
    for (start, _, _), bits, tied, room, stop in zip(stretches, *asked):
        if bits and tied > room:
            kept = torch.ones_like(positions, dtype=torch.bool) if kept is None else kept
            first, end = torch.searchsorted(positions, torch.tensor([start, stop], device=x.device)).tolist()
            equal = x[positions[first:end]].view(torch.int32) & 0x7FFFFFFF == bits
            equals = equal.nonzero().view(-1) + first
            kept[equals] = False
            kept[equals[(torch.arange(room, device=x.device) * tied // room + seed % tied) % tied]] = True
    return positions if kept is None else positions[kept]


def _ranked(stretches: Sequence[Stretch], device: torch.device) -> Ranked:
    # k may change in every round; what grows with the vector does not.
    counts = torch.tensor([min(k, stop - start) for start, stop, k in stretches], dtype=torch.int64, device=device)
    return Ranked(*_placed(tuple((start, stop) for start, stop, _ in stretches), device), counts)


@lru_cache(maxsize=64)
def _placed(stretches: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    stops = torch.tensor([stop for _, stop in stretches], dtype=torch.int64, device=device)
    return *blocks_of(stretches, _BLOCK, device), stops


def blocks_of(stretches: Sequence[tuple[int, int]], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each program, the number of its stretch, int32, and where its block of elements starts, int64."""
    begins, ends = np.array(stretches, np.int64).reshape(-1, 2).T
    blocks = -((begins - ends) // block)
    owners = np.repeat(np.arange(len(begins), dtype=np.int32), blocks)
    before = np.cumsum(blocks) - blocks
    starts = begins[owners] + (np.arange(len(owners), dtype=np.int64) - before[owners]) * block
    return torch.from_numpy(owners).to(device), torch.from_numpy(starts).to(device)


def _thresholds(x: Tensor, ranked: Ranked, stretches: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each stretch the bits of its k-th largest magnitude, how many elements have them, and for how many places."""
    prefixes = torch.zeros(stretches, dtype=torch.int32, device=x.device)
    places = ranked.counts
    for shift, width in _DIGITS:
        # A stretch may have 2³¹ elements or more, and nearly all of them be zeros.
        table = torch.zeros(stretches, 1 << width, dtype=torch.int64, device=x.device)
        constants = {"shift": shift, "width": width, "block": _BLOCK}
        launch(_count, ranked.owners.shape, x.device, x, *ranked[:3], prefixes, table, **constants)
        # From the largest digit on: how many elements have this one or a larger one.
        above = table.flip(1).cumsum(1)
        digits = (above < places[:, None]).sum(1, keepdim=True)
        larger = torch.where(digits > 0, above.gather(1, (digits - 1).clamp(min=0)), 0).view(-1)
        ties = above.gather(1, digits).view(-1) - larger
        places = places - larger
        prefixes = prefixes << width | ((1 << width) - 1 - digits.view(-1)).to(torch.int32)
    return prefixes, ties, places


@inlined
def _magnitudes(
    x: tl.tensor, owners: tl.tensor, starts: tl.tensor, stops: tl.tensor, block: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The stretch of this program, its places, which of them are the stretch's, and the bits of their magnitudes."""
    owner = tl.load(owners + tl.program_id(0))
    places = tl.load(starts + tl.program_id(0)) + tl.arange(0, block)
    inside = places < tl.load(stops + owner)
    values = tl.load(x + places, mask=inside, other=0.0)
    return owner, places, inside, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@compiled
def _count(
    x: tl.tensor,
    owners: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    prefixes: tl.tensor,
    table: tl.tensor,
    shift: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Counts the digits of the elements whose higher bits are their stretch's prefix."""
    owner, _, inside, bits = _magnitudes(x, owners, starts, stops, block)
    digits: tl.constexpr = 1 << width
    counted = inside & (bits >> (shift + width) == tl.load(prefixes + owner))
    number = tl.arange(0, digits)
    # Others count as zeros, and are subtracted again.
    found = tl.histogram(tl.where(counted, bits >> shift & (digits - 1), 0), digits)
    found -= tl.where(number == 0, block - tl.sum(counted.to(tl.int32), 0), 0)
    places = owner.to(tl.int64) * digits + number
    tl.atomic_add(table + places, found.to(tl.int64), mask=found > 0, sem="relaxed")


@compiled
def _mark(
    x: tl.tensor,
    owners: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    least: tl.tensor,
    reached: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Notes the elements whose magnitude is not 0 and reaches their stretch's threshold."""
    owner, places, inside, bits = _magnitudes(x, owners, starts, stops, block)
    tl.store(reached + places, bits >= tl.maximum(tl.load(least + owner), 1), mask=inside)
