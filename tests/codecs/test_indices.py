"""Index codecs: exact, within their bound, and careful with bytes from elsewhere."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import INDEX_CODECS, IndexCodec, PayloadError, Raw32, RunLength16
from lightning_sparsecomm.layout import MAX_SIZE

CODECS = list(INDEX_CODECS.values())


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sorted positions and the size: none, some, all; small sizes and the largest."""
    size = draw(st.integers(0, 70) | st.sampled_from([2**16, 2**31, 2**31 + 1, MAX_SIZE]))
    if size <= 70 and draw(st.booleans()):
        return list(range(size)), size
    ends = st.integers(0, min(size, 300) - 1) | st.integers(max(0, size - 300), size - 1)
    return sorted(draw(st.sets(ends, max_size=40)) if size else set()), size


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(selection=selections())
def test_round_trip(codec: IndexCodec, selection: tuple[list[int], int]):
    positions, size = selection
    indices = torch.tensor(positions, dtype=torch.int64)
    before = indices.clone()
    section = codec.encode(indices, size)
    assert section.dtype == torch.uint8
    assert section.dim() == 1
    decoded = codec.decode(section, len(positions), size)
    assert decoded.dtype == torch.int64
    assert decoded.tolist() == positions
    assert torch.equal(indices, before)
    for count in range(len(positions), min(size, len(positions) + 3) + 1):
        bound = codec.bound_bytes(count, size)
        assert bound is None or section.numel() <= bound


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_full_selection_costs_nothing(codec: IndexCodec):
    assert codec.encode(torch.arange(1000), 1000).numel() == 0


def test_registry_names_each_codec_by_its_code():
    assert {code: codec.code for code, codec in INDEX_CODECS.items()} == {1: 1, 2: 2}


def test_run_length_bytes():
    # A run of 65,534 zeros is the longest without an escape; 65,535 and 131,070 are escapes and then a run of none.
    positions = [0, 3, 65_538, 131_074, 262_145]
    section = RunLength16().encode(torch.tensor(positions), MAX_SIZE)
    words = [0, 2, 65_534, 65_535, 0, 65_535, 65_535, 0]
    assert bytes(section.tolist()) == struct.pack(f"<{len(words)}H", *words)
    assert RunLength16().decode(section, 5, 262_146).tolist() == positions
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
        RunLength16().decode(section, count, size)
    with pytest.raises(PayloadError, match="expected an even number"):
        RunLength16().decode(torch.zeros(3, dtype=torch.uint8), 1, 10)


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
    assert Raw32().decode(data[shift:], 3, 8).tolist() == [1, 5, 6]


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
        Raw32().decode(section, len(positions), size)


@pytest.mark.parametrize(
    ("length", "count", "size"), [(0, 1, 5), (3, 1, 5), (5, 1, 5), (4, 0, 5), (20, 5, 5), (1, 0, 0)]
)
def test_raw32_refuses_lengths(length: int, count: int, size: int):
    with pytest.raises(PayloadError, match=f"has {length} bytes, expected"):
        Raw32().decode(torch.zeros(length, dtype=torch.uint8), count, size)
