"""Auto: always the shortest codec, and a bound wherever Golomb could not be shorter."""

import torch
from hypothesis import given

from lightning_sparsecomm.basis.layout import MAX_SIZE
from lightning_sparsecomm.codecs import INDEX_CODECS, AdaptiveGolomb, Auto, Bitmap, Golomb, Raw32, RunLength16
from tests.codecs.indices.selections import selections


@given(selection=selections())
def test_auto_is_the_shortest(selection: tuple[list[int], int]):
    positions, size = selection
    indices = torch.tensor(positions, dtype=torch.int64)
    chosen = Auto().chosen(indices, size)
    section = chosen.encode(indices, size)
    assert section.numel() == min(codec.section_bytes(indices, size) for codec in INDEX_CODECS.values())
    bound = Auto().bound_bytes(len(positions), size)
    assert bound is None or section.numel() <= bound


def test_auto_chooses_each():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(10**6, generator=generator)
    # At 8.3%, 2^3 is the best of all divisors.
    for count, codec in ((10**3, AdaptiveGolomb()), (83_000, Golomb()), (5 * 10**5, Bitmap())):
        assert Auto().chosen(order[:count].sort().values, 10**6) == codec
    # One position after 3 · 10⁹ zeros, for which Golomb's code needs 5 bytes; and one after so many that fit 16 bits.
    assert Auto().chosen(torch.tensor([3 * 10**9]), MAX_SIZE) == Raw32()
    assert Auto().chosen(torch.tensor([60_000]), MAX_SIZE) == RunLength16()
    # All are equally short: the fastest to decode is chosen.
    assert Auto().chosen(torch.arange(9), 9) == RunLength16()


def test_auto_is_bounded_where_golomb_would_be_no_shorter():
    assert Auto().bound_bytes(500, 1000) == 125
    assert Auto().bound_bytes(999, 1000) == 125
    assert Auto().bound_bytes(0, 1000) == Auto().bound_bytes(1, 1) == 0
    for count in (1, 10, 380, 1000):
        assert Auto().bound_bytes(count, 1000) is None
