"""Encodes and decodes values in few bits in numba: eight values, three bytes at a time."""

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Bytes, Floats, compiled
from lightning_sparsecomm.kernels.values.reference import (
    LARGEST_BFLOAT16,
    LARGEST_THREE_BIT,
    LOWEST_OF_MEAN,
    SMALLEST_THREE_BIT,
    ZERO_BELOW,
    ValueKernels,
)


class CpuValueKernels(ValueKernels):
    """Numba kernels on the CPU, for float32 and float64."""

    def write_three_bits(self, values: Tensor, group: int) -> Tensor:
        if values.dtype not in (torch.float32, torch.float64):
            return super().write_three_bits(values, group)
        count = values.numel()
        array = values.detach().contiguous().numpy()
        heads = np.empty((-(-count // group), 2), np.float64)
        _heads(array, group, heads)
        rounded = torch.from_numpy(heads).to(torch.bfloat16)
        packed = np.zeros(3 * (-(-count // 8)), np.uint8)
        _write(array, group, rounded.to(torch.float32).numpy(), packed)
        return torch.cat([rounded.view(-1).view(torch.uint8), torch.from_numpy(packed[: (3 * count + 7) // 8])])

    def read_three_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 4 * -(-count // group)
        heads = section[:heads_end].clone().view(torch.bfloat16).view(-1, 2).to(torch.float32)
        packed = np.zeros(3 * (-(-count // 8)), np.uint8)
        packed[: section.numel() - heads_end] = section[heads_end:].contiguous().numpy()
        values = np.empty(count, np.float32)
        _read(packed, group, heads.numpy(), values)
        return torch.from_numpy(values)

    def write_one_bits(self, values: Tensor, group: int) -> Tensor:
        count = values.numel()
        if values.dtype not in (torch.float32, torch.float64) or not count:
            return super().write_one_bits(values, group)
        means, packed = np.empty(-(-count // group), np.float64), np.zeros((count + 7) // 8, np.uint8)
        _write_signs(values.detach().contiguous().numpy(), group, means, packed)
        heads = torch.from_numpy(np.minimum(means, LARGEST_BFLOAT16)).to(torch.bfloat16)
        return torch.cat([heads.view(torch.uint8), torch.from_numpy(packed)])

    def read_one_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 2 * -(-count // group)
        magnitudes = section[:heads_end].clone().view(torch.bfloat16).to(torch.float32)
        values = np.empty(count, np.float32)
        _read_signs(section[heads_end:].contiguous().numpy(), group, magnitudes.numpy(), values)
        return torch.from_numpy(values)


@compiled
def _write_signs(values: Floats, group: int, means: Floats, packed: Bytes) -> None:
    """Each group's mean magnitude, and a bit for each value."""
    for at in range(means.size):
        first, end = at * group, min((at + 1) * group, values.size)
        total = 0.0
        for i in range(first, end):
            value = np.float64(values[i])
            total += abs(value)
            packed[i >> 3] |= np.uint8(np.int64(value < 0) << (i & 7))
        means[at] = total / (end - first)


@compiled
def _read_signs(packed: Bytes, group: int, magnitudes: Floats, values: Floats) -> None:
    for at in range(magnitudes.size):
        magnitude = magnitudes[at]
        for i in range(at * group, min((at + 1) * group, values.size)):
            values[i] = -magnitude if np.int64(packed[i >> 3]) >> (i & 7) & 1 else magnitude


@compiled
def _heads(values: Floats, group: int, heads: Floats) -> None:
    """Each group's least magnitude and ratio, not rounded."""
    for at in range(heads.shape[0]):
        part = values[at * group : min((at + 1) * group, values.size)]
        smallest, largest, total = LARGEST_THREE_BIT, 0.0, 0.0
        for i in range(part.size):
            magnitude = min(abs(np.float64(part[i])), LARGEST_THREE_BIT)
            if magnitude < SMALLEST_THREE_BIT:
                magnitude = 0.0
            smallest = min(smallest, magnitude)
            largest = max(largest, magnitude)
            total += magnitude
        mean = total / part.size
        with_zero = smallest < ZERO_BELOW * mean
        least = LOWEST_OF_MEAN * mean if with_zero else smallest
        if least < SMALLEST_THREE_BIT:
            heads[at, 0], heads[at, 1] = 0.0, 1.0
            continue
        span = largest / least
        heads[at, 0] = least
        heads[at, 1] = -np.sqrt(span) if with_zero else span ** (1 / 3)


@compiled
def _fill(levels: Floats, least: np.float32, ratio: np.float32) -> None:
    """A group's four magnitudes."""
    rise = abs(ratio)
    first = 0
    if ratio < 0:
        levels[0] = 0
        first = 1
    levels[first] = least
    for i in range(first + 1, 4):
        levels[i] = levels[i - 1] * rise


@compiled
def _write(values: Floats, group: int, heads: Floats, packed: Bytes) -> None:
    levels = np.empty(4, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        low = (np.float64(levels[0]) + np.float64(levels[1])) / 2
        middle = (np.float64(levels[1]) + np.float64(levels[2])) / 2
        high = (np.float64(levels[2]) + np.float64(levels[3])) / 2
        for i in range(at * group, min((at + 1) * group, values.size)):
            value = np.float64(values[i])
            magnitude = abs(value)
            level = np.int64(magnitude >= low) + np.int64(magnitude >= middle) + np.int64(magnitude >= high)
            code = level << 1 | np.int64(value < 0)
            byte, shift = 3 * i >> 3, 3 * i & 7
            packed[byte] |= np.uint8(code << shift & 0xFF)
            if shift > 5:
                packed[byte + 1] |= np.uint8(code >> (8 - shift))


@compiled
def _read(packed: Bytes, group: int, heads: Floats, values: Floats) -> None:
    levels = np.empty(4, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        for i in range(at * group, min((at + 1) * group, values.size)):
            byte, shift = 3 * i >> 3, 3 * i & 7
            code = np.int64(packed[byte]) >> shift
            if shift > 5:
                code |= np.int64(packed[byte + 1]) << (8 - shift)
            magnitude = levels[code >> 1 & 3]
            values[i] = -magnitude if code & 1 else magnitude
