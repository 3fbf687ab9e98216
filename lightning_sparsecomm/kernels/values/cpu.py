"""Encodes and decodes values in few bits in numba."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.numba_jit import Bytes, Floats, Words, compiled
from lightning_sparsecomm.kernels.values.cpu_few_bits import read_signs, read_two, write_signs, write_two
from lightning_sparsecomm.kernels.values.reference import (
    LARGEST_BFLOAT16,
    LARGEST_FLOAT16,
    LARGEST_THREE_BIT,
    LOWEST_OF_MEAN,
    SMALLEST_THREE_BIT,
    ZERO_BELOW,
    ValueKernels,
)

_ONE = np.uint64(1)


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
        packed = np.empty(3 * (-(-count // 8)), np.uint8)
        _write(array, group, rounded.to(torch.float32).numpy(), packed)
        return torch.cat([rounded.view(-1).view(torch.uint8), torch.from_numpy(packed[: (3 * count + 7) // 8])])

    def read_three_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 4 * -(-count // group)
        heads = section[:heads_end].clone().view(torch.bfloat16).view(-1, 2).to(torch.float32)
        packed = np.zeros(3 * (-(-count // 8)) + 1, np.uint8)
        packed[: section.numel() - heads_end] = section[heads_end:].contiguous().numpy()
        values = np.empty(count, np.float32)
        _read(packed, group, heads.numpy(), values)
        return torch.from_numpy(values)

    def write_one_bits(self, values: Tensor, group: int) -> Tensor:
        count = values.numel()
        if values.dtype not in (torch.float32, torch.float64) or not count:
            return super().write_one_bits(values, group)
        means, packed = np.empty(-(-count // group), np.float64), np.zeros((count + 7) // 8, np.uint8)
        write_signs(values.detach().contiguous().numpy(), group, means, packed)
        heads = torch.from_numpy(np.minimum(means, LARGEST_BFLOAT16)).to(torch.bfloat16)
        return torch.cat([heads.view(torch.uint8), torch.from_numpy(packed)])

    def read_one_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 2 * -(-count // group)
        magnitudes = section[:heads_end].clone().view(torch.bfloat16).to(torch.float32)
        values = np.empty(count, np.float32)
        read_signs(section[heads_end:].contiguous().numpy(), group, magnitudes.numpy(), values)
        return torch.from_numpy(values)

    def write_two_bits(self, values: Tensor, group: int) -> Tensor:
        count = values.numel()
        if values.dtype not in (torch.float32, torch.float64) or not count:
            return super().write_two_bits(values, group)
        levels, packed = np.empty((-(-count // group), 2), np.float64), np.empty((count + 3) // 4, np.uint8)
        write_two(values.detach().contiguous().numpy(), group, levels, np.empty(4 * packed.size, np.uint8), packed)
        heads = torch.from_numpy(np.minimum(levels, LARGEST_FLOAT16)).to(torch.float16)
        return torch.cat([heads.view(-1).view(torch.uint8), torch.from_numpy(packed)])

    def read_two_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 4 * -(-count // group)
        levels = section[:heads_end].clone().view(torch.float16).view(-1, 2).to(torch.float32)
        values = np.empty(count, np.float32)
        read_two(section[heads_end:].contiguous().numpy(), group, levels.numpy(), values)
        return torch.from_numpy(values)

    def write_short_three_bits(self, values: Tensor, group: int) -> Tensor:
        if values.dtype not in (torch.float32, torch.float64):
            return super().write_short_three_bits(values, group)
        count = values.numel()
        array = values.detach().contiguous().numpy()
        heads = np.empty((-(-count // group), 2), np.float64)
        _heads(array, group, heads)
        rounded = torch.from_numpy(heads).to(torch.bfloat16)
        ranks, swapped = np.empty(count, np.uint8), np.empty(heads.shape[0], np.int16)
        second, third = _rank(array, group, rounded.to(torch.float32).numpy(), ranks, swapped)
        signed = rounded.view(torch.int16)
        signed[:, 0] |= torch.from_numpy(swapped) << 15
        total = 2 * count + second + third
        words = np.zeros(total // 64 + 1, np.uint64)
        _write_ranks(array, ranks, 2 * count, 2 * count + second, words)
        packed = torch.from_numpy(words.view(np.uint8)[: (total + 7) // 8])
        return torch.cat([signed.view(-1).view(torch.uint8), packed])

    def read_short_three_bits(self, section: Tensor, count: int, group: int) -> tuple[Tensor, int]:
        heads_end = 4 * -(-count // group)
        signed = section[:heads_end].clone().view(torch.int16).view(-1, 2)
        swapped = signed[:, 0] < 0
        signed[:, 0] &= 0x7FFF
        heads = signed.view(torch.bfloat16).to(torch.float32)
        total = 8 * (section.numel() - heads_end)
        words = np.zeros(total // 64 + 1, np.uint64)
        words.view(np.uint8)[: section.numel() - heads_end] = section[heads_end:].contiguous().numpy()
        ranks, values = np.empty(count, np.uint8), np.empty(count, np.float32)
        end = _read_ranks(words, total, ranks)
        _unrank(words, group, heads.numpy(), swapped.numpy(), ranks, values)
        return torch.from_numpy(values), 8 * heads_end + end


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
    # Eight codes are three bytes.
    pending = np.uint64(0)
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
            pending |= np.uint64(code) << np.uint64(3 * (i & 7))
            if i & 7 == 7 or i + 1 == values.size:
                for byte in range(3):
                    packed[3 * (i >> 3) + byte] = np.uint8(pending >> np.uint64(8 * byte) & np.uint64(0xFF))
                pending = np.uint64(0)


@compiled
def _read(packed: Bytes, group: int, heads: Floats, values: Floats) -> None:
    levels = np.empty(4, np.float32)
    signed = np.empty(8, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        for i in range(8):
            signed[i] = -levels[i >> 1] if i & 1 else levels[i >> 1]
        for i in range(at * group, min((at + 1) * group, values.size)):
            byte, shift = np.uint64(3 * i >> 3), np.uint64(3 * i & 7)
            window = np.uint64(packed[byte]) | np.uint64(packed[byte + _ONE]) << np.uint64(8)
            values[i] = signed[window >> shift & np.uint64(7)]


@compiled
def _rank(values: Floats, group: int, heads: Floats, ranks: Bytes, swapped: NDArray[np.int16]) -> tuple[int, int]:
    """The rank of each value, and which groups swap the first two; returns how many ranks exceed 0, and 1."""
    levels = np.empty(4, np.float32)
    second, third = 0, 0
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        low = (np.float64(levels[0]) + np.float64(levels[1])) / 2
        middle = (np.float64(levels[1]) + np.float64(levels[2])) / 2
        high = (np.float64(levels[2]) + np.float64(levels[3])) / 2
        first, last = at * group, min((at + 1) * group, values.size)
        above_low, above_middle = 0, 0
        for i in range(first, last):
            magnitude = abs(np.float64(values[i]))
            over = np.int64(magnitude >= low)
            further = np.int64(magnitude >= middle)
            above_low += int(over)
            above_middle += int(further)
            ranks[i] = over + further + np.int64(magnitude >= high)
        # More values have number 1 than 0.
        swap = above_low - above_middle > last - first - above_low
        swapped[at] = swap
        if swap:
            for i in range(first, last):
                ranks[i] ^= np.uint8(ranks[i] < 2)
            above_low = above_middle + last - first - above_low
        second += above_low
        third += above_middle
    return second, third


@compiled
def _write_ranks(values: Floats, ranks: Bytes, second: int, third: int, words: Words) -> None:
    """Writes signs and ranks, those above 0 and 1 from the given bits on."""
    first = values.size
    for i in range(values.size):
        rank = np.int64(ranks[i])
        words[i >> 6] |= np.uint64(values[i] < 0) << np.uint64(i & 63)
        words[first + i >> 6] |= np.uint64(rank > 0) << np.uint64(first + i & 63)
        # Zero where nothing is written.
        words[second >> 6] |= np.uint64(rank > 1) << np.uint64(second & 63)
        second += int(np.int64(rank > 0))
        words[third >> 6] |= np.uint64(rank > 2) << np.uint64(third & 63)
        third += int(np.int64(rank > 1))


@compiled
def _read_ranks(words: Words, total: int, ranks: Bytes) -> int:
    """Fills in the ranks, and returns the bit after the last. Bits beyond `total` count as 0."""
    count = ranks.size
    one = np.uint64(1)
    second = 2 * count
    for i in range(count):
        rank = np.uint8(words[count + i >> 6] >> np.uint64(count + i & 63) & one)
        # Read in any case: a branch on data would be mispredicted.
        place = min(second, total)
        ranks[i] = rank + (rank & np.uint8(words[place >> 6] >> np.uint64(place & 63) & one))
        second += int(np.int64(rank))
    third = second
    for i in range(count):
        more = np.uint8(ranks[i] > 1)
        place = min(third, total)
        ranks[i] += more & np.uint8(words[place >> 6] >> np.uint64(place & 63) & one)
        third += int(np.int64(more))
    return third


@compiled
def _unrank(words: Words, group: int, heads: Floats, swapped: NDArray[np.bool_], ranks: Bytes, values: Floats) -> None:
    """Turns signs and ranks into values."""
    levels = np.empty(4, np.float32)
    for at in range(heads.shape[0]):
        _fill(levels, heads[at, 0], heads[at, 1])
        if swapped[at]:
            levels[0], levels[1] = levels[1], levels[0]
        for i in range(at * group, min((at + 1) * group, values.size)):
            magnitude = levels[ranks[i]]
            values[i] = -magnitude if words[i >> 6] >> np.uint64(i & 63) & np.uint64(1) else magnitude
