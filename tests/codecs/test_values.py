"""Value codecs: exact or rounded to nearest, within their bound, and careful with bytes from elsewhere."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import (
    VALUE_CODECS,
    Float16,
    Float32,
    Float64,
    PayloadError,
    SharedMean,
    TwoBit,
    ValueCodec,
)
from lightning_sparsecomm.layout import Layout

LAYOUT = Layout([("weight", (100,))])
CODECS: list[ValueCodec] = [Float32(), Float16(), Float64()]
NUMPY = {Float32(): np.float32, Float16(): np.float16, Float64(): np.float64}

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite64 = st.floats(allow_nan=False, allow_infinity=False)


def encode(codec: ValueCodec, values: torch.Tensor) -> torch.Tensor:
    return codec.encode(values, torch.arange(values.numel()), LAYOUT)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(data=st.data())
def test_round_trip_is_numpys_rounding(codec: ValueCodec, data: st.DataObject):
    dtype, floats = data.draw(st.sampled_from([(torch.float32, finite32), (torch.float64, finite64)]))
    values = torch.tensor(data.draw(st.lists(floats, max_size=20)), dtype=dtype)
    before = values.clone()
    section = encode(codec, values)
    assert section.dtype == torch.uint8
    assert section.numel() == codec.bound_bytes(values.numel(), LAYOUT)
    decoded = codec.decode(section, values.numel(), 0)

    target = NUMPY[codec]
    expected = values.numpy()
    if expected.itemsize > target().itemsize:
        expected = np.clip(expected, np.finfo(target).min, np.finfo(target).max)
    expected = expected.astype(target)
    assert decoded.dtype == (torch.float64 if codec == Float64() else torch.float32)
    # By bits, so that -0.0 is told from 0.0.
    assert decoded.numpy().tobytes() == expected.astype(decoded.numpy().dtype).tobytes()
    assert values.numpy().tobytes() == before.numpy().tobytes()


def test_exact_where_promised():
    tiny = torch.tensor([1e-45, -0.0, 3.4e38], dtype=torch.float32)
    assert torch.equal(Float32().decode(encode(Float32(), tiny), 3, 0), tiny)
    assert Float64().decode(encode(Float64(), torch.tensor([0.1, 5e-324]).double()), 2, 0).dtype == torch.float64


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_encodes_values_with_gaps_between_them(codec: ValueCodec, count: int):
    values = torch.arange(1.0, 7.0)[: 3 * count : 3]
    assert codec.decode(encode(codec, values), count, 0).tolist() == [1.0, 4.0][:count]


def test_float16_clamps_and_leaves_the_rest():
    values = torch.tensor([1e9, -70000.0, 65504.0, 2.0**-25, 2.0**-24])
    assert Float16().decode(encode(Float16(), values), 5, 0).tolist() == [65504.0, -65504.0, 65504.0, 0.0, 2.0**-24]


def test_float32_clamps_wider_values():
    decoded = Float32().decode(encode(Float32(), torch.tensor([1e300, -1e300], dtype=torch.float64)), 2, 0)
    assert decoded.tolist() == [float(torch.finfo(torch.float32).max), -float(torch.finfo(torch.float32).max)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_values_that_are_not_finite(codec: ValueCodec, bad: float):
    letter = {Float32(): "f", Float16(): "e", Float64(): "d"}[codec]
    section = torch.tensor(list(struct.pack(f"<3{letter}", 1.0, bad, bad)), dtype=torch.uint8)
    with pytest.raises(PayloadError, match=f"value at byte {section.numel() // 3} is {bad}, expected a finite"):
        codec.decode(section, 3, 0)


def test_finite_values_may_have_an_infinite_sum():
    values = torch.full((4,), 3e38)
    assert torch.equal(Float32().decode(encode(Float32(), values), 4, 0), values)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_refuses_every_other_length(codec: ValueCodec):
    right = encode(codec, torch.ones(3)).numel()
    for length in set(range(right + 9)) - {right}:
        with pytest.raises(PayloadError, match=f"has {length} bytes, expected {right} for 3 values"):
            codec.decode(torch.zeros(length, dtype=torch.uint8), 3, 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("shift", range(8))
def test_decodes_at_any_alignment_into_memory_of_its_own(codec: ValueCodec, shift: int):
    values = torch.tensor([1.0, -2.0, 0.5])
    buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), encode(codec, values)])
    decoded = codec.decode(buffer[shift:], 3, 0)
    buffer.zero_()
    assert decoded.tolist() == [1.0, -2.0, 0.5]


def test_registry_names_each_codec_by_its_code():
    assert {code: type(codec) for code, codec in VALUE_CODECS.items()} == {
        1: Float32,
        2: Float16,
        3: Float64,
        4: SharedMean,
        5: TwoBit,
    }
    assert all(codec.code == code for code, codec in VALUE_CODECS.items())


def shared_means(values: torch.Tensor, indices: list[int], layout: Layout) -> torch.Tensor:
    """The naive thing: each segment's values become their mean."""
    expected = values.numpy().astype(np.float64)
    for segment in layout.segments:
        group = [i for i, index in enumerate(indices) if segment.offset <= index < segment.offset + segment.size]
        if group:
            expected[group] = expected[group].mean()
    return torch.from_numpy(expected.astype(np.float32))


@given(st.lists(st.integers(0, 200), max_size=5), st.sampled_from([torch.float32, torch.float64]), st.data())
def test_shared_mean(sizes: list[int], dtype: torch.dtype, data: st.DataObject):
    layout = Layout((str(i), (size,)) for i, size in enumerate(sizes))
    chosen = data.draw(st.sets(st.integers(0, layout.size - 1), max_size=30)) if layout.size else set()
    indices = sorted(chosen) if data.draw(st.booleans()) else list(range(layout.size))
    # Sums of integers are exact in any order.
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(-(2**20), 2**20, (len(indices),), generator=generator).to(dtype)
    section = SharedMean().encode(values, torch.tensor(indices, dtype=torch.int64), layout)
    decoded = SharedMean().decode(section, len(indices), 0)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, shared_means(values, indices, layout))
    bound = SharedMean().bound_bytes(len(indices), layout)
    assert bound is not None and section.numel() <= bound


def test_shared_mean_bytes():
    layout = Layout([("a", (200,)), ("none", (0,)), ("unused", (3,)), ("b", (2,))])
    indices = torch.tensor([*range(200), 204])
    values = torch.ones(201)
    values[200] = -2.0
    section = SharedMean().encode(values, indices, layout)
    assert bytes(section.tolist()) == b"\xc8\x01" + struct.pack("<f", 1.0) + b"\x01" + struct.pack("<f", -2.0)
    # A count of 201 has two bytes, and three segments have elements.
    assert SharedMean().bound_bytes(201, layout) == 3 * 6
    assert SharedMean().bound_bytes(2, layout) == 2 * 5


def test_shared_mean_is_taken_in_float64_and_clamped():
    for values, mean in (([2.0**30, 1.0, -(2.0**30)], 1 / 3), ([1e308, 1e308, 1e308], 3.4028234663852886e38)):
        wide = torch.tensor(values, dtype=torch.float64)
        decoded = SharedMean().decode(encode(SharedMean(), wide), 3, 0)
        assert decoded.tolist() == [float(np.float32(mean))] * 3
    narrow = torch.tensor([2.0**30, 1.0, -(2.0**30)])
    assert SharedMean().decode(encode(SharedMean(), narrow), 3, 0).tolist() == [float(np.float32(1 / 3))] * 3


def mean_of(count: bytes, mean: float = 1.0) -> bytes:
    return count + struct.pack("<f", mean)


@pytest.mark.parametrize(
    ("section", "count", "text"),
    [
        (b"", 1, "has means for 0 values, expected 1"),
        (mean_of(b"\x02"), 3, "has means for 2 values, expected 3"),
        (mean_of(b"\x02"), 1, "count at byte 0 is 2, expected at least 1 and at most the 1 values that are left"),
        (mean_of(b"\x02") + mean_of(b"\x02"), 3, "count at byte 5 is 2, expected at least 1 and at most the 1 values"),
        (mean_of(b"\x02") + mean_of(b"\x00"), 3, "count at byte 5 is 0, expected at least 1"),
        (mean_of(b"\x02") + b"\x01", 3, "mean at byte 6 is cut off at byte 6"),
        (mean_of(b"\x02")[:-1], 2, "mean at byte 1 is cut off at byte 4"),
        (mean_of(b"\x82\x00"), 2, "count at byte 0 ends in 0x00, expected fewer bytes"),
        (mean_of(b"\x82\x80\x80\x80\x80\x01"), 2, "count at byte 0 does not end within 5 bytes and the section"),
        (b"\x82", 2, "count at byte 0 does not end within 5 bytes and the section"),
        (mean_of(b"\x02", math.nan), 2, "mean at byte 1 is nan, expected a finite number"),
        (mean_of(b"\x02", -math.inf), 2, "mean at byte 1 is -inf, expected a finite number"),
    ],
)
def test_shared_mean_refuses(section: bytes, count: int, text: str):
    with pytest.raises(PayloadError, match=text):
        SharedMean().decode(torch.tensor(list(section), dtype=torch.uint8), count, 0)


def two_bits(values: list[float], group: int) -> list[float]:
    """The naive thing, group by group."""
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
    # By the parameter alone, whatever group the receiver's own codec has.
    decoded = TwoBit().decode(section, count, codec.parameter)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == two_bits(elements, group)
    assert torch.equal(values, before)
    for length in {0, section.numel() - 1, section.numel() + 1} - {section.numel(), -1}:
        with pytest.raises(PayloadError, match=f"has {length} bytes, expected {section.numel()} for {count} values"):
            codec.decode(torch.zeros(length, dtype=torch.uint8), count, group)


def test_two_bit_magnitudes_at_the_edges():
    # The mean of equal magnitudes is, rounded, more than each of them.
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
    with pytest.raises(ValueError, match=r"group must be a whole number from 1 to 255.*got .*Take 64"):
        TwoBit(group)


@pytest.mark.parametrize("shift", range(4))
def test_two_bit_decodes_at_any_alignment(shift: int):
    section = encode(TwoBit(), torch.tensor([1.0, -3.0, 1.0]))
    buffer = torch.cat([torch.zeros(shift, dtype=torch.uint8), section])
    decoded = TwoBit().decode(buffer[shift:], 3, 64)
    buffer.zero_()
    assert decoded.tolist() == [1.0, -3.0, 1.0]
