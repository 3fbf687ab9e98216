"""SharedMean: each segment's mean, its bytes, and what it refuses."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs import PayloadError, SharedMean
from tests.codecs.values.sections import encode


def shared_means(values: torch.Tensor, indices: list[int], layout: Layout) -> torch.Tensor:
    """The naive codec: each segment's values become their mean."""
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
