"""CountSketch: the guarantees for its estimates, and its search for the largest. All seeds are fixed."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.codecs import CountSketch
from lightning_sparsecomm.kernels import SketchKernels, kernels_for
from lightning_sparsecomm.kernels.sketch.reference import _hashed, keys_of

CPU = torch.device("cpu")


def table_of(sketch: CountSketch, x: Tensor, seed: int) -> Tensor:
    table = sketch.empty(CPU, x.dtype)
    sketch.insert_(table, x, seed)
    return table


def values(kind: str, size: int) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    places = torch.arange(size)
    if kind == "heavy-tailed":
        return x**3
    if kind == "constant":
        return torch.full((size,), -1.5)
    if kind == "zero":
        return x * 0
    if kind == "one":
        return x * (places == size // 3)
    if kind == "sparse":
        return x * (places % 97 == 5)
    if kind == "clustered":
        # Non-zero only in blocks that the sample skips.
        return x * ((places > 64) & (places < 64 * 55))
    if kind == "whole":
        return (2 * x).round()
    if kind.startswith("stride"):
        return x * (places % int(kind.removeprefix("stride ")) == 0)
    return x


def test_estimates_are_unbiased():
    sketch, x = CountSketch(4, 40), values("heavy-tailed", 300)
    chosen = torch.tensor([0, 1, 63, 64, 150, 298, 299, int(x.abs().argmax())])
    estimates = torch.stack([sketch.query_at(table_of(sketch, x, seed), chosen, seed) for seed in range(2000)])
    errors = (estimates.mean(0) - x[chosen]) / (estimates.std(0) / 2000**0.5)
    # One of eight exceeds 3.59 as often as a single one exceeds 3 (Bonferroni).
    assert errors.abs().max() < 3.59
    # Single estimates are far off, so a bias would have been visible.
    assert estimates.std(0).min() > 0.1


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "one", "stride 64", "stride 128"])
@pytest.mark.parametrize("columns", [512, 1009])
def test_guarantee(kind, columns):
    """Checked where the energy is: all at one stride, it would collide if blocks began at multiples of their length."""
    x = values(kind, 64 * 1024)
    chosen = torch.arange(0, x.numel(), 128 * 8)
    bound = float(x.norm()) / columns**0.5
    off: dict[int, list[float]] = {1: [], 2: [], 5: []}
    squares = []
    for seed in range(100):
        for rows, fractions in off.items():
            sketch = CountSketch(rows, columns)
            errors = (sketch.query_at(table_of(sketch, x, seed), chosen, seed) - x[chosen]).abs()
            fractions.append(float((errors > 3**0.5 * bound).double().mean()))
            if rows == 1:
                squares.append(float((errors / bound).square().mean()))
    for rows, fractions in off.items():
        most = sum(math.comb(rows, i) * 2 ** (rows - i) for i in range((rows + 1) // 2, rows + 1)) / 3**rows
        # Errors within a seed depend on each other, so only seeds count as samples.
        assert sum(fractions) / 100 <= most
    mean, spread = torch.tensor(squares).mean(), torch.tensor(squares).std() / 10
    assert mean <= 1 + 4 * spread
    assert spread < 0.5


@pytest.mark.parametrize("columns", [1024, 1009, 500_000])
def test_all_columns_are_used(columns):
    blocks = torch.arange(300_000)
    for row, key in enumerate(keys_of(3, 2)):
        starts, _ = _hashed(key, blocks, torch.zeros(1, dtype=torch.int64), columns)
        words = _hashed(key, blocks[:20_000, None], torch.arange(64), columns)[1]
        full = blocks.numel() / columns
        empty = columns * math.exp(-full)
        missed = columns - starts.unique().numel()
        assert abs(missed - empty) <= 5 * (empty * (1 - (1 + full) * math.exp(-full))) ** 0.5 + 1, row
        # A chi-squared statistic with 127 degrees of freedom.
        bins = torch.bincount(starts * 128 // columns, minlength=128).double()
        widths = torch.bincount(torch.arange(columns) * 128 // columns, minlength=128) * full
        assert 127 - 5 * 254**0.5 < float(((bins - widths).square() / widths).sum()) < 127 + 5 * 254**0.5
        # Every bit of the words is fair, and independent of the next.
        signs = words.view(-1, 64).float() * 2 - 1
        assert signs.mean(0).abs().max() < 5 / signs.shape[0] ** 0.5
        assert (signs[:, 1:] * signs[:, :-1]).mean(0).abs().max() < 5 / signs.shape[0] ** 0.5


KINDS = ["normal", "heavy-tailed", "constant", "zero", "one", "sparse", "clustered", "whole"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_largest(kind, dtype):
    for rows, columns, size in [(3, 1000, 30_000), (1, 3, 9000), (4, 20_000, 9000), (5, 200, 100)]:
        sketch, x = CountSketch(rows, columns), values(kind, size).to(dtype)
        for count in (0, 1, 50, 1000, size - 1, size, 2 * size):
            seed = (count * 2**50 + 7) * (-1 if count == 50 else 1)
            table = table_of(sketch, x, seed)
            before = table.clone()
            estimates = sketch.query(table, size, seed)
            expected = kernels_for(CPU, dtype).largest(estimates, count, seed % 2**63)
            found = sketch.largest(table, size, count, seed)
            assert found.dtype == torch.int64 and torch.equal(found, expected)
            assert torch.equal(table, before)
    assert sketch.largest(sketch.empty(CPU, dtype), 0, 5, 1).tolist() == []


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "sparse", "one"])
def test_largest_holds_few(kind, monkeypatch):
    size, count = 500_000, 15_000
    sketch, x = CountSketch(5, 40_000), values(kind, size)
    table = table_of(sketch, x, 3)
    expected = kernels_for(CPU, x.dtype).largest(sketch.query(table, size, 3), count, 3)
    held = []
    for kernels in {type(sketch._kernels(table)), SketchKernels}:
        for name in ("query", "reaching"):
            plain = getattr(kernels, name)

            def noted(self, *arguments, plain=plain):
                result = plain(self, *arguments)
                for tensor in [result] if isinstance(result, Tensor) else result or []:
                    held.append(tensor.untyped_storage().nbytes())
                return result

            monkeypatch.setattr(kernels, name, noted)
    assert torch.equal(sketch.largest(table, size, count, 3), expected)
    # Only the sample, the positions and the estimates of the first attempt, with room for a few thousand more.
    assert len(held) == 3 and sum(held) < 0.1 * 4 * size + 8 * 4200


def test_sum_of_tables_is_the_table_of_the_sum():
    sketch, xs = CountSketch(5, 300), [values("whole", 1000), values("whole", 1001)[:1000]]
    both = table_of(sketch, xs[0], 9) + table_of(sketch, xs[1], 9)
    assert torch.equal(both, table_of(sketch, xs[0] + xs[1], 9))


def test_errors():
    for rows in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="rows must be a whole number, at least 1"):
            CountSketch(rows, 5)
    for columns in (0, -1, 2.0):
        with pytest.raises(ValueError, match="columns must be a whole number, at least 1"):
            CountSketch(5, columns)
    with pytest.raises(ValueError, match=r"columns must be at most 2\^31.*got 2147483649\. Use more rows"):
        CountSketch(1, 2**31 + 1)
    CountSketch(1, 2**31)
    sketch = CountSketch(2, 10)
    table, x, at = sketch.empty(CPU, torch.float32), torch.ones(3), torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="dtype must be"):
        sketch.empty(CPU, torch.float16)
    others = [table[:1], table.double().half(), torch.zeros(10, 2).t()]
    for other in others:
        for call in (
            lambda other=other: sketch.insert_(other, x, 0),
            lambda other=other: sketch.insert_at_(other, at, x, 0),
            lambda other=other: sketch.query(other, 3, 0),
            lambda other=other: sketch.query_at(other, at, 0),
            lambda other=other: sketch.largest(other, 3, 1, 0),
        ):
            with pytest.raises(ValueError, match="table must be contiguous"):
                call()
    for values_ in (x.double(), x[None]):
        with pytest.raises(ValueError, match="x must be a vector"):
            sketch.insert_(table, values_, 0)
    with pytest.raises(ValueError, match="values must be as many as positions, 3"):
        sketch.insert_at_(table, at, x[:2], 0)
    for positions in (at.int(), at[None]):
        with pytest.raises(ValueError, match=r"positions must be a vector of torch\.int64"):
            sketch.query_at(table, positions, 0)
    with pytest.raises(ValueError, match=r"positions must not be negative.*got -2"):
        sketch.insert_at_(table, torch.tensor([-2, 0, 1]), x, 0)
    with pytest.raises(ValueError, match="positions must not be negative"):
        sketch.query_at(table, torch.tensor([-1]), 0)
    with pytest.raises(ValueError, match="size must be at least 0"):
        sketch.query(table, -1, 0)
    with pytest.raises(ValueError, match="count must be at least 0"):
        sketch.largest(table, 3, -1, 0)
    assert not table.any()
