"""Golomb, AdaptiveGolomb and Bitmap: their bytes, Golomb codes' length, and what they refuse."""

import math

import pytest
import torch

from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import Bitmap, Golomb, PayloadError


def bits_of(text: str) -> torch.Tensor:
    """Bits, in the order of the stream, as bytes. Spaces are ignored."""
    bits = [int(bit) for bit in text.replace(" ", "")]
    whole = sum(bit << i for i, bit in enumerate(bits))
    return torch.tensor(list(whole.to_bytes(-(-len(bits) // 8), "little")), dtype=torch.uint8)


def test_golomb_bytes():
    # p = 0.1: b = 3. Runs of 0, 2, 8 and 17 zeros: quotients 0, 0, 1, 2 in ones, a zero, remainders from the low bit.
    positions = [0, 3, 12, 30]
    section = Golomb().encode(torch.tensor(positions), 40)
    assert Golomb().parameter(4, 40) == 3
    assert section.tolist() == bits_of("0 000  0 010  10 000  110 100").tolist()
    assert Golomb().decode(section, 4, 40, 3).tolist() == positions
    # Any parameter in the head can be decoded, not only the best one.
    assert Golomb().decode(bits_of("0 1110"), 2, 9, 0).tolist() == [0, 4]
    assert Golomb().decode(bits_of("0" + "1" * 31), 1, MAX_SIZE, 31).tolist() == [2**31 - 1]
    assert Golomb().decode(bits_of("10" + "01" + "1" * 29), 1, MAX_SIZE, 31).tolist() == [2**32 - 2]


def test_golomb_parameter():
    assert [Golomb().parameter(k, 1000) for k in (1, 10, 100, 300, 380, 400, 999)] == [9, 6, 3, 1, 1, 0, 0]
    assert Golomb().parameter(0, 5) == Golomb().parameter(5, 5) == Golomb().parameter(0, 0) == 0
    assert Golomb().parameter(1, MAX_SIZE) == 31
    # It is the best: no other gives a shorter code on average over random selections.
    for p, best in ((0.1, 3), (0.01, 6), (0.001, 9), (0.5, 0)):
        lengths = [b + 1 / (1 - (1 - p) ** 2**b) for b in range(32)]
        assert Golomb().parameter(round(p * 10**6), 10**6) == best == lengths.index(min(lengths))


@pytest.mark.parametrize(("p", "expected"), [(0.1, 4.756), (0.01, 8.108), (0.001, 11.495)])
def test_golomb_is_as_short_as_the_paper_says(p: float, expected: float):
    size = round(200_000 / p)
    generator = torch.Generator().manual_seed(3)
    # Selects each element with probability p: runs between positions are geometric.
    runs = torch.empty(200_000, dtype=torch.float64).geometric_(p, generator=generator).long()
    indices = runs.cumsum(0) - 1
    indices = indices[indices < size]
    b = Golomb().parameter(indices.numel(), size)
    assert math.isclose(b + 1 / (1 - (1 - p) ** 2**b), expected, abs_tol=5e-4)
    section = Golomb().encode(indices, size)
    assert math.isclose(8 * section.numel() / indices.numel(), expected, rel_tol=5e-3)
    # A little above the entropy.
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
    assert entropy < expected < 1.015 * entropy
    assert torch.equal(Golomb().decode(section, indices.numel(), size, b), indices)


@pytest.mark.parametrize(
    ("bits", "count", "size", "parameter", "text"),
    [
        ("0 000  0 010", 2, 40, 32, "index codec parameter at byte 2 is 32, expected 0 to 31"),
        ("0 000", 3, 40, 3, "has 1 bytes, expected at least 2 for 3 positions"),
        ("1111 1111", 1, 40, 3, "position 0 at bit 0 is cut off or too large, expected less than 40 within 8 bits"),
        ("0 000  1110", 2, 40, 3, "position 1 at bit 4 is cut off or too large"),
        # A position equal to the size, and one far beyond it.
        ("0 000  110 110", 2, 20, 3, "position 1 at bit 4 is cut off or too large, expected less than 20"),
        ("1" * 50 + "0" + "1" * 31, 1, MAX_SIZE, 31, "position 0 at bit 0 is cut off or too large"),
        ("0 000  0 010  0", 2, 40, 3, "has 2 bytes, expected 1 for its 8 bits of 2 positions"),
        ("0 000 0 010 0 111 1", 3, 40, 3, "padding at bit 12 is 1, expected 0"),
        ("0", 0, 40, 3, "has 1 bytes, expected 0 for its 0 bits of 0 positions"),
        ("0", 40, 40, 3, "has 1 bytes, expected 0 for 40 of 40 positions"),
    ],
)
def test_golomb_refuses(bits: str, count: int, size: int, parameter: int, text: str):
    with pytest.raises(PayloadError, match=text):
        Golomb().decode(bits_of(bits), count, size, parameter)


def test_bitmap_bytes():
    section = Bitmap().encode(torch.tensor([0, 3, 9]), 10)
    assert section.tolist() == [0b1001, 0b10]
    assert Bitmap().encode(torch.tensor([], dtype=torch.int64), 1).tolist() == [0]


@pytest.mark.parametrize(
    ("bits", "count", "size", "parameter", "text"),
    [
        ("10010000 01", 3, 10, 1, "index codec parameter at byte 2 is 1, expected 0 for Bitmap"),
        ("1001", 2, 10, 0, "has 1 bytes, expected 2 for 10 elements"),
        ("10010000 00000000 0", 2, 10, 0, "has 3 bytes, expected 2 for 10 elements"),
        ("10010000 001", 3, 10, 0, "padding at bit 10 is 1, expected 0 from bit 10 on"),
        ("10010000 010", 2, 10, 0, "3 of its bits are 1, expected 2"),
        ("10010000 000", 3, 10, 0, "2 of its bits are 1, expected 3"),
        ("1", 1, 1, 0, "has 1 bytes, expected 0 for 1 of 1 positions"),
    ],
)
def test_bitmap_refuses(bits: str, count: int, size: int, parameter: int, text: str):
    with pytest.raises(PayloadError, match=text):
        Bitmap().decode(bits_of(bits), count, size, parameter)
