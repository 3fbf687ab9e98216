"""ThreeBit: the naive quantizer's values, within its bound, and what it refuses."""

import math
import re
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import PayloadError, ThreeBit, TwoBit
from tests.codecs.values.sections import LAYOUT, encode


def bfloat(number: float) -> np.float32:
    """The nearest bfloat16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return np.float32(struct.unpack("<f", struct.pack("<I", rounded))[0])


def four_of(magnitudes: list[float]) -> list[np.float32]:
    """The four magnitudes that a group of values with these magnitudes shares."""
    mean, smallest, largest = sum(magnitudes) / len(magnitudes), min(magnitudes), max(magnitudes)
    with_zero = smallest < mean / 8
    least = 7 / 8 * mean if with_zero else smallest
    if least < 2.0**-126:
        return [np.float32(0)] * 4
    ratio = bfloat((largest / least) ** (1 / 2 if with_zero else 1 / 3))
    levels = [bfloat(least)]
    while len(levels) < 4:
        levels.append(levels[-1] * ratio)
    return [np.float32(0), *levels[:3]] if with_zero else levels


def three_bits(values: list[float], group: int) -> list[float]:
    """The naive quantizer, group by group. Of two that are equally near, the larger magnitude."""
    decoded: list[float] = []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        levels = four_of([abs(value) for value in part])
        for value in part:
            nearest = max(range(4), key=lambda i: (-abs(float(levels[i]) - abs(value)), i))
            decoded.append(math.copysign(float(levels[nearest]), -1.0 if value < 0 else 1.0))
    return decoded


@given(
    # Sums of these are exact in any order.
    st.lists(st.integers(-(2**20), 2**20).map(lambda value: value / 8), max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 3, 7, 8, 64, 255]),
)
def test_three_bit(elements: list[float], dtype: torch.dtype, group: int):
    codec, count = ThreeBit(group), len(elements)
    values = torch.tensor(elements, dtype=dtype)
    before = values.clone()
    section = encode(codec, values)
    assert section.numel() == codec.bound_bytes(count, LAYOUT) == 4 * -(-count // group) + -(-3 * count // 8)
    # Decoding depends on the parameter alone, not on the receiver's own group.
    decoded = ThreeBit().decode(section, count, codec.parameter)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == three_bits(elements, group)
    assert torch.equal(values, before)
    for length in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
        with pytest.raises(PayloadError, match=f"has {length} bytes, expected {section.numel()} for {count} values"):
            codec.decode(torch.zeros(length, dtype=torch.uint8), count, group)


@pytest.mark.parametrize("share", [1.0, 0.24, 0.01])
@pytest.mark.parametrize("heavy", [False, True])
def test_three_bit_loses_less_than_half_of_what_two_bit_loses(share: float, heavy: bool):
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    if heavy:
        values = values * values.abs().exp()
    values = values[values.abs() >= values.abs().quantile(1 - share)]
    lost = {
        type(codec): (codec.decode(encode(codec, values), values.numel(), codec.parameter) - values).square().sum()
        for codec in (ThreeBit(), TwoBit())
    }
    assert lost[ThreeBit] < 0.51 * lost[TwoBit]


@pytest.mark.parametrize(
    ("share", "three", "two"),
    [(1.0, (0.05, 0.065), (0.11, 0.13)), (0.24, (0.008, 0.011), (0.02, 0.024)), (0.1, (0.004, 0.006), (0.01, 0.013))],
)
def test_what_the_docstring_says_of_normal_values(share: float, three: tuple[float, float], two: tuple[float, float]):
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    values = values[values.abs().topk(round(share * values.numel())).indices.sort().values]
    for codec, (least, most) in ((ThreeBit(), three), (TwoBit(), two)):
        decoded = codec.decode(encode(codec, values), values.numel(), codec.parameter)
        assert least <= float((decoded - values).square().sum() / values.square().sum()) <= most


def test_three_bit_magnitudes_at_the_edges():
    codec = ThreeBit()
    for dtype in (torch.float32, torch.float64):
        zeros = torch.tensor([0.0, -0.0, 1e-39], dtype=dtype)
        assert codec.decode(encode(codec, zeros), 3, 128).tolist() == [0.0] * 3
    # No product overflows, and nothing is clamped that fits.
    values = torch.tensor([-(2.0**126), 2.0**-126, 3e38, 1.0])
    decoded = codec.decode(encode(codec, values), 4, 128)
    assert decoded.tolist() == pytest.approx([-(2.0**126), 0.0, 2.0**126, 0.0], rel=0.01)
    assert codec.largest == 2.0**126
    # Where the smallest is sent as 0, the three others reach up to the largest.
    values = torch.tensor([0.0, *[1e30] * 126, 8e37])
    decoded = codec.decode(encode(codec, values), 128, 128)
    assert decoded[[0, -1]].tolist() == pytest.approx([0.0, 8e37], rel=0.01)
    spread = torch.tensor([-(2.0**126), 1.0])
    assert codec.decode(encode(ThreeBit(1), spread), 2, 1).tolist() == spread.tolist()


@pytest.mark.parametrize(
    ("least", "ratio"),
    [
        (1.0, 0.5),
        (1.0, -0.5),
        (-1.0, 2.0),
        (-0.0, 2.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (1.0, math.nan),
        (2.0**100, 2.0**10),
        (0.0, math.inf),
    ],
)
def test_three_bit_refuses_magnitudes(least: float, ratio: float):
    head = b"".join(struct.pack("<f", number)[2:] for number in (least, ratio))
    section = torch.tensor([*head, 0], dtype=torch.uint8)
    text = f"magnitudes at byte 0 are {least} times powers of {ratio}, expected finite ones"
    with pytest.raises(PayloadError, match=re.escape(text)):
        ThreeBit().decode(section, 2, 128)


def test_three_bit_refuses_padding_and_parameters():
    section = torch.tensor([0x80, 0x3F, 0x80, 0x3F, 0b0100_0000], dtype=torch.uint8)
    with pytest.raises(PayloadError, match="three-bit value section: padding in byte 4 is not 0"):
        ThreeBit().decode(section, 2, 128)
    with pytest.raises(PayloadError, match="value codec parameter at byte 3 is 0, expected 1 to 255"):
        ThreeBit().decode(section, 2, 0)


@pytest.mark.parametrize("group", [0, 256, -1, 64.0, True])
def test_three_bit_refuses_a_group_when_built(group):
    with pytest.raises(ValueError, match=r"group must be a whole number from 1 to 255.*got .*Use 128.* 0.25 bits"):
        ThreeBit(group)


@pytest.mark.parametrize("shift", range(4))
def test_three_bit_decodes_at_any_alignment(shift: int):
    section = encode(ThreeBit(), torch.tensor([1.0, -3.0, 1.0]))
    buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), section])
    decoded = ThreeBit().decode(buffer[shift:], 3, 128)
    buffer.zero_()
    assert decoded.tolist() == pytest.approx([1.0, -3.0, 1.0], rel=0.01)
