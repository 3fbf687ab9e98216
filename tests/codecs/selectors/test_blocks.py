"""TopBlocks: where blocks lie, which are sent, and the kernel that computes their norms."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.codecs import TopBlocks
from lightning_sparsecomm.kernels import Reference, kernels_for

CPU = torch.device("cpu")
SHAPES = [(5, 7), (3,), (), (4, 2, 3), (0, 4), (2, 0), (1, 1), (6, 1)]


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout([(f"tensor_{i}", shape) for i, shape in enumerate(shapes)])


def naive_blocks(shapes: list[tuple[int, ...]], size: int) -> list[list[range]]:
    """For each tensor, the positions in each of its blocks: rows, cut into runs."""
    tensors, offset = [], 0
    for shape in shapes:
        rows = shape[0] if len(shape) > 1 else 1
        length = math.prod(shape) // rows if rows else 0
        starts = [(offset + row * length, start) for row in range(rows) for start in range(0, length, size)]
        tensors.append([range(row + start, row + min(start + size, length)) for row, start in starts])
        offset += math.prod(shape)
    return tensors


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 100])
def test_blocks_are_rows_cut_into_runs(size: int):
    layout = layout_of(SHAPES)
    bounds = TopBlocks(size=size).bounds(layout, CPU).tolist()
    expected = [block for tensor in naive_blocks(SHAPES, size) for block in tensor]
    assert [range(start, stop) for start, stop in itertools.pairwise(bounds)] == expected
    assert bounds[-1] == layout.size


def test_blocks_of_nothing():
    layout = layout_of([])
    assert TopBlocks().bounds(layout, CPU).tolist() == [0]
    assert TopBlocks().select(torch.empty(0), Round(layout)).tolist() == []


vectors = st.lists(st.sampled_from([0.0, 0.0, -0.0, 1.0, -1.0, 3.0, 1e-30]), min_size=70, max_size=70)


@settings(max_examples=40)
@given(vectors, st.sampled_from([1, 2, 3, 7]), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.4, 1.0]))
def test_selection_is_what_it_says(elements, size, density, sparse_below):
    layout = layout_of(SHAPES)
    assert layout.size == len(elements)
    x = torch.tensor(elements)
    selector = TopBlocks(density, size, sparse_below)
    selected = selector.select(x, Round(layout))
    chosen = set(selected.tolist())
    assert selected.tolist() == sorted(chosen)
    for blocks in naive_blocks(SHAPES, size):
        energy = {block: math.fsum(elements[i] ** 2 for i in block) for block in blocks}
        nonzero = [block for block in blocks if energy[block]]
        sent = [block for block in blocks if block[0] in chosen]
        assert {i for block in sent for i in block} == {i for block in blocks for i in block} & chosen
        assert set(sent) <= set(nonzero)
        k = min(len(blocks), max(1, round(density * len(blocks)))) if blocks else 0
        if len(nonzero) <= k or len(nonzero) < sparse_below * len(blocks):
            assert sent == nonzero
        else:
            assert len(sent) == k
            least = min(energy[block] for block in sent)
            assert all(energy[block] <= least for block in nonzero if block not in sent)
    # The same blocks are selected if only some elements are held.
    held = torch.tensor([i for i in range(len(elements)) if elements[i] or i % 5 == 0])
    assert torch.equal(selector.blocks(x[held], Round(layout), held), selector.blocks(x, Round(layout)))


def test_ties_favour_no_position():
    layout = layout_of([(100, 4)])
    counts = torch.zeros(100)
    for step in range(200):
        counts[TopBlocks(0.1, sparse_below=0.0).blocks(torch.ones(400), Round(layout, step=step))] += 1
    assert counts.sum() == 2000
    # 20 each on average. A rule that favours the first blocks gives 200 to some and none to others.
    assert counts.min() > 5
    assert counts.max() < 40


def test_an_embedding_goes_whole_and_a_weight_does_not():
    layout = layout_of([(1000, 8), (64, 8)])
    x = torch.zeros(layout.size)
    table, weight = layout.views(x)
    generator = torch.Generator().manual_seed(0)
    touched = torch.randperm(1000, generator=generator)[:400]
    table[touched] = torch.randn(400, 8, generator=generator)
    weight.normal_(generator=generator)
    selected = TopBlocks(1 / 32).select(x, Round(layout))
    in_table, in_weight = layout.counts(selected)
    assert in_table == 400 * 8
    assert in_weight == 2 * 8
    assert torch.equal(selected[:in_table].view(-1, 8)[:, 0] // 8, touched.sort().values)


def test_density_follows_its_schedule():
    layout = layout_of([(10, 2)])
    selector = TopBlocks(Stages([1.0, 0.1], [0, 3]), sparse_below=0.0)
    assert [selector.blocks(torch.ones(20), Round(layout, step=step)).numel() for step in (0, 2, 3)] == [10, 10, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 2**31))
def test_energies(dtype, lengths, seed):
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()])
    x = torch.randn(int(bounds[-1]), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[::3] = 0
    expected = [float(x[start:stop].double().square().sum()) for start, stop in itertools.pairwise(bounds)]
    for kernels in (kernels_for(CPU, dtype), Reference()):
        energies = kernels.energies(x, bounds)
        assert energies.dtype == torch.float64
        torch.testing.assert_close(energies, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-45), (torch.float64, 5e-324)])
def test_only_zeros_have_no_energy(dtype, least):
    x = torch.tensor([0.0, -0.0, 0.0, -least, least, 0.0], dtype=dtype)
    for kernels in (kernels_for(CPU, dtype), Reference()):
        assert (kernels.energies(x, torch.tensor([0, 2, 3, 4, 6])) > 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in (0, 1]: the fraction of elements sent; got 0.0"),
        ({"density": 32}, "got 32. Did you mean 0.03125?"),
        ({"size": 0}, "size must be a whole number, at least 1: the greatest number of elements in a block; got 0."),
        ({"size": 2.5}, "size must be a whole number, at least 1: the greatest number of elements in a block; got 2.5"),
        ({"sparse_below": -0.1}, "sparse_below must be in [0, 1]"),
        ({"sparse_below": float("nan")}, "sparse_below must be in [0, 1]"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TopBlocks(**options)
