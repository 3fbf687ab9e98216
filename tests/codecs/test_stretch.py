"""Stretches: a few neighbouring elements of a long vector."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import Auto, Float32, Golomb, PayloadError, RunLength16, TwoBit, encode_sparse
from lightning_sparsecomm.codecs.stretch import STRETCH_BYTES, decode_stretch, encode_stretch


def _vector(positions: list[int], size: int) -> SparseVector:
    indices = torch.tensor(positions, dtype=torch.int64)
    return SparseVector(indices, torch.randn(len(positions), generator=torch.Generator().manual_seed(1)), size)


@pytest.mark.parametrize("indices", [RunLength16(), Golomb(), Auto()])
@pytest.mark.parametrize("positions", [[], [0], [7], [MAX_SIZE - 1], [5, 6, 7], [MAX_SIZE - 9, MAX_SIZE - 2]])
def test_there_and_back(indices: RunLength16 | Golomb | Auto, positions: list[int]) -> None:
    vector = _vector(positions, MAX_SIZE)
    decoded = decode_stretch(encode_stretch(vector, Float32(), indices), MAX_SIZE)
    assert decoded.indices.tolist() == positions
    assert decoded.values.equal(vector.values)
    assert decoded.size == MAX_SIZE


def test_where_it_lies_costs_nothing() -> None:
    """A sparse body of the whole vector writes the run of zeros before it: in Golomb's code, bit by bit."""
    here, far = (_vector([start, start + 3, start + 200], 10_000_000) for start in (0, 9_000_000))
    lengths = [encode_stretch(each, TwoBit(), Golomb()).numel() for each in (here, far)]
    assert lengths[0] == lengths[1]
    assert STRETCH_BYTES < lengths[0] < encode_sparse(far, Layout([("w", (far.size,))]), TwoBit(), Golomb()).numel() + 8


def _altered(first: int, span: int) -> Tensor:
    body = encode_stretch(_vector([2, 4], 10), Float32(), RunLength16())
    body[:8] = torch.frombuffer(bytearray(struct.pack("<II", first, span)), dtype=torch.uint8)
    return body


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (torch.zeros(7, dtype=torch.uint8), "stretch: ends at byte 7, expected a head of 8 bytes"),
        (torch.zeros(8, dtype=torch.uint8), "sparse body: ends at byte 0, expected a head of 16 bytes"),
        (_altered(8, 3), "stretch: begins at 8 and has 3 elements, expected an end within 10"),
        (_altered(2**32 - 1, 2**32 - 1), "expected an end within 10"),
        (_altered(2, 4), "sparse body: size at byte 4 is 3, expected 4"),
    ],
)
def test_refuses(body: Tensor, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        decode_stretch(body, 10)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_or_valid(data: bytes) -> None:
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        vector = decode_stretch(body, 1_000)
    except PayloadError:
        return
    assert vector.indices.numel() == vector.values.numel()
    assert bool((vector.indices.diff() > 0).all())
    assert not vector.indices.numel() or 0 <= int(vector.indices[0]) <= int(vector.indices[-1]) < 1_000
