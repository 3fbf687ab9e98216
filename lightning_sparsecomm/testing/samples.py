"""What the laws are checked on: layouts, vectors, selections of elements, and damaged bytes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout

LAYOUT = Layout([("table", (40, 6)), ("kernel", (4, 3, 2, 2)), ("empty", (0, 3)), ("scale", ()), ("bias", (5,))])
LAYOUTS = (
    LAYOUT,
    Layout([("scale", ())]),
    Layout([("empty", (0, 3))]),
    Layout([]),
    Layout([(f"layer {i}", (i,)) for i in range(20)]),
)
"""Tensors of several dimensions, one element, no elements, and no tensors at all."""


def vectors(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Vectors of `size` elements, each `[size]` and finite, by what is special about them."""
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(size, generator=generator, dtype=dtype)
    places = torch.arange(size)
    numbers = torch.finfo(dtype)
    return {
        "random numbers": normal,
        "zeros": torch.zeros_like(normal),
        "ties": torch.full_like(normal, 0.25).copysign_(normal),
        "one value that is not zero": torch.zeros_like(normal).masked_fill_(places == size // 2, -3.0),
        "mostly zeros": normal.masked_fill(places % 7 != 3, 0.0),
        "one sign": normal.abs() + 1,
        "the largest numbers": torch.full_like(normal, numbers.max).copysign_(normal),
        "the smallest numbers": normal * numbers.smallest_normal * 4 * numbers.eps,
    }


def selections(size: int) -> dict[str, Tensor]:
    """Sorted positions in a vector of `size` elements, each `[k]` int64, by how many they are."""
    places = torch.arange(size)
    generator = torch.Generator().manual_seed(size)
    some = torch.rand(size, generator=generator)
    return {
        "no element": places[:0],
        "all elements": places,
        "the first element": places[:1],
        "the last element": places[-1:],
        "all but the last element": places[:-1],
        "every third element": places[::3].clone(),
        "a few elements": places[some < 0.05],
        "half of the elements": places[some < 0.5],
        "runs of neighbours": places[places % 11 < 4],
    }


def damaged(data: Tensor, most: int = 32) -> Iterator[tuple[str, Tensor]]:
    """Copies of some bytes, each altered, cut off or lengthened, with what was done to them.

    Args:
        data: `[bytes]` uint8.
        most: How many of the bytes are altered; the first and the last are among them.
    """
    size = data.numel()
    places = sorted({*range(min(size, most // 2)), *range(max(0, size - most // 2), size)})
    for place in places:
        for mask in (0x01, 0x80):
            altered = data.clone()
            altered[place] ^= mask
            yield f"byte {place} altered by 0x{mask:02x}", altered
    for length in sorted({0, 1, size // 2, size - 1} & set(range(size))):
        yield f"cut off after byte {length}", data[:length].clone()
    for value in (0x00, 0xFF):
        yield f"0x{value:02x} appended", torch.cat([data, data.new_tensor([value])])
