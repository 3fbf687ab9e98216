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
# The digits of a magnitude's 31 bits, from the highest: where each begins, and how many bits it has. To count digits
# takes longer the more values one may have: three counts, of 10 and 11 bits, took 2.6 times as long as these four.
_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))


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
    """See `Reference.largest_of_each`; for float32 without NaN, on CUDA.

    The host waits three times, and twice more for ties.
    """
    x = x.contiguous()
    ranked = _ranked(stretches, x.device)
    # If all non-zeros are asked for, nothing is to be ranked.
    ranks = any(k < stop - start for start, stop, k in stretches)
    found = _thresholds(x, ranked) if ranks else None
    least = torch.zeros_like(ranked.counts) if found is None else found.least
    reached = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
    launch(_mark, ranked.owners.shape, x.device, x, *ranked[:3], least, reached, block=_BLOCK)
    positions = reached.nonzero().view(-1)
    if found is None or not bool(found.crowded.any()):
        return positions
    return positions[_kept(x, positions, ranked.stops, found, seed)]


class Thresholds(NamedTuple):
    """What each stretch's k-th largest magnitude is: `[stretches]` int64, on the device.

    Attributes:
        least: Its bits.
        ties: How many elements have them.
        places: How many of these are among the k largest.
    """

    least: Tensor
    ties: Tensor
    places: Tensor

    @property
    def crowded(self) -> Tensor:
        """Which have more ties than places: `[stretches]` bool. Zeros do not count, since they are never sent."""
        return (self.ties > self.places) & (self.least > 0)


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


def _thresholds(x: Tensor, ranked: Ranked) -> Thresholds:
    """Finds them, digit by digit."""
    stretches = len(ranked.counts)
    least, ties = torch.zeros(2, stretches, dtype=torch.int64, device=x.device)
    places = ranked.counts.clone()
    # A stretch may have 2³¹ elements or more, and nearly all of them be zeros.
    tables = torch.zeros(len(_DIGITS), stretches, 1 << _DIGITS[0][1], dtype=torch.int64, device=x.device)
    for (shift, width), table in zip(_DIGITS, tables):
        arguments = x, *ranked[:3], least, table
        launch(_count, ranked.owners.shape, x.device, *arguments, shift=shift, width=width, block=_BLOCK)
        launch(_descend, (stretches,), x.device, table, least, ties, places, width=width)
    return Thresholds(least, ties, places)


def _kept(x: Tensor, positions: Tensor, stops: Tensor, found: Thresholds, seed: int) -> Tensor:
    """Which positions are among the k largest of their stretch: not all, where more are equal than there are places."""
    owners = torch.bucketize(positions, stops, right=True)
    equal = (x[positions].view(torch.int32) & 0x7FFFFFFF == found.least[owners]) & found.crowded[owners]
    equals = equal.nonzero().view(-1)
    owners, ties = owners[equals], torch.where(found.crowded, found.ties, 0)
    tied, places = ties[owners], found.places[owners]
    after = torch.arange(len(equals), device=x.device).sub_((ties.cumsum(0) - ties)[owners])
    after.sub_(seed % tied).remainder_(tied)
    # The only place whose number seed + ⌊place·tied / places⌋, modulo tied, can be this one.
    place = (after * places).add_(tied).sub_(1).floor_divide_(tied)
    kept = equal.logical_not_()
    kept[equals] = place.mul_(tied).floor_divide_(places) == after
    return kept


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
    least: tl.tensor,
    table: tl.tensor,
    shift: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Counts the digits of the elements whose higher bits are those of their stretch's k-th largest magnitude."""
    owner, _, inside, bits = _magnitudes(x, owners, starts, stops, block)
    digits: tl.constexpr = 1 << width
    counted = inside & (bits >> (shift + width) == tl.load(least + owner).to(tl.int32))
    number = tl.arange(0, digits)
    # Others count as zeros, and are subtracted again.
    found = tl.histogram(tl.where(counted, bits >> shift & (digits - 1), 0), digits)
    found -= tl.where(number == 0, block - tl.sum(counted.to(tl.int32), 0), 0)
    places = owner.to(tl.int64) * digits + number
    tl.atomic_add(table + places, found.to(tl.int64), mask=found > 0, sem="relaxed")


@compiled
def _descend(table: tl.tensor, least: tl.tensor, ties: tl.tensor, places: tl.tensor, width: tl.constexpr) -> None:
    """Appends the next digit of a stretch's k-th largest magnitude, given how many elements have each digit."""
    stretch = tl.program_id(0).to(tl.int64)
    digits: tl.constexpr = 1 << width
    number = tl.arange(0, digits)
    # From the largest digit on.
    found = tl.load(table + stretch * digits + digits - 1 - number)
    wanted = tl.load(places + stretch)
    chosen = tl.sum((tl.cumsum(found, 0) < wanted).to(tl.int32), 0)
    tl.store(places + stretch, wanted - tl.sum(tl.where(number < chosen, found, 0), 0))
    tl.store(ties + stretch, tl.sum(tl.where(number == chosen, found, 0), 0))
    tl.store(least + stretch, tl.load(least + stretch) << width | (digits - 1 - chosen).to(tl.int64))


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
    tl.store(reached + places, bits >= tl.maximum(tl.load(least + owner).to(tl.int32), 1), mask=inside)
