"""Signs with a mean magnitude or two for each tensor or column."""

import struct
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, Vector
from lightning_sparsecomm.codecs import PayloadError, SignMeans
from lightning_sparsecomm.testing.samples import LAYOUTS, vectors

ALL = [SignMeans(scope, means) for scope in ("tensor", "column") for means in (1, 2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("compressor", ALL, ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_what_is_sent_is_never_farther_than_zero(compressor: SignMeans, layout: Layout) -> None:
    """So what error feedback keeps never grows by rounding. That holds for each tensor."""
    context = Round(layout)
    for kind, x in vectors(layout.size).items():
        payload = compressor.encode(Vector(x), context)
        assert payload.numel() == compressor.bound_bytes(context)
        decoded = compressor.decode(payload, layout.size)
        assert bool(decoded.isfinite().all())
        for part, found in zip(layout.flats(x.double()), layout.flats(decoded.double())):
            assert float((part - found).norm()) <= float(part.norm()) * (1 + 1e-6) + 1e-43, kind
            # Zero counts as not negative.
            assert bool(((part < 0) == (found < 0))[found != 0].all())


def test_two_means_lose_nothing_of_two_values() -> None:
    layout = Layout([("weight", (4, 3)), ("bias", (3,))])
    x = torch.tensor([1, 2, -7, 1, -3, -7, -5, 2, 0, 1, 2, 0, -1, -1, 4.0])
    decoded = SignMeans("column", 2).decode(SignMeans("column", 2).encode(Vector(x), Round(layout)), 15)
    assert torch.equal(decoded, x)


def test_bytes_are_as_the_format_says() -> None:
    """Worked out by hand, after docs/formats.md."""
    layout = Layout([("weight", (2, 2)), ("empty", (0, 3)), ("bias", (300,))])
    x = torch.cat([torch.tensor([1.0, -2.0, 3.0, -4.0]), torch.full((300,), -0.5)])
    signs = bytes([0b11111010, *[0xFF] * 37])
    payload = SignMeans("column", 2).encode(Vector(x), Round(layout))
    head = struct.pack("<IIB", 304, 2, 2) + bytes([2, 2, 0xAC, 2, 1])
    assert bytes(payload.tolist()) == head + struct.pack("<6f", 2, 0, 0, 3, 0, 0.5) + signs
    payload = SignMeans("tensor", 1).encode(Vector(x), Round(layout))
    head = struct.pack("<IIB", 304, 2, 1) + bytes([4, 1, 0xAC, 2, 1])
    assert bytes(payload.tolist()) == head + struct.pack("<2f", 2.5, 0.5) + signs


def _bytes(size: int, tensors: int, means: int, table: list[int], values: list[float], signs: list[int]) -> bytes:
    return (
        struct.pack("<IIB", size, tensors, means)
        + bytes(table)
        + struct.pack(f"<{len(values)}f", *values)
        + bytes(signs)
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\4\0\0\0", "signs: ends at byte 4, expected a head of 9 bytes"),
        (_bytes(5, 1, 1, [4, 1], [1], [0]), "size at byte 0 is 5, expected 4"),
        (_bytes(4, 5, 1, [4, 1], [1], [0]), "number of tensors at byte 4 is 5, expected at most the size, 4"),
        (_bytes(4, 1, 3, [4, 1], [1], [0]), "number of means at byte 8 is 3, expected 1 or 2"),
        (_bytes(4, 1, 1, [5, 1], [1], [0]), "shape at byte 9 is 5 × 1, expected from 1 to 4 elements"),
        (_bytes(4, 1, 1, [0, 9], [1], [0]), "shape at byte 9 is 0 × 9, expected from 1 to 4 elements"),
        (_bytes(4, 2, 1, [2, 2, 1, 1], [1, 1], [0]), "shape at byte 11 is 1 × 1, expected from 1 to 0 elements"),
        (_bytes(4, 1, 1, [3, 1], [1], [0]), "elements of all tensors at byte 11 is 3, expected 4"),
        (_bytes(4, 1, 1, [0x84, 0, 1], [1], [0]), "count at byte 9 ends in 0x00"),
        (_bytes(4, 1, 2, [4, 1], [1], [0]), "has 16 bytes, expected 20 for 4 elements with 2 means"),
        (_bytes(4, 1, 1, [4, 1], [-1], [0]), "a mean is not a finite number, or negative"),
        (_bytes(4, 1, 1, [4, 1], [float("nan")], [0]), "a mean is not a finite number, or negative"),
        (_bytes(4, 1, 1, [4, 1], [1], [16]), "signs section: padding in byte 0 is not 0"),
    ],
)
def test_what_encode_never_writes_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        SignMeans().decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scope": "row"}, "scope must be one of tensor, column; got 'row'"),
        ({"means": 3}, "means must be 1 or 2, for each group; got 3. Use 2 where signs are uneven"),
        ({"means": True}, "means must be 1 or 2, for each group; got True"),
    ],
)
def test_no_such_means(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        SignMeans(**options)
