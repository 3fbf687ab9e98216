"""Numbers in Elias' gamma code."""

from unittest import mock

import pytest
import torch

from lightning_sparsecomm.codecs import PayloadError
from lightning_sparsecomm.codecs.bits import packed, unpacked
from lightning_sparsecomm.codecs.elias import read_digits, read_lengths, write_elias
from lightning_sparsecomm.kernels import PositionKernels
from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels

NUMBERS = {
    "none": [],
    "one": [1],
    "ones": [1] * 17,
    "small ones": list(range(1, 100)),
    "powers of two, and those around": [n for k in range(1, 33) for n in (2**k - 1, 2**k)],
    "the largest": [2**32],
}


@pytest.mark.parametrize("kernels", [CpuPositionKernels(), PositionKernels()], ids=["cpu", "reference"])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_written_is_read(name: str, kernels: PositionKernels) -> None:
    numbers = torch.tensor(NUMBERS[name], dtype=torch.int64)
    with mock.patch("lightning_sparsecomm.codecs.elias.position_kernels_for", return_value=kernels):
        unary, digits = write_elias(numbers)
        lengths = read_lengths(unary, len(numbers), 32, "lengths")
    assert lengths.tolist() == [number.bit_length() - 1 for number in NUMBERS[name]]
    total = sum(lengths.tolist())
    assert (unary.numel(), digits.numel()) == ((total + len(numbers) + 7) // 8, (total + 7) // 8)
    assert torch.equal(read_digits(unpacked(digits, total, "digits"), lengths), numbers)


def test_bytes_are_as_the_format_says() -> None:
    """1, 2, 3 and 6: lengths 0, 1, 1 and 2; digits 0, then 1, then 0 and 1."""
    unary, digits = write_elias(torch.tensor([1, 2, 3, 6]))
    assert unary.tolist() == [0b10010101]
    assert digits.tolist() == [0b1010]


@pytest.mark.parametrize(
    ("data", "count", "most", "text"),
    [
        ([0b101], 1, 5, "lengths section: has 2 numbers, which end at bit 3 of 1 bytes, expected 1"),
        ([0b101], 3, 5, "lengths section: has 2 numbers"),
        ([0b101, 0], 2, 5, "lengths section: has 2 numbers, which end at bit 3 of 2 bytes, expected 2"),
        ([], 1, 5, "lengths section: has 0 numbers"),
        ([0b1000], 1, 2, "lengths section: a number has 4 digits, expected at most 3"),
    ],
)
def test_refuses_other_lengths(data: list[int], count: int, most: int, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        read_lengths(torch.tensor(data, dtype=torch.uint8), count, most, "lengths")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_bits(count: int) -> None:
    flags = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    section = packed(flags)
    assert section.numel() == (count + 7) // 8
    assert [int(section[i // 8]) >> i % 8 & 1 for i in range(count)] == flags.tolist()
    assert torch.equal(unpacked(section, count, "bits"), flags)


def test_refuses_bits_after_the_last() -> None:
    with pytest.raises(PayloadError, match="signs section: padding in byte 0 is not 0, expected zeros"):
        unpacked(torch.tensor([0b100], dtype=torch.uint8), 2, "signs")
