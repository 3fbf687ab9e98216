"""Altered payloads of quantizers: each raises a PayloadError or decodes to a sound vector, in bounded memory."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector
from lightning_sparsecomm.codecs import Compressor, PayloadError, PowersOfTwo, SignMeans, StochasticLevels
from lightning_sparsecomm.kernels import PositionKernels
from lightning_sparsecomm.testing.samples import vectors
from tests.codecs.test_fuzz import KERNELS, Allocations, altered, check_sound, interesting, tensor_of

COMPRESSORS: list[Compressor] = [
    StochasticLevels(),
    StochasticLevels(1, 7, "max"),
    PowersOfTwo(),
    SignMeans(),
    SignMeans("column", 2),
]
LAYOUTS = [
    Layout([("scale", ())]),
    Layout([("weight", (2, 3)), ("empty", (0,)), ("bias", (2,)), ("scale", ())]),
    Layout([(f"p{i}", (i,)) for i in range(20)]),
    Layout([("weight", (300, 20)), ("bias", (3,))]),
]
HEADS = {StochasticLevels: "<IIIIIB", PowersOfTwo: "<I", SignMeans: "<IIB"}


def forged(data: bytes, compressor: Compressor, size: int, chance: random.Random) -> bytes:
    """`data` with another number in one field of its head."""
    form = HEADS[type(compressor)]
    fields = list(struct.unpack_from(form, data))
    at = chance.randrange(len(fields))
    fields[at] = interesting(size, chance) & (0xFF if form[1 + at] == "B" else 2**32 - 1)
    return struct.pack(form, *fields) + data[struct.calcsize(form) :]


@contextmanager
def kernels_in_use(kernels: PositionKernels) -> Iterator[None]:
    names = [f"lightning_sparsecomm.codecs.{module}.position_kernels_for" for module in ("bits", "elias")]
    with mock.patch(names[0], return_value=kernels), mock.patch(names[1], return_value=kernels):
        yield


def in_full(vector: SparseVector | Tensor) -> list[Tensor]:
    return [vector.indices, vector.values] if isinstance(vector, SparseVector) else [vector]


def examine(compressor: Compressor, data: bytes, layout: Layout) -> bool:
    """Whether `data` is taken, by all kernels alike; what is decoded must be sound, and memory bounded."""
    outcomes = []
    for kernels in KERNELS:
        with kernels_in_use(kernels), Allocations() as allocations:
            try:
                outcomes.append(compressor.decode(tensor_of(data), layout.size))
            except PayloadError as error:
                outcomes.append(str(error))
        assert allocations.allocated_bytes <= 1024 * (len(data) + layout.size) + 65_536
    decoded, other = outcomes
    if isinstance(decoded, str):
        assert decoded == other
        return False
    assert [each.tolist() for each in in_full(decoded)] == [each.tolist() for each in in_full(other)]
    if isinstance(decoded, SparseVector):
        check_sound(decoded.indices, decoded.values, layout)
    else:
        assert decoded.shape == (layout.size,)
        assert bool(decoded.isfinite().all())
    return True


@settings(max_examples=20)
@given(st.sampled_from(COMPRESSORS), st.sampled_from(LAYOUTS), st.integers(0, 2**32 - 1))
def test_altered_payloads_are_refused_or_sound(compressor: Compressor, layout: Layout, seed: int) -> None:
    chance = random.Random(seed)
    bodies = [bytes(compressor.encode(Vector(x), Round(layout)).tolist()) for x in vectors(layout.size).values()]
    for _ in range(40):
        data = chance.choice(bodies)
        data = forged(data, compressor, layout.size, chance) if chance.random() < 0.3 else data
        for _ in range(chance.choice([0, 1, 1, 2])):
            data = altered(data, bodies, layout.size, chance)
        try:
            examine(compressor, data, layout)
        except BaseException:
            note(f"{compressor} for {layout}: {data[:1000].hex()}")
            raise


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_unaltered_payloads_are_taken(compressor: Compressor) -> None:
    for layout in LAYOUTS:
        for x in vectors(layout.size).values():
            assert examine(compressor, bytes(compressor.encode(Vector(x), Round(layout)).tolist()), layout)


@pytest.mark.parametrize(
    ("compressor", "data"),
    [
        (StochasticLevels(), struct.pack("<IIIIIBf", 2**32 - 1, 2**32 - 1, 2**32 - 1, 0, 0, 1, 1)),
        (StochasticLevels(), struct.pack("<IIIIIBf", 2**32 - 1, 0, 1, 0, 0, 1, 1)),
        (PowersOfTwo(), struct.pack("<I", 2**32 - 1)),
        (SignMeans(), struct.pack("<IIB", 2**32 - 1, 2**32 - 1, 1)),
        (SignMeans(), struct.pack("<IIB", 2**32 - 1, 1, 2) + bytes([1, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F])),
        (SignMeans(), struct.pack("<IIB", 2**32 - 1, 1, 1) + bytes([0xFF, 0xFF, 0xFF, 0xFF, 0x0F, 1, 0, 0, 0, 0])),
    ],
)
def test_a_few_bytes_do_not_stand_for_the_longest_vector(compressor: Compressor, data: bytes) -> None:
    with Allocations() as allocations, pytest.raises(PayloadError):
        compressor.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), 2**32 - 1)
    assert allocations.allocated_bytes < 10_000
