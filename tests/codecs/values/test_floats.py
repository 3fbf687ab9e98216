"""Float32, Float16 and Float64: exact or rounded to nearest, clamped, and strict about received bytes."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import Float16, Float32, Float64, PayloadError, ValueCodec
from tests.codecs.values.sections import LAYOUT, encode

CODECS: list[ValueCodec] = [Float32(), Float16(), Float64()]
NUMPY = {Float32(): np.float32, Float16(): np.float16, Float64(): np.float64}

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite64 = st.floats(allow_nan=False, allow_infinity=False)


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
    # Compares bits: -0.0 differs from 0.0.
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
