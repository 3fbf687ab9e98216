"""Multiples: whole multiples of a step, their bytes, and what it refuses."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import Multiples, PayloadError
from tests.codecs.values.sections import LAYOUT, encode


def multiples(values: list[float], step: float, once: bool) -> list[float]:
    """The naive quantizer."""
    step = float(np.float32(step))
    return [
        math.copysign(float(np.float32(step * (1 if once else min(2**24 - 1, max(1, abs(v) // step))))), v)
        for v in values
    ]


@given(
    st.lists(st.floats(-1e3, 1e3, width=32).filter(bool), max_size=40),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.5, 0.1, 3.0, 1e-6]),
    st.booleans(),
)
def test_multiples(elements: list[float], dtype: torch.dtype, step: float, once: bool) -> None:
    codec, count = Multiples(step, once), len(elements)
    values = torch.tensor(elements, dtype=dtype)
    before = values.clone()
    section = encode(codec, values)
    # Decoding does not depend on the receiver's own step.
    decoded = Multiples().decode(section, count, 0)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == multiples(elements, step, once)
    assert torch.equal(values, before)
    bound = codec.bound_bytes(count, LAYOUT)
    assert section.numel() == bound if once or not count else bound is None
    reaching = values[values.abs() >= float(np.float32(step))].double()
    if not once:
        # What is left is below the step, up to the largest multiple.
        left = reaching - Multiples().decode(encode(codec, reaching), reaching.numel(), 0).double()
        small = reaching.abs() < step * 2**23
        assert bool((left[small].abs() <= step * 1.001 + reaching[small].abs() * 2**-24).all())


def test_bytes_are_as_the_format_says() -> None:
    """Worked out by hand, after docs/formats.md."""
    # Of 1, 2, 5 and 1: the digits after the first are none, 0, 01 and none, lowest first; lengths in unary 1 01 001 1.
    data = encode(Multiples(0.5), torch.tensor([0.5, -1.2, 2.5, -0.9]))
    assert bytes(data.tolist()) == struct.pack("<fI", 0.5, 1) + bytes([0b1100101, 0b010, 0b1010])
    # All are 1, and take a sign.
    data = encode(Multiples(0.5), torch.tensor([0.5, -0.9, -0.7]))
    assert bytes(data.tolist()) == struct.pack("<fI", 0.5, 0) + bytes([0b110])
    assert bytes(encode(Multiples(0.5), torch.tensor([])).tolist()) == struct.pack("<fI", 0.5, 0)


def test_multiples_stay_finite() -> None:
    values = torch.tensor([3.4e38, -1e300], dtype=torch.float64)
    decoded = Multiples().decode(encode(Multiples(1e38), values), 2, 0)
    assert decoded.tolist() == pytest.approx([3e38, -3e38])
    assert Multiples().decode(encode(Multiples(1e-3), values), 2, 0).abs().max() == np.float32(1e-3) * (2**24 - 1)


def _section(step: float, length: int, *rest: int) -> bytes:
    return struct.pack("<fI", step, length) + bytes(rest)


@pytest.mark.parametrize(
    ("data", "count", "text"),
    [
        (b"", 0, "has 0 bytes, expected at least 8 for 0 values"),
        (_section(0.5, 0), 1, "has 8 bytes, expected at least 9 for 1 values"),
        (_section(0.0, 0, 0), 1, "step at byte 0 is 0.0, expected a positive, finite number"),
        (_section(-1.0, 0, 0), 1, "step at byte 0 is -1.0"),
        (_section(math.nan, 0, 0), 1, "step at byte 0 is nan"),
        (_section(math.inf, 0, 0), 1, "step at byte 0 is inf"),
        (_section(0.5, 0, 0, 0), 1, "has 10 bytes, expected 9 for 1 values"),
        (_section(0.5, 2, 1, 0), 1, "length at byte 4 is 2, expected at most 1"),
        (_section(0.5, 1, 1, 0), 1, "all multiples are 1, expected none to be written then"),
        (_section(0.5, 1, 2, 0), 1, "has 0 bytes of digits, expected 1"),
        (_section(0.5, 1, 2, 2, 0), 1, "padding in byte 0 is not 0"),
        (_section(0.5, 1, 2, 1, 2), 1, "signs section: padding in byte 0 is not 0"),
        (_section(0.5, 4, 0, 0, 0, 1, 0, 0, 0, 0), 1, "a number has 25 digits, expected at most 24"),
        (_section(3e38, 1, 2, 1, 0), 1, "a multiple of .* is not finite"),
    ],
)
def test_what_encode_never_writes_is_refused(data: bytes, count: int, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        Multiples().decode(torch.tensor(list(data), dtype=torch.uint8), count, 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"step": 0}, ValueError, "step must be positive and finite"),
        ({"step": 1e-60}, ValueError, "step must be within float32's range, in which it is sent; got 1e-60"),
        ({"step": 1e60}, ValueError, "step must be within float32's range"),
        ({"once": "yes"}, TypeError, "once must be True or False"),
    ],
)
def test_refuses(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        Multiples(**options)
