"""TwoBit: the naive quantizer's values, within its bound, and what it refuses."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import PayloadError, TwoBit
from tests.codecs.values.sections import LAYOUT, encode


def two_bits(values: list[float], group: int) -> list[float]:
    """The naive quantizer, group by group."""
    decoded: list[float] = []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        magnitudes = np.abs(np.array(part, dtype=np.float64))
        large = magnitudes >= magnitudes.mean()
        above = magnitudes[large].mean()
        below = magnitudes[~large].mean() if not large.all() else above
        levels = np.minimum([below, above], 65504).astype(np.float32).astype(np.float16).astype(float).tolist()
        decoded += [math.copysign(levels[int(big)], -1.0 if value < 0 else 1.0) for value, big in zip(part, large)]
    return decoded


@given(
    # Sums of these are exact in any order.
    st.lists(st.integers(-(2**20), 2**20).map(lambda value: value / 8), max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 3, 7, 8, 64, 255]),
)
def test_two_bit(elements: list[float], dtype: torch.dtype, group: int):
    codec, count = TwoBit(group), len(elements)
    values = torch.tensor(elements, dtype=dtype)
    before = values.clone()
    section = encode(codec, values)
    assert section.numel() == codec.bound_bytes(count, LAYOUT) == 4 * -(-count // group) + -(-count // 4)
    # Decoding depends on the parameter alone, not on the receiver's own group.
    decoded = TwoBit().decode(section, count, codec.parameter)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == two_bits(elements, group)
    assert torch.equal(values, before)
    for length in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
        with pytest.raises(PayloadError, match=f"has {length} bytes, expected {section.numel()} for {count} values"):
            codec.decode(torch.zeros(length, dtype=torch.uint8), count, group)


def test_two_bit_magnitudes_at_the_edges():
    # Rounding makes the mean of equal magnitudes greater than each of them.
    for value in (0.1, -0.7):
        values = torch.full((3,), value, dtype=torch.float64)
        assert TwoBit().decode(encode(TwoBit(), values), 3, 64).tolist() == [float(np.float16(value))] * 3
    decoded = TwoBit().decode(encode(TwoBit(), torch.tensor([3e38, -1.0, 3.0])), 3, 64)
    assert decoded.tolist() == [65504.0, -2.0, 2.0]
    assert TwoBit().decode(encode(TwoBit(), torch.tensor([0.0, -0.0])), 2, 64).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("small", "large", "codes", "text"),
    [
        (2.0, 1.0, 0, "magnitude at byte 2 is 1.0, expected 2.0 to 65504"),
        (-1.0, 1.0, 0, "magnitude at byte 0 is -1.0, expected 0.0 to 65504"),
        (-0.0, 1.0, 0, "magnitude at byte 0 is -0.0, expected 0.0 to 65504"),
        (1.0, math.inf, 0, "magnitude at byte 2 is inf, expected 1.0 to 65504"),
        (math.nan, math.nan, 0, "magnitude at byte 0 is nan"),
        (1.0, 2.0, 0b01000000, "padding in byte 4 is not 0"),
    ],
)
def test_two_bit_refuses(small: float, large: float, codes: int, text: str):
    section = torch.tensor([*struct.pack("<2e", small, large), codes], dtype=torch.uint8)
    with pytest.raises(PayloadError, match=text):
        TwoBit().decode(section, 3, 64)
    with pytest.raises(PayloadError, match="value codec parameter at byte 3 is 0, expected 1 to 255"):
        TwoBit().decode(section, 3, 0)


@pytest.mark.parametrize("group", [0, 256, -1, 64.0, True])
def test_two_bit_refuses_a_group_when_built(group):
    with pytest.raises(ValueError, match=r"group must be a whole number from 1 to 255.*got .*Use 64"):
        TwoBit(group)


@pytest.mark.parametrize("shift", range(4))
def test_two_bit_decodes_at_any_alignment(shift: int):
    section = encode(TwoBit(), torch.tensor([1.0, -3.0, 1.0]))
    buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), section])
    decoded = TwoBit().decode(buffer[shift:], 3, 64)
    buffer.zero_()
    assert decoded.tolist() == [1.0, -3.0, 1.0]
