"""Auto: the shortest codec, or of many positions a bitmap that is nearly so; bounded where Golomb could not win."""

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


def test_many_positions_go_into_a_bitmap_unless_another_code_saves_a_sixteenth():
    generator = torch.Generator().manual_seed(0)
    size = 200_000
    alike = torch.rand(size, generator=generator) < 0.5
    # Some parts are denser than others, as in trainings; in the third, a part is empty.
    parts = torch.arange(size) // 500 % 6
    uneven = torch.rand(size, generator=generator) < torch.where(parts == 0, 0.15, 0.6)
    clusters = (torch.rand(size, generator=generator) < 0.9) & (torch.arange(size) < size // 2)
    saved = []
    for selected, codec in ((alike, Bitmap()), (uneven, Bitmap()), (clusters, AdaptiveGolomb())):
        indices = selected.nonzero().view(-1)
        chosen, section = Auto().encoded(indices, size)
        assert chosen == Auto().chosen(indices, size) == codec
        assert torch.equal(section, codec.encode(indices, size))
        adaptive = AdaptiveGolomb().section_bytes(indices, size)
        assert abs(AdaptiveGolomb().estimated_bits(indices) / (8 * adaptive) - 1) < 0.03
        saved.append(1 - adaptive / Bitmap().section_bytes(indices, size))
    assert saved[0] < 0 < saved[1] < 1 / 16 < saved[2]
    # Of fewer, always the shortest.
    few = uneven[:30_000].nonzero().view(-1)
    assert Auto().chosen(few, 30_000) == AdaptiveGolomb()


def test_auto_is_bounded_where_golomb_would_be_no_shorter():
    assert Auto().bound_bytes(500, 1000) == 125
    assert Auto().bound_bytes(999, 1000) == 125
    assert Auto().bound_bytes(0, 1000) == Auto().bound_bytes(1, 1) == 0
    for count in (1, 10, 380, 1000):
        assert Auto().bound_bytes(count, 1000) is None
