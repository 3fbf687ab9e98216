"""Position kernels for CUDA: torch operations, and Triton where those would wait for each other bit by bit."""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels import numba_jit, triton_jit
from lightning_sparsecomm.kernels.numba_jit import Bytes, Positions
from lightning_sparsecomm.kernels.positions.blocks import BLOCK, CODE_BITS, EXPONENTIAL, GOLOMB, MOST_SHIFT, THIRDS
from lightning_sparsecomm.kernels.positions.reference import PositionKernels
from lightning_sparsecomm.kernels.triton_jit import inlined, launch

# The bits of a section that one lane reads, one after another.
_STRETCH = 512
# Where in a code word a stretch may begin: in its prefix, or before any of its last 31 bits.
_STATES = 32
# Stretches for each program.
_LANES = 4

_BLOCK, _CODES = tl.constexpr(BLOCK), tl.constexpr(64)
_GOLOMB, _THIRDS, _EXPONENTIAL = (tl.constexpr(kind) for kind in (GOLOMB, THIRDS, EXPONENTIAL))
_CODE_BITS, _MOST_SHIFT = tl.constexpr(CODE_BITS), tl.constexpr(MOST_SHIFT)


class CudaPositionKernels(PositionKernels):
    """Kernels on CUDA. What goes from block to block, or from stretch to stretch, takes one number each on the CPU."""

    def choices(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        blocks = -(-indices.numel() // BLOCK)
        best = torch.empty(blocks, dtype=torch.uint8, device=indices.device)
        kept = torch.empty(blocks, dtype=torch.int64, device=indices.device)
        launch(_choose, (blocks,), indices.device, indices.contiguous(), best, kept, indices.numel())
        return best, kept

    def follow(self, best: Tensor, kept: Tensor) -> Tensor:
        codes = np.empty(best.numel(), np.uint8)
        _follow_codes(best.cpu().numpy(), kept.cpu().numpy(), codes)
        return torch.from_numpy(codes).to(best.device)

    def word_ends(self, section: Tensor, count: int, remainder_bits: int) -> Tensor:
        device, section = section.device, section.contiguous()
        bits = 8 * section.numel()
        stretches = -(-bits // _STRETCH)
        grid = (triton.cdiv(stretches, _LANES),)
        table = torch.empty(stretches, _STATES, dtype=torch.int16, device=device)
        constants = {"stretch": _STRETCH, "states": _STATES, "lanes": _LANES}
        launch(_read_stretches, grid, device, section, bits, remainder_bits, table, stretches, **constants)
        states = np.empty(stretches, np.int64)
        firsts = np.empty(stretches, np.int64)
        found = int(_follow_states(table.cpu().numpy(), states, firsts))
        ends = torch.empty(min(found, count), dtype=torch.int64, device=device)
        begin = (torch.from_numpy(each).to(device) for each in (states, firsts))
        sizes = stretches, ends.numel()
        launch(_write_ends, grid, device, section, bits, remainder_bits, *begin, ends, *sizes, **constants)
        return ends


@numba_jit.compiled
def _follow_codes(best: Bytes, kept: Positions, codes: Bytes) -> None:
    code = 0
    for block in range(best.size):
        if not kept[block] >> code & 1:
            code = best[block]
        codes[block] = code


@numba_jit.compiled
def _follow_states(table: NDArray[np.int16], states: Positions, firsts: Positions) -> int:
    """Where each stretch begins in a code word, and how many prefixes end before it; returns how many end in all."""
    state = found = 0
    for stretch in range(states.size):
        states[stretch], firsts[stretch] = state, found
        noted = int(table[stretch, state])
        state, found = noted & 31, found + (noted >> 5)
    return found


@inlined
def _log(number: tl.tensor) -> tl.tensor:
    """⌊log₂⌋ of positive numbers below 2^53."""
    return (number.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023


@triton_jit.compiled
def _choose(indices: tl.tensor, best: tl.tensor, kept: tl.tensor, size: tl.int64) -> None:
    """One program for each block; see `BlockKernels.choices`."""
    block = tl.program_id(0).to(tl.int64)
    places = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = places < size
    before = tl.load(indices + places - 1, mask=inside & (places > 0), other=-1)
    runs = tl.where(inside, tl.load(indices + places, mask=inside, other=0) - before - 1, 0)
    count = tl.sum(inside.to(tl.int64), 0)
    mean = tl.sum(runs, 0) // count
    length = tl.where(mean > 0, _log(mean) + 1, 0)
    shift_of = tl.minimum(tl.sum(tl.where(inside, _log(runs + 1), 0), 0) // count, _MOST_SHIFT)

    code = tl.arange(0, _CODES).to(tl.int64)
    shift, kind = code // 3, code % 3
    whole = runs[:, None] >> shift[None, :]
    bits = tl.where(kind[None, :] == _GOLOMB, whole, 2 * _log(whole + 1))
    bits = tl.where(kind[None, :] == _THIRDS, (whole + 2) // 3 + 1, bits)
    row = tl.sum(tl.where(inside[:, None], bits + 1 + shift[None, :], 0), 0)
    near = (code >= 3 * (length - 2)) & (code <= 3 * length) & (kind != _EXPONENTIAL)
    near |= (code == 3 * shift_of + _EXPONENTIAL) | (code == 3 * tl.maximum(shift_of - 1, 0) + _EXPONENTIAL)
    least = tl.min(tl.where(near, row, 1 << 62), 0)
    chosen = tl.min(tl.where(near & (row == least), code, _CODES), 0)
    another = least + _CODE_BITS
    keeps = (row < another) | ((row == another) & (code < chosen))
    tl.store(best + block, chosen.to(tl.uint8))
    tl.store(kept + block, tl.sum(keeps.to(tl.int64) << code, 0))


@inlined
def _next_bit(
    section: tl.tensor, place: tl.tensor, bits: tl.int64, left: tl.tensor, remainder_bits: tl.int64
) -> tuple[tl.tensor, tl.tensor]:
    """Reads a bit: whether it ends a prefix, and how many bits of the code word are left then; 0 in a prefix."""
    inside = place < bits
    byte = tl.load(section + (place >> 3), mask=inside, other=255).to(tl.int64)
    ended = inside & (left == 0) & ((byte >> (place & 7) & 1) == 0)
    return ended, tl.where(ended, remainder_bits, tl.maximum(left - 1, 0))


@triton_jit.compiled
def _read_stretches(
    section: tl.tensor,
    size: tl.int64,
    remainder_bits: tl.int64,
    table: tl.tensor,
    capacity: tl.int64,
    stretch: tl.constexpr,
    states: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """For each stretch, and each state that it may begin in: the state it ends in, and how many prefixes end in it."""
    lane = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    state = tl.arange(0, states).to(tl.int64)
    left = tl.zeros([lanes, states], tl.int64) + state[None, :]
    found = tl.zeros([lanes, states], tl.int64)
    for i in range(stretch):
        place = (lane * stretch + i)[:, None]
        ended, left = _next_bit(section, place, size, left, remainder_bits)
        found += ended.to(tl.int64)
    places = lane[:, None] * states + state[None, :]
    tl.store(table + places, (found << 5 | left).to(tl.int16), mask=(lane < capacity)[:, None])


@triton_jit.compiled
def _write_ends(
    section: tl.tensor,
    size: tl.int64,
    remainder_bits: tl.int64,
    begin: tl.tensor,
    firsts: tl.tensor,
    ends: tl.tensor,
    capacity: tl.int64,
    count: tl.int64,
    stretch: tl.constexpr,
    states: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Writes where each prefix ends, from states that are known."""
    lane = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = lane < capacity
    left = tl.load(begin + lane, mask=inside, other=0)
    number = tl.load(firsts + lane, mask=inside, other=0)
    for i in range(stretch):
        place = lane * stretch + i
        ended, left = _next_bit(section, place, size, left, remainder_bits)
        tl.store(ends + number, place, mask=inside & ended & (number < count))
        number += ended.to(tl.int64)
