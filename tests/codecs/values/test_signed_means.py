"""SignedMeans: signs, with each tensor's mean magnitude or two, and what it refuses."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs import PayloadError, SignedMeans


def signed_means(values: list[float], indices: list[int], layout: Layout, means: int) -> list[float]:
    """The naive codec: each tensor's values become their mean magnitude, or that of their side."""
    decoded = list(values)
    for segment in layout.segments:
        group = [i for i, index in enumerate(indices) if segment.offset <= index < segment.offset + segment.size]
        sides = [group] if means == 1 else [[i for i in group if (values[i] < 0) == side] for side in (False, True)]
        for side in sides:
            mean = float(np.float32(sum(abs(values[i]) for i in side) / max(1, len(side))))
            for i in side:
                decoded[i] = -mean if values[i] < 0 else mean
    return decoded


@given(
    st.lists(st.integers(0, 200), max_size=5),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2]),
    st.data(),
)
def test_signed_means(sizes: list[int], dtype: torch.dtype, means: Any, data: st.DataObject) -> None:
    layout, codec = Layout((str(i), (size,)) for i, size in enumerate(sizes)), SignedMeans(means)
    chosen = data.draw(st.sets(st.integers(0, layout.size - 1), max_size=30)) if layout.size else set()
    indices = sorted(chosen) if data.draw(st.booleans()) else list(range(layout.size))
    # Sums of integers are exact in any order.
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randint(-(2**20), 2**20, (len(indices),), generator=generator).to(dtype)
    before = values.clone()
    section = codec.encode(values, torch.tensor(indices, dtype=torch.int64), layout)
    decoded = SignedMeans().decode(section, len(indices), codec.parameter)
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == signed_means(values.tolist(), indices, layout, means)
    bound = codec.bound_bytes(len(indices), layout)
    assert bound is not None and section.numel() <= bound
    assert torch.equal(values, before)
    # Error feedback converges, as no tensor is left with more than it had.
    counts = layout.counts(torch.tensor(indices, dtype=torch.int64))
    for part, found in zip(values.double().split(counts), decoded.double().split(counts)):
        assert float((part - found).norm()) <= float(part.norm()) * (1 + 1e-6)


def test_one_mean_of_equal_magnitudes_is_that_magnitude() -> None:
    """AdaComp's scale is sent as it is."""
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64):
        for magnitude in torch.rand(50, generator=generator, dtype=torch.float32).tolist():
            values = torch.full((1001,), magnitude, dtype=dtype).copysign_(torch.randn(1001, generator=generator))
            section = SignedMeans(1).encode(values, torch.arange(1001), Layout([("weight", (1001,))]))
            assert SignedMeans(1).decode(section, 1001, 1).tolist() == values.tolist()


def test_bytes_are_as_the_format_says() -> None:
    """Worked out by hand, after docs/formats.md."""
    layout = Layout([("a", (200,)), ("none", (0,)), ("unused", (3,)), ("b", (4,))])
    indices = torch.tensor([*range(200), 204, 205])
    values = torch.ones(202)
    values[:2], values[200:] = -3.0, torch.tensor([-2.0, 0.0])
    signs = bytes([0b11, *[0] * 24, 0b01])
    section = SignedMeans(2).encode(values, indices, layout)
    table = b"\xc8\x01" + struct.pack("<2f", 1.0, 3.0) + b"\x02" + struct.pack("<2f", 0.0, 2.0)
    assert bytes(section.tolist()) == table + signs
    section = SignedMeans(1).encode(values, indices, layout)
    table = b"\xc8\x01" + struct.pack("<f", np.float32(204 / 200)) + b"\x02" + struct.pack("<f", 1.0)
    assert bytes(section.tolist()) == table + signs
    assert SignedMeans(1).encode(values[:0], indices[:0], layout).numel() == 0
    # A count of 202 has two bytes, and three segments have elements.
    assert SignedMeans(2).bound_bytes(202, layout) == 3 * 10 + 26
    assert SignedMeans(1).bound_bytes(2, layout) == 2 * 5 + 1


def test_means_are_limited() -> None:
    values = torch.tensor([1e308, -1e308, 1.0], dtype=torch.float64)
    decoded = SignedMeans().decode(SignedMeans().encode(values, torch.arange(3), Layout([("x", (3,))])), 3, 2)
    largest = torch.finfo(torch.float32).max
    assert decoded.tolist() == [np.float32(largest / 2), -largest, np.float32(largest / 2)]


def _section(table: bytes, *means: float, signs: bytes = b"\0") -> bytes:
    return table + struct.pack(f"<{len(means)}f", *means) + signs


@pytest.mark.parametrize(
    ("data", "count", "parameter", "text"),
    [
        (b"", 1, 1, "has 0 bytes, expected at least 1 for 1 values"),
        (b"\0", 1, 1, "has means for 0 values, expected 1"),
        (_section(b"\2", 1.0), 3, 1, "has means for 2 values, expected 3"),
        (_section(b"\2", 1.0), 1, 1, "count at byte 0 is 2, expected 1 to the 1 values that are left"),
        (_section(b"\0", 1.0), 1, 1, "count at byte 0 is 0, expected 1 to the 1 values that are left"),
        (_section(b"\2", 1.0), 2, 2, "means at byte 1 are cut off at byte 5, expected 8 bytes"),
        (_section(b"\x82\0", 1.0), 2, 1, "count at byte 0 ends in 0x00"),
        (_section(b"\2", math.nan), 2, 1, "mean at byte 1 is nan, expected a finite number, not negative"),
        (_section(b"\2", math.inf), 2, 1, "mean at byte 1 is inf"),
        (_section(b"\2", -1.0), 2, 1, "mean at byte 1 is -1.0"),
        (_section(b"\2", -0.0), 2, 1, "mean at byte 1 is -0.0"),
        (_section(b"\2", 1.0, -1.0), 2, 2, "mean at byte 1 is -1.0"),
        (_section(b"\2", 1.0, signs=b"\4"), 2, 1, "signs section: padding in byte 0 is not 0"),
        (_section(b"\2", 1.0), 2, 0, "value codec parameter at byte 3 is 0, expected 1 to 2 for SignedMeans"),
        (_section(b"\2", 1.0), 2, 3, "value codec parameter at byte 3 is 3"),
    ],
)
def test_what_encode_never_writes_is_refused(data: bytes, count: int, parameter: int, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        SignedMeans().decode(torch.tensor(list(data), dtype=torch.uint8), count, parameter)


@pytest.mark.parametrize("means", [0, 3, True, 1.0])
def test_refuses(means: Any) -> None:
    with pytest.raises(ValueError, match=r"means must be 1 or 2, for each tensor; got .* Use 2 where signs are uneven"):
        SignedMeans(means)
