"""AdaptiveBins: which elements each bin sends, their magnitude, and that it never makes things worse."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, Vector
from lightning_sparsecomm.codecs import AdaptiveBins, SignedMeans, decode_sparse
from lightning_sparsecomm.testing.samples import LAYOUTS, vectors
from tests.reference.selectors import adacomp

ALL = [AdaptiveBins(20, 7), AdaptiveBins(20, 7, all_bins=False), AdaptiveBins()]


def encoded(compressor: AdaptiveBins, x: torch.Tensor, entering: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    decoded = compressor.decode(compressor.encode(Vector(x, entering=entering), Round(layout)), layout.size)
    assert bool((decoded.values != 0).all()) or not x.any()
    return decoded.dense()


@pytest.mark.parametrize("compressor", ALL, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_sends_what_the_reference_sends(compressor: AdaptiveBins, layout: Layout) -> None:
    """Tensors of any shape, with bins that are not full, and what has entered of either sign."""
    shapes = [segment.shape for segment in layout.segments if segment.size]
    sizes = compressor.convolution_bin_size, compressor.bin_size
    generator = torch.Generator().manual_seed(3)
    x, entering = torch.randn(2, layout.size, generator=generator, dtype=torch.float64)
    x[4::7] = 0
    for added in (entering, None):
        known = (x if added is None else added).numpy()
        expected = adacomp(x.numpy(), known, shapes, sizes, compressor.all_bins)
        np.testing.assert_allclose(encoded(compressor, x, added, layout).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_what_is_sent_is_never_farther_than_zero(layout: Layout) -> None:
    """So the residual never grows by it, element by element; the paper's form does not promise that."""
    for kind, x in vectors(layout.size).items():
        sent = encoded(AdaptiveBins(20, 7, all_bins=False), x, x.flip(0), layout)
        assert bool(sent.isfinite().all())
        assert bool(((x.double() - sent.double()).abs() <= x.double().abs() * (1 + 1e-5) + 1e-44).all()), kind


def test_of_small_bins_beside_a_large_one_the_paper_makes_large_ones() -> None:
    x = torch.tensor([8.0, 0.0, 0.001, 0.0])
    layout = Layout([("weight", (2, 2))])
    assert encoded(AdaptiveBins(2, all_bins=False), x, None, layout).tolist() == [pytest.approx(4.0005), 0, 0, 0]
    assert encoded(AdaptiveBins(2), x, None, layout).tolist() == [
        pytest.approx(4.0005),
        0,
        pytest.approx(4.0005),
        0,
    ]


def test_positions_take_the_shortest_code_and_values_a_bit() -> None:
    layout = Layout([("weight", (100, 500)), ("kernel", (8, 8, 3, 3))])
    x = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    payload = AdaptiveBins().encode(Vector(x), Round(layout))
    sent = decode_sparse(payload, layout.size)
    counts = layout.counts(sent.indices)
    values = sum(4 + math.ceil((count.bit_length()) / 7) for count in counts) + math.ceil(sum(counts) / 8)
    assert payload[1] == SignedMeans.code and payload[3] == 1
    assert payload.numel() == 16 + int(payload[12:16].view(torch.int32)) + values
    # Within the entropy of positions, and a bit.
    p = sum(counts) / layout.size
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    assert 8 * int(payload[12:16].view(torch.int32)) < 1.02 * entropy * sum(counts)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bin_size": 0}, ValueError, "bin_size must be a whole number, at least 1: elements in a bin; got 0. Use 500"),
        ({"convolution_bin_size": 1.5}, ValueError, "convolution_bin_size must be a whole number"),
        ({"all_bins": 1}, TypeError, "all_bins must be True or False"),
    ],
)
def test_refuses(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        AdaptiveBins(**options)
