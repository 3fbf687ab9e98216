"""OneBit: signs, with each group's mean magnitude, and what it refuses."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import OneBit, PayloadError
from tests.codecs.values.sections import LAYOUT, encode


def one_bits(values: list[float], group: int) -> list[float]:
    """The naive quantizer, group by group."""
    decoded: list[float] = []
    for first in range(0, len(values), group):
        part = values[first : first + group]
        mean = float(torch.tensor(sum(map(abs, part)) / len(part), dtype=torch.float64).to(torch.bfloat16))
        decoded += [-mean if value < 0 else mean for value in part]
    return decoded


@given(
    # Sums of these are exact in any order.
    st.lists(st.integers(-(2**20), 2**20).map(lambda value: value / 8), max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 3, 7, 8, 64, 255]),
)
def test_one_bit(elements: list[float], dtype: torch.dtype, group: int):
    codec, count = OneBit(group), len(elements)
    values = torch.tensor(elements, dtype=dtype)
    before = values.clone()
    section = encode(codec, values)
    assert section.numel() == codec.bound_bytes(count, LAYOUT) == 2 * -(-count // group) + -(-count // 8)
    # Decoding depends on the parameter alone, not on the receiver's own group.
    decoded = OneBit().decode(section, count, codec.parameter)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == one_bits(elements, group)
    assert torch.equal(values, before)
    for length in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
        with pytest.raises(PayloadError, match=f"has {length} bytes, expected {section.numel()} for {count} values"):
            codec.decode(torch.zeros(length, dtype=torch.uint8), count, group)


def test_one_bit_clamps_to_what_is_finite():
    values = torch.tensor([1e300, -1e300], dtype=torch.float64)
    largest = torch.finfo(torch.bfloat16).max
    assert OneBit().decode(encode(OneBit(), values), 2, 128).tolist() == [largest, -largest]


@pytest.mark.parametrize("magnitude", [-1.0, -0.0, math.inf, math.nan])
def test_one_bit_refuses_a_magnitude(magnitude: float):
    section = torch.tensor([*struct.pack("<f", magnitude)[2:], 0], dtype=torch.uint8)
    with pytest.raises(PayloadError, match=f"magnitude at byte 0 is {magnitude}, expected a finite one"):
        OneBit().decode(section, 2, 128)


def test_one_bit_refuses_padding():
    with pytest.raises(PayloadError, match="one-bit value section: padding in byte 2 is not 0"):
        OneBit().decode(torch.tensor([0x80, 0x3F, 0b100], dtype=torch.uint8), 2, 128)


@pytest.mark.parametrize("group", [0, 256, -1, 64.0, True])
def test_one_bit_refuses_a_group_when_built(group):
    with pytest.raises(ValueError, match=r"group must be a whole number from 1 to 255.*got .*Use 128.* 0.125 bits"):
        OneBit(group)
