"""ShortThreeBit: the values of ThreeBit, in as many bits as their magnitudes need, and what it refuses."""

import re
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import PayloadError, ShortThreeBit, ThreeBit
from tests.codecs.values.sections import LAYOUT, encode

# The head of a group whose magnitudes are 1, 2, 4 and 8: the least, in two orders, and the ratio.
IN_ORDER, SWAPPED = (struct.pack("<f", least)[2:] + struct.pack("<f", 2.0)[2:] for least in (1.0, -1.0))


def section_of(head: bytes, bits: str) -> torch.Tensor:
    stream = [int(bit) for bit in bits.replace(" ", "")]
    whole = sum(bit << i for i, bit in enumerate(stream))
    return torch.tensor([*head, *whole.to_bytes(-(-len(stream) // 8), "little")], dtype=torch.uint8)


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), max_size=60),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 3, 7, 8, 64, 255]),
)
def test_values_are_those_of_three_bit(elements: list[float], dtype: torch.dtype, group: int):
    values, count = torch.tensor(elements, dtype=dtype), len(elements)
    section, longer = encode(ShortThreeBit(group), values), encode(ThreeBit(group), values)
    # Decoding depends on the parameter alone, not on the receiver's own group.
    decoded = ShortThreeBit().decode(section, count, group)
    assert torch.equal(decoded, ThreeBit().decode(longer, count, group))
    assert decoded.dtype == torch.float32
    heads = 4 * -(-count // group)
    assert heads + -(-2 * count // 8) <= section.numel() <= heads + -(-4 * count // 8)
    for length in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
        with pytest.raises(PayloadError):
            ShortThreeBit().decode(torch.nn.functional.pad(section, (0, length - section.numel())), count, group)


def test_the_bits():
    # Signs; whether above rank 0; of those above 1; of those above 2.
    values = torch.tensor([1.0, -2.0, 8.0, 1.0, -4.0])
    section = encode(ShortThreeBit(), values)
    assert section.tolist() == section_of(IN_ORDER, "01001  01101  011  10").tolist()
    values = torch.tensor([2.0, -2.0, 8.0, 1.0, -4.0])
    section = encode(ShortThreeBit(), values)
    assert section.tolist() == section_of(SWAPPED, "01001  00111  101  10").tolist()
    assert ShortThreeBit().decode(section, 5, 128).tolist() == values.tolist()
    # A receiver takes any order.
    in_order = section_of(IN_ORDER, "01001  11101  0011  10")
    assert ShortThreeBit().decode(in_order, 5, 128).tolist() == values.tolist()


@pytest.mark.parametrize(("share", "most"), [(0.21, 2.99), (0.03, 2.92)])
def test_bits_a_value(share: float, most: float):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values = values[values.abs() >= values.abs().quantile(1 - share)]
    assert 8 * encode(ShortThreeBit(), values).numel() / values.numel() < most
    assert ShortThreeBit().bound_bytes(values.numel(), LAYOUT) is None
    assert ShortThreeBit().bound_bytes(0, LAYOUT) == 0
    assert ShortThreeBit().largest == ThreeBit().largest


@pytest.mark.parametrize(
    ("head", "bits", "count", "text"),
    [
        (IN_ORDER, "", 1, "has 4 bytes, expected at least 5 for 1 values in groups of 128"),
        (b"", "00", 1, "has 1 bytes, expected at least 5 for 1 values in groups of 128"),
        # All three ranks are above 0, and two bits are left to say which are above 1.
        (IN_ORDER, "000 111 11", 3, "has 5 bytes, expected 6 for 3 values in groups of 128 in 43 bits"),
        (IN_ORDER, "0 0 0000000", 1, "has 6 bytes, expected 5 for 1 values in groups of 128 in 34 bits"),
        (IN_ORDER, "0 1 0 1", 1, "padding at bit 35 is 1, expected 0"),
        (
            struct.pack("<f", 1.0)[2:] + struct.pack("<f", 0.5)[2:],
            "0 0",
            1,
            "magnitudes at byte 0 are 1.0 times powers",
        ),
        (b"\x80\x7f\x80\x3f", "0 0", 1, "magnitudes at byte 0 are inf times powers of 1.0"),
        (b"\x80\xff\x80\x3f", "0 0", 1, "magnitudes at byte 0 are -inf times powers of 1.0"),
    ],
)
def test_refuses(head: bytes, bits: str, count: int, text: str):
    with pytest.raises(PayloadError, match=re.escape(text)):
        ShortThreeBit().decode(section_of(head, bits), count, 128)


def test_refuses_a_parameter_and_a_group():
    with pytest.raises(PayloadError, match="value codec parameter at byte 3 is 0, expected 1 to 255 for ShortThreeBit"):
        ShortThreeBit().decode(section_of(IN_ORDER, "0 0"), 1, 0)
    with pytest.raises(ValueError, match=r"group must be a whole number from 1 to 255.*got 256.*Use 128.* 0.25 bits"):
        ShortThreeBit(256)


@pytest.mark.parametrize("shift", range(4))
def test_decodes_at_any_alignment(shift: int):
    section = encode(ShortThreeBit(), torch.tensor([1.0, -3.0, 1.0]))
    buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), section])
    decoded = ShortThreeBit().decode(buffer[shift:], 3, 128)
    buffer.zero_()
    assert decoded.tolist() == pytest.approx([1.0, -3.0, 1.0], rel=0.01)
