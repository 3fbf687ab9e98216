"""Index codecs: exact, within their bound, and careful with bytes from elsewhere."""

import math
import struct

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    Auto,
    Bitmap,
    Golomb,
    IndexCodec,
    PayloadError,
    Raw32,
    RunLength16,
    Runs,
)
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
    if codec == Bitmap():
        # Its section has a bit for each element.
        assume(size <= 2**16)
    indices = torch.tensor(positions, dtype=torch.int64)
    before = indices.clone()
    section = codec.encode(indices, size)
    assert section.dtype == torch.uint8
    assert section.dim() == 1
    assert section.numel() == codec.section_bytes(indices, size)
    decoded = codec.decode(section, len(positions), size, codec.parameter(len(positions), size))
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
    assert {code: codec.code for code, codec in INDEX_CODECS.items()} == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5}


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


def test_runs_bytes():
    section = Runs().encode(torch.tensor([0, 3, 4, 5, 2**32 - 3, 2**32 - 2]), MAX_SIZE)
    assert bytes(section.tolist()) == struct.pack("<6I", 0, 1, 3, 3, 2**32 - 3, 2)
    assert Runs().encode(torch.empty(0, dtype=torch.int64), 9).numel() == 0


@pytest.mark.parametrize(
    ("words", "count", "size", "text"),
    [
        ([1, 2, 3], 2, 10, "has 12 bytes, expected a multiple of 8"),
        ([1, 0], 1, 10, "run at byte 0 is 0 positions from 1 on, expected at least 1, below 10"),
        ([8, 3], 3, 10, "run at byte 0 is 3 positions from 8 on, expected at least 1, below 10"),
        # Where one more is not below 2^32.
        ([2**32 - 2, 2**32 - 1], 3, MAX_SIZE, "run at byte 0 is 4294967295 positions from 4294967294 on"),
        ([1, 2, 3, 1], 3, 10, "run at byte 8 is 1 positions from 3 on, expected at least 1, from 4 on, below 10"),
        ([4, 2, 1, 1], 3, 10, "run at byte 8 is 1 positions from 1 on, expected at least 1, from 7 on, below 10"),
        ([1, 2], 3, 10, "its runs hold 2 positions, expected 3"),
        ([], 1, 10, "its runs hold 0 positions, expected 1"),
        # 16 GiB of positions, were they believed.
        ([0, 2**32 - 1], 2, MAX_SIZE, "its runs hold 4294967295 positions, expected 2"),
        ([0, 10], 10, 10, "has 8 bytes, expected 0 for 10 of 10 positions"),
    ],
)
def test_runs_refuses(words: list[int], count: int, size: int, text: str):
    section = torch.tensor(list(struct.pack(f"<{len(words)}I", *words)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=text):
        Runs().decode(section, count, size, 0)


def bits_of(text: str) -> torch.Tensor:
    """Bits in their order in the stream, as bytes; spaces are for the reader."""
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
    # Any parameter that the head names decodes, not only the best.
    assert Golomb().decode(bits_of("0 1110"), 2, 9, 0).tolist() == [0, 4]
    assert Golomb().decode(bits_of("0" + "1" * 31), 1, MAX_SIZE, 31).tolist() == [2**31 - 1]
    assert Golomb().decode(bits_of("10" + "01" + "1" * 29), 1, MAX_SIZE, 31).tolist() == [2**32 - 2]


def test_golomb_parameter():
    assert [Golomb().parameter(k, 1000) for k in (1, 10, 100, 300, 380, 400, 999)] == [9, 6, 3, 1, 1, 0, 0]
    assert Golomb().parameter(0, 5) == Golomb().parameter(5, 5) == Golomb().parameter(0, 0) == 0
    assert Golomb().parameter(1, MAX_SIZE) == 31
    # It is the shortest: no other gives less, in the mean over random selections.
    for p, best in ((0.1, 3), (0.01, 6), (0.001, 9), (0.5, 0)):
        lengths = [b + 1 / (1 - (1 - p) ** 2**b) for b in range(32)]
        assert Golomb().parameter(round(p * 10**6), 10**6) == best == lengths.index(min(lengths))


@pytest.mark.parametrize(("p", "expected"), [(0.1, 4.756), (0.01, 8.108), (0.001, 11.495)])
def test_golomb_is_as_short_as_the_paper_says(p: float, expected: float):
    size = round(200_000 / p)
    generator = torch.Generator().manual_seed(3)
    # Each element with probability p: runs between positions are geometric.
    runs = torch.empty(200_000, dtype=torch.float64).geometric_(p, generator=generator).long()
    indices = runs.cumsum(0) - 1
    indices = indices[indices < size]
    b = Golomb().parameter(indices.numel(), size)
    assert math.isclose(b + 1 / (1 - (1 - p) ** 2**b), expected, abs_tol=5e-4)
    section = Golomb().encode(indices, size)
    assert math.isclose(8 * section.numel() / indices.numel(), expected, rel_tol=5e-3)
    # Above the entropy, and little.
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
        # A gap to the size itself; a quotient far beyond it.
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


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(data=st.binary(max_size=12), count=st.integers(0, 30), size=st.integers(0, 90), parameter=st.integers(0, 31))
def test_whatever_is_decoded_is_sound(codec: IndexCodec, data: bytes, count: int, size: int, parameter: int):
    assume(count <= size)
    section = torch.tensor(list(data), dtype=torch.uint8)
    try:
        decoded = codec.decode(section, count, size, parameter)
    except PayloadError:
        return
    assert parameter in codec.parameters
    assert decoded.numel() == count
    assert bool((decoded.diff() > 0).all())
    assert count == 0 or (int(decoded[0]) >= 0 and int(decoded[-1]) < size)
    # Only what is written is read: one section for each selection and parameter.
    if parameter == codec.parameter(count, size):
        assert codec.encode(decoded, size).tolist() == list(data)


@given(selection=selections())
def test_auto_is_the_shortest(selection: tuple[list[int], int]):
    positions, size = selection
    indices = torch.tensor(positions, dtype=torch.int64)
    chosen = Auto().chosen(indices, size)
    section = chosen.encode(indices, size)
    assert section.numel() == min(codec.section_bytes(indices, size) for codec in CODECS)
    bound = Auto().bound_bytes(len(positions), size)
    assert bound is None or section.numel() <= bound


def test_auto_chooses_each():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(10**6, generator=generator)
    for count, codec in ((10**3, Golomb()), (10**5, Golomb()), (5 * 10**5, Bitmap())):
        assert Auto().chosen(order[:count].sort().values, 10**6) == codec
    # One position behind 3 · 10⁹ zeros, where Golomb's code has 5 bytes; a few at the beginning of as many.
    assert Auto().chosen(torch.tensor([3 * 10**9]), MAX_SIZE) == Raw32()
    assert Auto().chosen(torch.arange(3), MAX_SIZE) == RunLength16()
    # As short as one another: what decodes quickest.
    assert Auto().chosen(torch.arange(9), 9) == RunLength16()


def test_auto_is_bounded_where_golomb_would_be_no_shorter():
    assert Auto().bound_bytes(500, 1000) == 125
    assert Auto().bound_bytes(999, 1000) == 125
    assert Auto().bound_bytes(0, 1000) == Auto().bound_bytes(1, 1) == 0
    for count in (1, 10, 380, 1000):
        assert Auto().bound_bytes(count, 1000) is None
