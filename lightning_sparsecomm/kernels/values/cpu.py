"""Encodes and decodes values in few bits in numba."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparsecomm.kernels.values.cpu_few_bits import read_signs, read_two, write_signs, write_two
from lightning_sparsecomm.kernels.values.cpu_three_bits import (
    rank_values,
    read_codes,
    read_ranks,
    unrank,
    write_codes,
    write_heads,
    write_ranks,
)
from lightning_sparsecomm.kernels.values.reference import LARGEST_BFLOAT16, LARGEST_FLOAT16, ValueKernels


class CpuValueKernels(ValueKernels):
    """Numba kernels on the CPU, for float32 and float64."""

    def write_three_bits(self, values: Tensor, group: int) -> Tensor:
        if values.dtype not in (torch.float32, torch.float64):
            return super().write_three_bits(values, group)
        count = values.numel()
        array = values.detach().contiguous().numpy()
        rounded = _rounded_heads(array, group)
        eights = -(-count // 8)
        packed = np.empty(3 * eights, np.uint8)
        write_codes(array, group, rounded.to(torch.float32).numpy(), np.empty(8 * eights, np.uint8), packed)
        return torch.cat([rounded.view(-1).view(torch.uint8), torch.from_numpy(packed[: (3 * count + 7) // 8])])

    def read_three_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 4 * -(-count // group)
        heads = section[:heads_end].clone().view(torch.bfloat16).view(-1, 2).to(torch.float32)
        eights = -(-count // 8)
        packed = np.zeros(3 * eights, np.uint8)
        packed[: section.numel() - heads_end] = section[heads_end:].contiguous().numpy()
        values = np.empty(count, np.float32)
        read_codes(packed, group, heads.numpy(), np.empty(8 * eights, np.uint8), values)
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
        array = values.detach().contiguous().numpy()
        codes = np.empty(4 * packed.size, np.uint8)
        write_two(array, array.view(f"u{array.itemsize}"), group, levels, codes, packed)
        heads = torch.from_numpy(np.minimum(levels, LARGEST_FLOAT16)).to(torch.float16)
        return torch.cat([heads.view(-1).view(torch.uint8), torch.from_numpy(packed)])

    def read_two_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        heads_end = 4 * -(-count // group)
        levels = section[:heads_end].clone().view(torch.float16).view(-1, 2).to(torch.float32)
        packed, values = section[heads_end:].contiguous().numpy(), np.empty(count, np.float32)
        read_two(packed, group, levels.numpy(), np.empty(4 * packed.size, np.uint8), values)
        return torch.from_numpy(values)

    def write_short_three_bits(self, values: Tensor, group: int) -> Tensor:
        if values.dtype not in (torch.float32, torch.float64):
            return super().write_short_three_bits(values, group)
        count = values.numel()
        array = values.detach().contiguous().numpy()
        rounded = _rounded_heads(array, group)
        ranks, swapped = np.empty(count, np.uint8), np.empty(len(rounded), np.int16)
        second, third = rank_values(array, group, rounded.to(torch.float32).numpy(), ranks, swapped)
        signed = rounded.view(torch.int16)
        signed[:, 0] |= torch.from_numpy(swapped) << 15
        total = 2 * count + second + third
        words = np.zeros(total // 64 + 1, np.uint64)
        write_ranks(array, ranks, 2 * count, 2 * count + second, words)
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
        end = read_ranks(words, total, ranks)
        unrank(words, group, heads.numpy(), swapped.numpy(), ranks, values)
        return torch.from_numpy(values), 8 * heads_end + end


def _rounded_heads(values: NDArray[Any], group: int) -> Tensor:
    """Each group's least magnitude and ratio: `[groups, 2]` bfloat16."""
    heads = np.empty((-(-values.size // group), 2), np.float64)
    write_heads(values, values.view(f"u{values.itemsize}"), group, heads)
    return torch.from_numpy(heads).to(torch.bfloat16)
