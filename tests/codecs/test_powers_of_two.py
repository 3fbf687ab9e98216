"""Elements rounded at random to powers of two."""

import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector
from lightning_sparsecomm.codecs import PayloadError, PowersOfTwo
from lightning_sparsecomm.testing.samples import vectors
from tests.codecs.draws import check_unbiased


def sent(x: Tensor, **fields: Any) -> Tensor:
    context = Round(Layout([("weight", (x.numel(),))]), **fields)
    return PowersOfTwo().decode(PowersOfTwo().encode(Vector(x), context), x.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_many_draws_is_the_vector(dtype: torch.dtype) -> None:
    x = torch.tensor([0.9, -0.3, 0.0, 1.0, -1.999, 3e-5, 1e20, -1e-39, 2.0**-126], dtype=dtype)
    check_unbiased(lambda _, context: PowersOfTwo(), x)


def test_each_element_is_one_of_the_two_powers_around_it() -> None:
    for size in (0, 1, 7, 8, 9, 1000):
        for kind, x in vectors(size).items():
            found = sent(x).tolist()
            for value, rounded in zip(x.tolist(), found):
                if kind == "the largest numbers":
                    assert rounded == math.copysign(2.0**127, value)
                elif abs(value) < 2.0**-126:
                    assert abs(rounded) in (0, 2.0**-126)
                else:
                    below = math.copysign(2.0 ** math.floor(math.log2(abs(value))), value)
                    assert rounded in (below, 2 * below) if value != below else rounded == value


def test_rounding_adds_an_eighth_of_the_sum_of_squares_at_most() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    assert float((sent(x) - x).square().sum() / x.square().sum()) < 1 / 8


def test_draws_are_new_in_each_step_and_on_each_rank() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = [sent(x, **fields) for fields in ({}, {"step": 1}, {"rank": 1}, {"seed": 1})]
    assert all(not torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0], sent(x))


def test_bytes_are_as_the_format_says() -> None:
    """Powers of two are not rounded."""
    x = torch.tensor([1.0, -0.5, 0.0, 2.0**127])
    payload = PowersOfTwo().encode(Vector(x), Round(Layout([("weight", (4,))])))
    assert bytes(payload.tolist()) == struct.pack("<I", 4) + bytes([127, 126, 0, 254, 0b0010])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([4, 0, 0, 0, 1, 2, 3, 4], "powers of two: has 8 bytes, expected 9 for 4 elements"),
        ([5, 0, 0, 0, 1, 2, 3, 4, 0], "powers of two: size at byte 0 is 5, expected 4"),
        ([4, 0, 0, 0, 1, 2, 255, 4, 0], "powers of two: an exponent is 255, expected at most 254"),
        ([4, 0, 0, 0, 1, 2, 3, 4, 16], "signs section: padding in byte 0 is not 0"),
    ],
)
def test_what_encode_never_writes_is_refused(data: list[int], text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        PowersOfTwo().decode(torch.tensor(data, dtype=torch.uint8), 4)
