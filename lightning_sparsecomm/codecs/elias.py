"""Positive whole numbers, small ones in few bits: Elias' gamma code, its lengths and its digits in sections apart."""

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.payload import wrong_section
from lightning_sparsecomm.kernels import position_kernels_for


def write_elias(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Two sections: how many binary digits each number has after its first one, in unary; and these digits.

    Together they have as many bits as Elias' gamma code: one for 1, three for 2 and 3, five for 4 to 7.

    Args:
        numbers: `[k]` int64, each from 1 to 2^32.

    Returns:
        `[bytes]` uint8 each. The lengths are zeros with a 1 after each; the digits come lowest first.
    """
    kernels = position_kernels_for(numbers.device)
    at = (numbers > 1).nonzero().view(-1)
    long = numbers[at]
    # Exact, as binary64 has 53 digits.
    lengths = torch.frexp(long.to(torch.float64)).exponent.to(torch.int64).sub_(1)
    ends = torch.ones_like(numbers).index_add_(0, at, lengths).cumsum_(0).sub_(1)
    unary = kernels.write_bitmap(ends, int(ends[-1]) + 1 if ends.numel() else 0)
    ends = torch.cumsum(lengths, 0)
    starts, ones = ends - lengths, [at[:0]]
    for digit in range(int(lengths.max()) if lengths.numel() else 0):
        ones.append(starts[(lengths > digit) & (long >> digit & 1 == 1)] + digit)
    return unary, kernels.write_bitmap(torch.cat(ones), int(ends[-1]) if ends.numel() else 0)


def read_lengths(section: Tensor, count: int, most: int, name: str) -> Tensor:
    """How many digits after the first one each of `count` numbers has: `[count]` int64, at most `most`.

    Args:
        section: `[bytes]` uint8, the first that `write_elias` returns; from any source.
        count: How many numbers are expected.
        most: The most digits that are expected after the first one.
        name: Of the section, for messages.

    Raises:
        PayloadError: These are not the lengths of so many numbers, or one of them is above `most`.
    """
    parsed = position_kernels_for(section.device).read_bitmap(section, count)
    if parsed.held != count or section.numel() != (parsed.end + 7) // 8:
        found = f"has {parsed.held} numbers, which end at bit {parsed.end} of {section.numel()} bytes"
        raise wrong_section(name, found, f"{count}, which end in the last byte")
    lengths = torch.diff(parsed.indices, prepend=parsed.indices.new_full((1,), -1)).sub_(1)
    if count and int(lengths.max()) > most:
        raise wrong_section(name, f"a number has {int(lengths.max()) + 1} digits", f"at most {most + 1}")
    return lengths


def read_digits(flags: Tensor, lengths: Tensor) -> Tensor:
    """The numbers, `[k]` int64, for the `lengths` of all of them and their digits: `[sum of lengths]` bool."""
    numbers = torch.ones_like(lengths)
    places = (lengths > 0).nonzero().view(-1)
    lengths = lengths[places]
    starts = torch.cumsum(lengths, 0).sub_(lengths)
    large = torch.ones_like(lengths) << lengths
    for digit in range(int(lengths.max()) if lengths.numel() else 0):
        has = (lengths > digit).nonzero().view(-1)
        large[has] += flags[starts[has] + digit].to(torch.int64) << digit
    return numbers.index_copy_(0, places, large)
