"""Raw32 and RunLength16: their bytes, their bounds, and what they refuse."""

import struct

import pytest
import torch

from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import PayloadError, Raw32, RunLength16


def test_raw32_bytes():
    section = Raw32().encode(torch.tensor([0, 258, 2**31 + 1, 2**32 - 2]), MAX_SIZE)
    assert bytes(section.tolist()) == struct.pack("<4I", 0, 258, 2**31 + 1, 2**32 - 2)
    for count in range(4):
        every_other = torch.arange(10)[: 2 * count : 2]
        assert bytes(Raw32().encode(every_other, 10).tolist()) == struct.pack(f"<{count}I", *range(0, 2 * count, 2))


def test_raw32_bound():
    assert Raw32().bound_bytes(3, 10) == 12
    assert Raw32().bound_bytes(10, 10) is None
    assert Raw32().bound_bytes(1, 1) == 0
    assert Raw32().bound_bytes(0, 0) == 0


@pytest.mark.parametrize("shift", range(4))
def test_raw32_decodes_at_any_alignment(shift: int):
    data = torch.tensor([0] * shift + list(struct.pack("<3I", 1, 5, 6)), dtype=torch.uint8)
    assert Raw32().decode(data[shift:], 3, 8, 0).tolist() == [1, 5, 6]


@pytest.mark.parametrize(
    ("positions", "size", "message"),
    [
        ([5], 5, "position at byte 0 is 5, expected less than 5"),
        ([2**32 - 1], 9, "position at byte 0 is 4294967295"),
        ([3, 3], 5, "position at byte 4 is 3, expected less than 5 and more than the one before, 3"),
        ([0, 3, 2], 5, "position at byte 8 is 2, expected less than 5 and more than the one before, 3"),
    ],
)
def test_raw32_refuses_positions(positions: list[int], size: int, message: str):
    section = torch.tensor(list(struct.pack(f"<{len(positions)}I", *positions)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=message):
        Raw32().decode(section, len(positions), size, 0)


@pytest.mark.parametrize(
    ("length", "count", "size"), [(0, 1, 5), (3, 1, 5), (5, 1, 5), (4, 0, 5), (20, 5, 5), (1, 0, 0)]
)
def test_raw32_refuses_lengths(length: int, count: int, size: int):
    with pytest.raises(PayloadError, match=f"has {length} bytes, expected"):
        Raw32().decode(torch.zeros(length, dtype=torch.uint8), count, size, 0)


def test_run_length_bytes():
    # A run of 65,534 zeros is the longest without an escape; 65,535 and 131,070 are escapes and then a run of none.
    positions = [0, 3, 65_538, 131_074, 262_145]
    section = RunLength16().encode(torch.tensor(positions), MAX_SIZE)
    words = [0, 2, 65_534, 65_535, 0, 65_535, 65_535, 0]
    assert bytes(section.tolist()) == struct.pack(f"<{len(words)}H", *words)
    assert RunLength16().decode(section, 5, 262_146, 0).tolist() == positions
    assert RunLength16().bound_bytes(1, 2**32 - 1) == 2 * (1 + (2**32 - 2) // 65_535)


@pytest.mark.parametrize(
    ("words", "count", "size", "text"),
    [
        ([1, 2], 1, 10, "its 2 words hold 2 positions, expected 1"),
        ([1], 2, 10, "its 1 words hold 1 positions, expected 2"),
        ([1, 0xFFFF], 1, 10**6, "its 2 words hold 1 positions, expected 1, the last word one of them"),
        ([1, 8], 2, 10, "the last position is 10, expected less than 10"),
        ([0xFFFF, 0], 1, 65_535, "the last position is 65535, expected less than 65535"),
        ([1], 10, 10, "has 2 bytes, expected 0 for 10 of 10 positions"),
    ],
)
def test_run_length_refuses(words: list[int], count: int, size: int, text: str):
    section = torch.tensor(list(struct.pack(f"<{len(words)}H", *words)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=text):
        RunLength16().decode(section, count, size, 0)
    with pytest.raises(PayloadError, match="expected an even number"):
        RunLength16().decode(torch.zeros(3, dtype=torch.uint8), 1, 10, 0)
