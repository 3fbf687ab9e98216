"""Tensors that share memory: to the byte."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis.overlaps import apart_from, overlap, overlapping

TABLE = torch.arange(24.0).view(4, 6)
COMPLEX = torch.zeros(3, dtype=torch.complex64)

VIEWS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: TABLE,
    "transposed": TABLE.t,
    "row": lambda: TABLE[1],
    "flat end": lambda: TABLE.view(-1)[20:],
    "even columns": lambda: TABLE[:, ::2],
    "odd columns": lambda: TABLE[:, 1::2],
    "expanded": lambda: TABLE[2, 3].expand(5, 7),
    "windows": lambda: TABLE.view(-1).unfold(0, 3, 1),
    "bytes": lambda: TABLE.view(torch.uint8)[3, 5:9],
    "none": lambda: TABLE[:0],
    "real": lambda: COMPLEX.real,
    "imaginary": lambda: COMPLEX.imag,
    "complex": lambda: COMPLEX[1:],
    "elsewhere": lambda: torch.zeros(4, 6),
    "meta": lambda: torch.zeros(4, 6, device="meta"),
}


def bytes_of(tensor: Tensor) -> set[int]:
    """The addresses of a tensor's bytes."""
    if tensor.is_meta:
        return set()
    begin, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    places = torch.arange(tensor.untyped_storage().nbytes() // size)
    places = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {begin + size * place + byte for place in places.flatten().tolist() for byte in range(size)}


@pytest.mark.parametrize("first", VIEWS)
def test_two_tensors_overlap_if_they_have_a_byte_in_common(first: str) -> None:
    for second in VIEWS:
        one, other = VIEWS[first](), VIEWS[second]()
        assert overlap(one, other) == bool(bytes_of(one) & bytes_of(other)), second


def test_the_first_two_that_overlap_are_named() -> None:
    apart = {name: VIEWS[name]() for name in ("even columns", "odd columns", "real", "imaginary", "none", "elsewhere")}
    assert overlapping(apart.items()) is None
    assert overlapping([*apart.items(), ("row", TABLE[1])]) in (("even columns", "row"), ("odd columns", "row"))
    assert overlapping([]) is None


def test_those_that_overlap_others_are_left_out() -> None:
    views = {name: make() for name, make in VIEWS.items()}
    left = apart_from(views, [TABLE[:, 1::2], COMPLEX.real])
    assert left.keys() == {"even columns", "none", "imaginary", "elsewhere", "meta", "flat end"} - {"flat end"}
    assert apart_from(views, []).keys() == views.keys()
