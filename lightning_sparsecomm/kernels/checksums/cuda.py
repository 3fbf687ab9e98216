"""CRC-32 in Triton: a lane for each stretch of bytes, whose remainders the CPU puts together.

CRC-32 is the remainder of a polynomial over GF(2). So that of several stretches follows from the remainder of each: all
but the last are multiplied by x to the power of the bits that follow.
"""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels import numba_jit, triton_jit
from lightning_sparsecomm.kernels.checksums.reference import ChecksumKernels
from lightning_sparsecomm.kernels.triton_jit import inlined, launch

Table = NDArray[np.uint32]

# The bytes of a stretch, and the stretches for each program.
_STRETCH = 1024
_LANES = 128
# Fewer bytes take less time on the CPU.
_LEAST = 1 << 16
_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF


class CudaChecksumKernels(ChecksumKernels):
    """CRC-32 on CUDA. Four bytes for each stretch of 1,024 are read by the CPU."""

    least = _LEAST

    def crc32(self, data: Tensor, start: int) -> int:
        if data.numel() < self.least:
            return super().crc32(data, start)
        data = data.contiguous()
        stretches = -(-data.numel() // _STRETCH)
        found = torch.empty(stretches, dtype=torch.int32, device=data.device)
        tables = _on_device(data.device)
        # The first stretch begins before the data, with zeros, which change no remainder.
        before = stretches * _STRETCH - data.numel()
        arguments = data, tables, found, data.numel(), before, start ^ _ONES
        grid = (triton.cdiv(stretches, _LANES),)
        launch(_remainders, grid, data.device, *arguments, stretch=_STRETCH, lanes=_LANES)
        return int(_joined(found.cpu().numpy().view(np.uint32), _advanced(_STRETCH))) ^ _ONES


def _tables() -> Table:
    """`[4, 256]`: the remainder of each byte that is followed by so many zero bytes, or three fewer."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    tables = [table]
    for _ in range(3):
        tables.append(tables[-1] >> 8 ^ table[tables[-1] & 255])
    return np.stack(tables)


@lru_cache(maxsize=8)
def _on_device(device: torch.device) -> Tensor:
    return torch.from_numpy(_tables().view(np.int32)).to(device)


@lru_cache(maxsize=8)
def _advanced(count: int) -> Table:
    """`[4, 256]`: what each byte of a remainder, from the lowest, becomes where so many zero bytes follow."""
    table, state = (
        _tables()[0],
        np.left_shift(np.arange(256, dtype=np.uint32), np.arange(0, 32, 8, dtype=np.uint32)[:, None]),
    )
    for _ in range(count):
        state = state >> 8 ^ table[state & 255]
    return state.astype(np.uint32)


@numba_jit.compiled
def _joined(remainders: Table, advanced: Table) -> int:
    """The remainder of stretches of one length, one after another."""
    crc = np.uint32(0)
    for i in range(remainders.size):
        low = advanced[0, crc & 255] ^ advanced[1, crc >> 8 & 255]
        crc = np.uint32(low ^ advanced[2, crc >> 16 & 255] ^ advanced[3, crc >> 24] ^ remainders[i])
    return int(crc)


@inlined
def _byte(data: tl.tensor, place: tl.tensor, start: tl.int64) -> tl.tensor:
    """A byte of the data, 0 before it. What came before the data is added to its first four bytes."""
    byte = tl.load(data + place, mask=place >= 0, other=0).to(tl.int64)
    return tl.where((place >= 0) & (place < 4), byte ^ (start >> (8 * (place & 3)) & 255), byte)


@triton_jit.compiled
def _remainders(
    data: tl.tensor,
    tables: tl.tensor,
    found: tl.tensor,
    size: tl.int64,
    before: tl.int64,
    seed: tl.int64,
    stretch: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """The remainder of each stretch, four bytes at a time."""
    lane = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    first = lane * stretch - before
    inside = first < size
    state = tl.zeros([lanes], tl.int64)
    for i in range(0, stretch, 4):
        place = tl.where(inside, first + i, -4)
        word = _byte(data, place, seed) | _byte(data, place + 1, seed) << 8
        word |= _byte(data, place + 2, seed) << 16 | _byte(data, place + 3, seed) << 24
        state ^= word
        low = tl.load(tables + 768 + (state & 255)) ^ tl.load(tables + 512 + (state >> 8 & 255))
        high = tl.load(tables + 256 + (state >> 16 & 255)) ^ tl.load(tables + (state >> 24 & 255))
        state = (low ^ high).to(tl.int64) & 0xFFFFFFFF
    tl.store(found + lane, state.to(tl.int32), mask=inside)
