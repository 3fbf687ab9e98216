"""Elements rounded at random to multiples of a norm."""

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, Vector
from lightning_sparsecomm.codecs import PayloadError, StochasticLevels
from lightning_sparsecomm.testing.samples import vectors
from tests.codecs.draws import check_unbiased

X = torch.tensor([0.9, -0.3, 0.0, 0.05, -2.0, 0.5, -0.02])


def context_of(size: int, **fields: Any) -> Round:
    return Round(Layout([("weight", (size,))]), **fields)


def sent(compressor: StochasticLevels, x: Tensor, **fields: Any) -> Tensor:
    payload = compressor.encode(Vector(x), context_of(x.numel(), **fields))
    return compressor.decode(payload, x.numel()).dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("levels", [1, 3, 15, 255])
def test_the_mean_of_many_draws_is_the_vector(levels: int, norm: Any, dtype: torch.dtype) -> None:
    check_unbiased(lambda x, context: StochasticLevels(levels, X.numel(), norm), X.to(dtype))


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(("levels", "bucket"), [(1, 1), (1, 512), (4, 7), (255, 100), (5, 2**32 - 1)])
def test_each_element_is_one_of_the_two_multiples_around_it(levels: int, bucket: int, norm: Any) -> None:
    for size in (0, 1, 511, 512, 513, 1500):
        for kind, x in vectors(size).items():
            found = sent(StochasticLevels(levels, bucket, norm), x)
            assert bool(found.isfinite().all())
            if kind.startswith("the "):
                continue
            for part, rounded in zip(x.split(bucket), found.split(bucket)):
                length = part.double().norm() if norm == "l2" else part.double().abs().max() if size else 0
                multiples = rounded.double() / length * levels if size and length > 0 else rounded.double()
                torch.testing.assert_close(multiples, multiples.round(), rtol=0, atol=1e-4)
                if size and length > 0:
                    assert float((part / length * levels - multiples).abs().max()) < 1 + 1e-4


def test_draws_are_new_in_each_step_and_on_each_rank() -> None:
    compressor, x = StochasticLevels(), torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = [sent(compressor, x, **fields) for fields in ({}, {"step": 1}, {"rank": 1}, {"seed": 1})]
    assert all(not torch.equal(found[0], other) for other in found[1:])
    assert torch.equal(found[0], sent(compressor, x))


def test_few_levels_send_few_elements_and_the_bits_of_an_elias_code() -> None:
    """At most s · (s + √n) elements of a bucket are expected (QSGD, lemma 3.1)."""
    x = torch.randn(512 * 100, generator=torch.Generator().manual_seed(2))
    for levels in (1, 2, 4):
        compressor = StochasticLevels(levels)
        payload = compressor.encode(Vector(x), context_of(x.numel()))
        vector = compressor.decode(payload, x.numel())
        count = vector.indices.numel()
        assert 0 < count / 100 < levels * (levels + 512**0.5)
        bits = 0
        places = vector.indices.tolist()
        norms = x.view(100, 512).norm(dim=1)
        for before, place, value in zip([-1, *places], places, vector.values.tolist()):
            level = round(abs(value) / float(norms[place // 512]) * levels)
            bits += 1 + 2 * (place - before).bit_length() - 1 + 2 * level.bit_length() - 1
        # Five sections, each with less than a byte of padding.
        assert 0 <= payload.numel() - (21 + 4 * 100 + bits // 8) < 6


def test_bytes_are_as_the_format_says() -> None:
    """Worked out by hand, after docs/formats.md: norms 2 and 5, levels 2 at 1, 1 at 3 and 2 at 4, of 2."""
    x = torch.tensor([0.0, -2.0, 0.0, 2.5, 5.0])
    compressor = StochasticLevels(2, bucket=3, norm="max")
    payload = compressor.encode(Vector(x), context_of(5))
    head = struct.pack("<IIIIIB", 5, 3, 3, 1, 1, 2) + struct.pack("<2f", 2, 5)
    # Distances 2, 2 and 1: lengths 01 01 1, digits 0 0. Levels 2, 1 and 2: lengths 01 1 01, digits 0 0. Signs: 1 0 0.
    assert bytes(payload.tolist()) == head + bytes([0b11010, 0, 0b10110, 0, 0b001])
    assert compressor.decode(payload, 5).dense().tolist() == x.tolist()


HEAD = struct.pack("<IIIIIB", 5, 3, 3, 1, 1, 2)
REST = struct.pack("<2f", 2, 5) + bytes([0b11010, 0, 0b10110, 0, 0b001])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (HEAD[:9], "levels: ends at byte 9, expected a head of 21 bytes"),
        (struct.pack("<IIIIIB", 6, 3, 3, 1, 1, 2) + REST, "size at byte 0 is 6, expected 5"),
        (struct.pack("<IIIIIB", 5, 6, 3, 1, 1, 2) + REST, "count at byte 4 is 6, expected at most the size, 5"),
        (struct.pack("<IIIIIB", 5, 3, 0, 1, 1, 2) + REST, "bucket at byte 8 is 0, expected at least 1"),
        (struct.pack("<IIIIIB", 5, 3, 3, 1, 1, 0) + REST, "levels at byte 20 is 0, expected at least 1"),
        (HEAD + REST[:7], "norms at byte 21 is 8 bytes long, expected at most the 7 bytes that follow"),
        (struct.pack("<IIIIIB", 5, 3, 3, 2**31, 1, 2) + REST, "lengths of distances at byte 29 is 2147483648 bytes"),
        (HEAD + struct.pack("<2f", 2, -5) + REST[8:], "a norm is not a finite number, or negative"),
        (HEAD + struct.pack("<2f", float("inf"), 5) + REST[8:], "a norm is not a finite number, or negative"),
        (HEAD + REST[:8] + bytes([0b11100, 0b10, *REST[10:]]), "distances reach element 7, expected less than 5"),
        (HEAD + REST[:9] + bytes([0b100, *REST[10:]]), "digits of distances section: padding in byte 0 is not 0"),
        (HEAD + REST[:11] + bytes([0b01, 1]), "a level is 3, expected at most 2"),
        (HEAD + REST[:-1], "signs at byte 33 is 1 bytes long, expected at most the 0 bytes that follow"),
        (HEAD + REST + b"\0", "has 35 bytes, expected 34"),
    ],
)
def test_what_encode_never_writes_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        StochasticLevels().decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), 5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"levels": 0}, "levels must be a whole number, at least 1: multiples of the norm above zero; got 0. Use 15"),
        ({"levels": 256}, "levels must be at most 255, as they travel in one byte; got 256. Use 15"),
        ({"bucket": 0}, "bucket must be a whole number, at least 1: elements that share a norm; got 0. Use 512"),
        (
            {"bucket": 2**32},
            "bucket must be at most 4,294,967,295, as it travels in 4 bytes; got 4,294,967,296. Use 512",
        ),
        ({"norm": "l1"}, "norm must be one of l2, max; got 'l1'"),
    ],
)
def test_no_such_levels(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        StochasticLevels(**options)
