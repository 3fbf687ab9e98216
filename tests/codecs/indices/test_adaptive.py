"""AdaptiveGolomb: its bytes, how short it is, and what it refuses."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import AdaptiveGolomb, Golomb, PayloadError
from tests.codecs.indices.test_bits import bits_of


def random_positions(densities: list[float], each: int) -> tuple[Tensor, int]:
    """Positions in stretches of `each` elements, which are selected at random with these densities."""
    generator = torch.Generator().manual_seed(5)
    chances = torch.tensor(densities).repeat_interleave(each)
    return (torch.rand(chances.numel(), generator=generator) < chances).nonzero().view(-1), chances.numel()


def bits_a_position(codec: AdaptiveGolomb | Golomb, indices: Tensor, size: int) -> float:
    return 8 * codec.encode(indices, size).numel() / indices.numel()


def test_bytes():
    # The example of docs/formats.md: code 4. Changes, code, prefixes, suffixes, thirds.
    section = AdaptiveGolomb().encode(torch.tensor([0, 3, 12, 30]), 40)
    assert section.tolist() == bits_of("1 001000  1 1 01 001  00 01 01 11  0 0 1").tolist()
    assert AdaptiveGolomb().decode(section, 4, 40, 0).tolist() == [0, 3, 12, 30]
    # Neighbours have code 0, which no block needs to name, and two blocks take 66 bits.
    assert AdaptiveGolomb().encode(torch.arange(64), 65).tolist() == bits_of("0" + "1" * 64).tolist()
    assert AdaptiveGolomb().encode(torch.arange(65), 66).tolist() == bits_of("00" + "1" * 65).tolist()


def test_any_code_is_decoded():
    # Code 1, with divisor 3, and code 2: prefix and suffix of runs 7 and 3.
    assert AdaptiveGolomb().decode(bits_of("1 100000  001 1  1 0  0"), 2, 9, 0).tolist() == [7, 8]
    assert AdaptiveGolomb().decode(bits_of("1 010000  001  00"), 1, 9, 0).tolist() == [3]
    # Code 63 has 21 bits, and code 62 at least 20: two positions near the end of the largest vector.
    far = bits_of("1 111111" + "0" * 2047 + "1" + "01" + "1" * 19)
    assert AdaptiveGolomb().decode(far, 1, MAX_SIZE, 0).tolist() == [2**32 - 2]
    assert AdaptiveGolomb().encode(torch.tensor([MAX_SIZE - 1]), MAX_SIZE).numel() == 7


@pytest.mark.parametrize(("density", "most"), [(0.21, 1.02), (1 / 64, 1.012), (0.001, 1.007)])
def test_random_positions_take_little_more_than_their_entropy(density: float, most: float):
    indices, size = random_positions([density], round(50_000 / density))
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    taken = bits_a_position(AdaptiveGolomb(), indices, size)
    assert 0.99 * entropy < taken < most * entropy
    # At most a hundredth longer than one code for all.
    assert taken < 1.01 * bits_a_position(Golomb(), indices, size)


def test_clusters_are_shorter():
    indices, size = random_positions([0.9, 0.05, 0.3, 0.01] * 20, 5000)
    entropies = {p: -math.log2(p) - (1 - p) / p * math.log2(1 - p) for p in (0.9, 0.05, 0.3, 0.01)}
    each = sum(p * bits for p, bits in entropies.items()) / sum(entropies)
    adaptive, golomb = (bits_a_position(codec, indices, size) for codec in (AdaptiveGolomb(), Golomb()))
    assert golomb > 2 * each
    # Most positions are in the densest stretches, and none takes less than a bit.
    assert adaptive < 1.4 * each


def test_few_long_runs_are_cheap():
    # One run in eight is 200 long: Exp-Golomb codes.
    indices = torch.tensor([1, 1, 1, 1, 1, 1, 1, 201] * 100).cumsum(0) - 1
    adaptive, golomb = (bits_a_position(codec, indices, 20_801) for codec in (AdaptiveGolomb(), Golomb()))
    assert adaptive < 3 < 6 < golomb


@pytest.mark.parametrize(
    ("bits", "count", "size", "parameter", "text"),
    [
        ("0 1", 1, 40, 1, "index codec parameter at byte 2 is 1, expected 0 for AdaptiveGolomb"),
        ("0 1111111", 8, 40, 0, "has 1 bytes, expected at least 2 for 8 positions"),
        ("0" * 8, 500, 900, 0, "has 1 bytes, expected at least 64 for 500 positions"),
        # The second block names the first one's code, and the first one the code that all begin with.
        ("11 110000 110000" + "1" * 66, 65, 900, 0, "block 1 names the code of the block before, expected another"),
        ("1 000000 1", 1, 40, 0, "block 0 names the code of the block before, expected another"),
        # Cut off: the code, a prefix, a suffix and a third.
        ("1 1111111", 1, 40, 0, "position 0 is cut off or too large, expected less than 40 within 8 bits"),
        ("0 1100000", 3, 40, 0, "position 2 is cut off or too large"),
        ("1 110000 1", 1, 40, 0, "position 0 is cut off or too large"),
        ("1 001000 1 1 01 001 00 01 01 11 0 0", 4, 40, 0, "position 3 is cut off or too large, expected less than 40"),
        # A position equal to the size, and one far beyond.
        ("0 1001", 2, 3, 0, "position 1 is cut off or too large, expected less than 3"),
        ("1 111111" + "0" * 4000 + "1" + "1" * 21, 1, MAX_SIZE, 0, "position 0 is cut off or too large"),
        # A prefix of 33 zeros would stand for 2^33 zeros.
        ("1 010000" + "0" * 33 + "1" + "0" * 33, 1, MAX_SIZE, 0, "position 0 is cut off or too large"),
        ("0 1 000000 0", 1, 40, 0, "has 2 bytes, expected 1 for its 2 bits of 1 positions"),
        ("0 1 001", 1, 40, 0, "padding at bit 2 is 4, expected 0"),
        ("0", 0, 40, 0, "has 1 bytes, expected 0 for its 0 bits of 0 positions"),
        ("0", 40, 40, 0, "has 1 bytes, expected 0 for 40 of 40 positions"),
    ],
)
def test_refuses(bits: str, count: int, size: int, parameter: int, text: str):
    with pytest.raises(PayloadError, match=text):
        AdaptiveGolomb().decode(bits_of(bits), count, size, parameter)
