"""Small whole numbers as digits."""

from typing import Any

import pytest
import torch

from lightning_sparsecomm.codecs import Digits, PayloadError
from lightning_sparsecomm.testing.samples import damaged


@pytest.mark.parametrize(
    ("most", "per_word"), [(1, 10), (2, 6), (3, 5), (4, 5), (8, 3), (127, 2), (128, 1), (32_767, 1)]
)
@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000])
def test_what_is_written_is_read(most: int, per_word: int, count: int) -> None:
    digits = Digits(most)
    assert digits.per_word == per_word
    numbers = torch.randint(-most, most + 1, (count,), generator=torch.Generator().manual_seed(count))
    numbers[:2] = torch.tensor([-most, most])[:count]
    for given in (numbers, numbers.float()):
        data = digits.encode(given)
        assert data.numel() == digits.size_bytes(count) == 2 * -(-count // per_word)
        assert torch.equal(digits.decode(data, count), numbers.to(torch.int16))


def test_bytes_are_as_the_format_says() -> None:
    """1, −1 and 0 are the digits 2, 0 and 1, and padding is 1: 2 + 9 + 27 + … + 19683 = 29522."""
    assert Digits(1).encode(torch.tensor([1, -1, 0])).tolist() == [29522 & 0xFF, 29522 >> 8]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([0], "digits: has 1 bytes, expected 2 for 3 numbers"),
        ([0xFF, 0xFF], "digits: a word is 65535, expected less than 59049"),
        ([0, 0], "digits: the last word has digits that are not 0"),
    ],
)
def test_what_encode_never_writes_is_refused(data: Any, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        Digits(1).decode(torch.tensor(data, dtype=torch.uint8), 3)


@pytest.mark.parametrize("most", [0, -1, 32_768])
def test_no_such_digits(most: int) -> None:
    with pytest.raises(ValueError, match=f"^most must be from 1 to 32767, .*; got {most}. Use fewer ranks"):
        Digits(most)


@pytest.mark.parametrize("most", [1, 2, 8, 200])
def test_damaged_bytes_are_numbers_within_bounds_or_refused(most: int) -> None:
    digits, refused = Digits(most), 0
    for what, altered in damaged(digits.encode(torch.ones(21))):
        try:
            decoded = digits.decode(altered, 21)
        except PayloadError:
            refused += 1
        else:
            assert decoded.shape == (21,)
            assert int(decoded.abs().max()) <= most, what
    assert refused >= 5
