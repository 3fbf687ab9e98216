"""The definition of the kernels for values in few bits, in torch operations that run on any device."""

import torch
from torch import Tensor

# Three-bit magnitudes are limited to these, or 0, so that products of theirs stay finite and normal.
LARGEST_THREE_BIT = 2.0**126
SMALLEST_THREE_BIT = 2.0**-126

LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
LARGEST_FLOAT16 = torch.finfo(torch.float16).max

# A group whose smallest magnitude is below this part of its mean needs a magnitude of 0.
ZERO_BELOW = 1 / 8
# The lowest of its three other magnitudes, as part of its mean.
LOWEST_OF_MEAN = 7 / 8


class ValueKernels:
    """The kernels in torch. Subclasses are faster and give the same bits; but the heads of float64 values may differ in
    their last bit, as sums are in another order.

    A section of three-bit values begins with two bfloat16 numbers for each group: its least magnitude a, and a ratio r.
    Its magnitudes are a, ar, ar² and ar³; or 0, a, a|r| and ar², if r is negative. Products are rounded to float32, one
    after the other. Then come three bits for each value: 1 if it is negative, and the number of its magnitude, lowest
    bit first. Bit i of this part is bit i mod 8 of byte ⌊i / 8⌋.

    Arguments that methods share:
        group: How many consecutive values share four magnitudes. The last group may have fewer.
    """

    def write_three_bits(self, values: Tensor, group: int) -> Tensor:
        """The section for `[k]` finite values of any floating-point dtype: `[bytes]` uint8."""
        count = values.numel()
        if not count:
            return values.new_empty(0, dtype=torch.uint8)
        heads, numbers = _quantized(values, group)
        codes = torch.nn.functional.pad(numbers << 1 | (values < 0), (0, -count % 8)).view(-1, 8)
        words = (codes << _places(values.device, 8, 3)).sum(1, dtype=torch.int32)
        packed = (words[:, None] >> _places(values.device, 3, 8) & 0xFF).to(torch.uint8).view(-1)
        return torch.cat([heads.view(-1).view(torch.uint8), packed[: (3 * count + 7) // 8]])

    def read_three_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        """The `[count]` float32 values of a section that has exactly their length. Heads may be any numbers."""
        heads_end = 4 * -(-count // group)
        levels = _levels(section[:heads_end].clone().view(torch.bfloat16).view(-1, 2))
        packed = torch.nn.functional.pad(section[heads_end:], (0, -(section.numel() - heads_end) % 3)).view(-1, 3)
        words = (packed.to(torch.int32) << _places(section.device, 3, 8)).sum(1, dtype=torch.int32)
        codes = (words[:, None] >> _places(section.device, 8, 3) & 7).view(-1)[:count]
        groups = torch.arange(count, device=section.device) // group
        magnitudes = levels.view(-1)[4 * groups + (codes >> 1)]
        return torch.where(codes & 1 == 1, -magnitudes, magnitudes)

    def write_one_bits(self, values: Tensor, group: int) -> Tensor:
        """Each group's mean magnitude as bfloat16, then a bit for each of `[k]` finite values, 1 if it is negative."""
        count = values.numel()
        groups = -(-count // group)
        if not groups:
            return values.new_empty(0, dtype=torch.uint8)
        padded = torch.nn.functional.pad(values.to(torch.float64).abs(), (0, groups * group - count))
        counts = torch.full((groups,), float(group), dtype=torch.float64, device=values.device)
        counts[-1] = count - (groups - 1) * group
        means = (padded.view(groups, group).sum(1) / counts).clamp_(max=LARGEST_BFLOAT16).to(torch.bfloat16)
        negative = torch.nn.functional.pad((values < 0).to(torch.int32), (0, -count % 8)).view(-1, 8)
        packed = (negative << _places(values.device, 8, 1)).sum(1).to(torch.uint8)
        return torch.cat([means.view(torch.uint8), packed])

    def read_one_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        """The `[count]` float32 values of a section that has exactly their length."""
        heads_end = 2 * -(-count // group)
        magnitudes = section[:heads_end].clone().view(torch.bfloat16).to(torch.float32)
        bits = section[heads_end:, None].to(torch.int32) >> _places(section.device, 8, 1) & 1
        magnitudes = magnitudes[torch.arange(count, device=section.device) // group]
        return torch.where(bits.flatten()[:count] == 1, -magnitudes, magnitudes)

    def write_two_bits(self, values: Tensor, group: int) -> Tensor:
        """Each group's two magnitudes as float16, then two bits for each of `[k]` finite values.

        The lower bit is 1 if the value is negative, the other one if its magnitude is at least the group's mean. Each
        magnitude is the mean of those that it stands for; the first is that of the second where it stands for none.
        """
        count = values.numel()
        groups = -(-count // group)
        padding = (0, groups * group - count)
        magnitudes = torch.nn.functional.pad(values.abs().to(torch.float64), padding).view(groups, group)
        is_value = torch.nn.functional.pad(values.new_ones(count, dtype=torch.bool), padding).view(groups, group)
        # Rounding can make the mean of equal numbers greater than each of them.
        middle = torch.minimum(_mean(magnitudes, is_value), magnitudes.amax(1) if groups else magnitudes.sum(1))
        large = is_value & (magnitudes >= middle[:, None])
        small = is_value & ~large
        above = _mean(magnitudes, large)
        below = torch.where(small.any(1), _mean(magnitudes, small), above)
        levels = torch.stack([below, above], 1).clamp_(max=LARGEST_FLOAT16).to(torch.float16)
        codes = large.view(-1)[:count].to(torch.int32) << 1 | (values < 0)
        codes = torch.nn.functional.pad(codes, (0, -count % 4)).view(-1, 4)
        packed = (codes << _places(values.device, 4, 2)).sum(1).to(torch.uint8)
        return torch.cat([levels.view(-1).view(torch.uint8), packed])

    def read_two_bits(self, section: Tensor, count: int, group: int) -> Tensor:
        """The `[count]` float32 values of a section that has exactly their length."""
        heads_end = 4 * -(-count // group)
        levels = section[:heads_end].clone().view(torch.float16).to(torch.float32)
        codes = (section[heads_end:, None].to(torch.int32) >> _places(section.device, 4, 2) & 3).view(-1)[:count]
        groups = torch.arange(count, device=section.device) // group
        magnitudes = levels[2 * groups + (codes >> 1)]
        return torch.where(codes & 1 == 1, -magnitudes, magnitudes)

    def write_short_three_bits(self, values: Tensor, group: int) -> Tensor:
        """As `write_three_bits`, with the number of each magnitude in one to three bits.

        A number has a rank: itself, but 1 for 0 and 0 for 1 where more values of the group have number 1 than 0. There
        the sign bit of a is 1. After the heads come bits: for each value whether it is negative; for each whether its
        rank is more than 0; for each of these whether it is more than 1; and for each of those whether it is more than
        2.
        """
        count = values.numel()
        if not count:
            return values.new_empty(0, dtype=torch.uint8)
        heads, numbers = _quantized(values, group)
        padded = torch.nn.functional.pad(numbers, (0, -count % group), value=3).view(-1, group)
        swapped = (padded == 1).sum(1) > (padded == 0).sum(1)
        signed = heads.view(torch.int16)
        signed[:, 0] |= swapped.to(torch.int16) << 15
        swaps = swapped.repeat_interleave(group)[:count] & (numbers < 2)
        ranks = torch.where(swaps, 1 - numbers, numbers)
        first = ranks > 0
        second = (ranks > 1)[first]
        third = (ranks > 2)[ranks > 1]
        bits = torch.cat([values < 0, first, second, third]).to(torch.uint8)
        whole = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        packed = (whole << _places(values.device, 8, 1).to(torch.uint8)).sum(1, dtype=torch.uint8)
        return torch.cat([signed.view(-1).view(torch.uint8), packed])

    def read_short_three_bits(self, section: Tensor, count: int, group: int) -> tuple[Tensor, int]:
        """The `[count]` float32 values of a section, and the bit after the last; those beyond the section are 0.

        The section has at least the heads and two bits for each value. Heads may be any numbers.
        """
        heads_end = 4 * -(-count // group)
        signed = section[:heads_end].clone().view(torch.int16).view(-1, 2)
        swapped = signed[:, 0] < 0
        signed[:, 0] &= 0x7FFF
        levels = _levels(signed.view(torch.bfloat16))
        bits = (section[heads_end:, None] >> _places(section.device, 8, 1).to(torch.uint8) & 1).view(-1)
        ranks = bits[count : 2 * count].to(torch.int64)
        end = 2 * count
        for rank in (1, 2):
            more = (ranks == rank).nonzero().view(-1)
            read = bits[end : end + more.numel()]
            ranks[more[: read.numel()]] += read
            end += more.numel()
        groups = torch.arange(count, device=section.device) // group
        numbers = torch.where(swapped[groups] & (ranks < 2), 1 - ranks, ranks)
        magnitudes = levels.view(-1)[4 * groups + numbers]
        return torch.where(bits[:count] == 1, -magnitudes, magnitudes), 8 * heads_end + end


def _quantized(values: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The head of each group, `[groups, 2]` bfloat16, and the number of each value's magnitude, `[k]` int32."""
    count = values.numel()
    groups = -(-count // group)
    padding = (0, groups * group - count)
    exact = torch.nn.functional.pad(values.to(torch.float64).abs(), padding).view(groups, group)
    is_value = torch.nn.functional.pad(values.new_ones(count, dtype=torch.bool), padding).view(groups, group)
    magnitudes = torch.where(exact < SMALLEST_THREE_BIT, 0.0, exact).clamp_(max=LARGEST_THREE_BIT)
    mean = magnitudes.sum(1) / is_value.sum(1)
    smallest = torch.where(is_value, magnitudes, LARGEST_THREE_BIT).amin(1)
    largest = magnitudes.amax(1)
    with_zero = smallest < ZERO_BELOW * mean
    least = torch.where(with_zero, LOWEST_OF_MEAN * mean, smallest)
    # Magnitudes whose mean is too small are sent as zeros: least 0, ratio 1.
    tiny = least < SMALLEST_THREE_BIT
    span = largest / torch.where(tiny, 1.0, least)
    ratio = torch.where(with_zero, -span.sqrt(), span ** (1 / 3))
    heads = torch.stack([torch.where(tiny, 0.0, least), torch.where(tiny, 1.0, ratio)], 1).to(torch.bfloat16)
    levels = _levels(heads).to(torch.float64)
    between = (levels[:, :-1] + levels[:, 1:]) / 2
    return heads, (exact[:, :, None] >= between[:, None, :]).sum(2, dtype=torch.int32).view(-1)[:count]


def _mean(magnitudes: Tensor, which: Tensor) -> Tensor:
    """For each row, the mean of the magnitudes that `which` marks; 0 if it marks none."""
    return torch.where(which, magnitudes, 0.0).sum(1) / which.sum(1).clamp_(min=1)


def _levels(heads: Tensor) -> Tensor:
    """The magnitudes of each group: `[groups, 4]` float32."""
    least, ratio = heads.to(torch.float32).unbind(1)
    rise = ratio.abs()
    second = least * rise
    third = second * rise
    with_zero = torch.stack([torch.zeros_like(least), least, second, third], 1)
    return torch.where((ratio < 0)[:, None], with_zero, torch.stack([least, second, third, third * rise], 1))


def _places(device: torch.device, count: int, bits: int) -> Tensor:
    """Where in a word each of its `count` parts of `bits` bits begins."""
    return torch.arange(0, count * bits, bits, dtype=torch.int32, device=device)
