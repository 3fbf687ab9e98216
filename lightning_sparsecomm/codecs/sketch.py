"""Count sketches: a table much smaller than a vector, from which the vector's large elements can be estimated."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.kernels import Candidates, SketchKernels, kernels_for, sketch_kernels_for

_DTYPES = (torch.float32, torch.float64)

# To find a threshold for the largest estimates, every 61st block is sampled: 2% of the vector. Odd, as `sample_stride`.
_STRIDE = 61
# Passes over the table in search of a threshold that enough estimates reach, and not too many.
_PASSES = 4


@dataclass(frozen=True)
class CountSketch:
    """A count sketch: each row adds every element, with a random sign, to a random column.

    A table is `[rows, columns]`, float32 or float64, and is all that is stored: hashes come from a seed, taken modulo
    2^64. Tables are linear: the sum of the ranks' tables is the table of the ranks' sum, so they can be all-reduced.
    Estimates depend only on the table's bits and the seed, so all ranks and devices get equal ones. Insertion adds in
    order of position on the CPU. On CUDA it adds whole multiples of about 2⁻³⁶ of the largest float32, whose sum has
    the same bits in any order, and float64 numbers in any order. Tables and values must be finite.

    **Guarantee.** For r rows, c columns and any x, the estimate of an element x_p is unbiased. It is off by more than
    √(3/c)·‖x‖₂ with probability at most Σ C(r, i)·(1/3)^i·(2/3)^(r − i) over i = ⌈r/2⌉ … r: 0.333 for one row, 0.210
    for 5, 0.088 for 15. docs/formats.md proves it.

    Rounding errors are extra. Starts are made of 32 bits, so their probabilities differ from 1/c by at most c/2^32 of
    it. Randomness is over the seeds, and assumes that the mixer's bits are independent. Draw a new seed in each round:
    with the same hashes, errors always go to the same side.

    Arguments that methods share:
        table: `[rows, columns]` float32 or float64, contiguous. Values and estimates have its dtype.
        positions: `[m]` int64, none negative.
        size: Length of the vector.
        seed: The seed of the hashes.

    Methods raise `ValueError` for a table of another shape, and for arguments that do not fit it.

    Source: Finding frequent items in data streams (Charikar, Chen, Farach-Colton 2002); Sketched-SGD (Ivkin et al.
    2019), which sums tables over ranks. They hash each element by itself; we hash blocks of 64, see docs/formats.md.

    >>> sketch = CountSketch(rows=5, columns=100)
    >>> table = sketch.empty(torch.device("cpu"), torch.float32)
    >>> x = torch.zeros(1000)
    >>> x[[3, 500, 999]] = torch.tensor([4.0, -2.0, 1.0])
    >>> sketch.insert_(table, x, seed=1)
    >>> sketch.query_at(table, torch.tensor([3, 500, 501]), seed=1)
    tensor([ 4., -2.,  0.])
    >>> sketch.largest(table, 1000, 2, seed=1)
    tensor([  3, 500])

    Args:
        rows: Independent estimates of each element. Their median is returned; the mean of the middle two if their
            number is even.
        columns: Length of each row, at most 2^31.

    Raises:
        ValueError: `rows` or `columns` is not a whole number of at least 1, or `columns` is above 2^31.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_whole_number("rows", self.rows, 1, "a count of estimates", "Did you mean 5?")
        remedy = "Use a few times the number of elements to be found."
        check_whole_number("columns", self.columns, 1, "the length of a row", remedy)
        if self.columns > 2**31:
            raise ValueError(
                f"columns must be at most 2^31, as hashes have 32 bits; got {self.columns}. Use more rows instead."
            )

    def empty(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """An empty table: `[rows, columns]` zeros, float32 or float64."""
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.float64; got {dtype}. Convert the vector first.")
        if device.type == "cpu":
            # numpy asks for huge pages, and torch does not. Columns are read all over the table, and small pages would
            # need more translations than the CPU caches.
            return torch.from_numpy(np.zeros((self.rows, self.columns), np.float32 if dtype == _DTYPES[0] else float))
        return torch.zeros(self.rows, self.columns, dtype=dtype, device=device)

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        """Adds `x`, `[n]`, to `table` in place."""
        self._check_table(table)
        _check_vector("x", x, table.dtype, table)
        self._kernels(table).insert_(table, x, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        """Adds a sparse vector to `table` in place: `values`, `[m]`, at sorted positions.

        On the CPU, the result has the same bits as `insert_` of the whole vector, if the table holds no −0.
        """
        self._check_table(table)
        _check_vector("values", values, table.dtype, table)
        _check_positions(positions, table)
        if positions.shape != values.shape:
            raise ValueError(
                f"values must be as many as positions, {positions.numel()}: one for each; got {values.numel()}."
                " Use values = x[positions]."
            )
        self._kernels(table).insert_at_(table, positions, values, seed)

    def query(self, table: Tensor, size: int, seed: int) -> Tensor:
        """Estimates of all elements of a vector: `[size]`. Zeros are +0."""
        self._check_table(table)
        _check_count("size", size)
        return self._kernels(table).query(table, size, seed)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        """Estimates of the elements at `positions`: `[m]`, with the same bits as in `query`."""
        self._check_table(table)
        _check_positions(positions, table)
        return self._kernels(table).query_at(table, positions, seed)

    def largest(self, table: Tensor, size: int, count: int, seed: int) -> Tensor:
        """Positions of the min(count, non-zeros) estimates of largest magnitude: `[k]` int64, strictly increasing.

        The result is the same as if all elements were queried and ranked; ties for the last places are broken as in
        `TopK`. But it takes memory for little more than `count` estimates: a sample gives a threshold, and one pass
        keeps the estimates that reach it. If no threshold separates the largest (many tie, or most are wanted), all are
        ranked.
        """
        self._check_table(table)
        _check_count("size", size)
        _check_count("count", count)
        if min(count, size) == 0:
            return torch.empty(0, dtype=torch.int64, device=table.device)
        # The seed for ties must not be negative.
        kernels, start = kernels_for(table.device, table.dtype), seed % 2**63
        found = self._candidates(table, size, count, seed)
        if found is None:
            return kernels.largest(self.query(table, size, seed), count, start)
        # Each tensor is freed as soon as it is no longer needed.
        positions, estimates = found
        del found
        chosen = kernels.largest(estimates, count, start)
        del estimates
        positions = positions[chosen]
        del chosen
        return positions.to(torch.int64)

    def _candidates(self, table: Tensor, size: int, count: int, seed: int) -> Candidates | None:
        """Few candidates that include the `count` largest estimates or all non-zeros; None if no threshold does."""
        room = count + count // 4 + 4096
        if room >= size:
            return None
        kernels, ranking = self._kernels(table), kernels_for(table.device, table.dtype)
        sample = kernels.query(table, size, seed, _STRIDE).abs_()
        least = torch.finfo(table.dtype).smallest_normal * torch.finfo(table.dtype).eps
        expected = count * sample.numel() / size
        # Four standard deviations above the expected number: too few candidates are rare.
        rank = expected + 4 * expected**0.5 + 8
        too_few, too_many = 0.0, 0.0
        threshold = 0.0
        for _ in range(_PASSES):
            if 2 * rank > sample.numel():
                return None
            previous, threshold = threshold, ranking.kth_largest(sample, int(rank)) or least
            if threshold == previous:
                return None
            found = kernels.reaching(table, size, threshold, room, seed)
            if found is None:
                too_many = rank
            elif found.positions.numel() >= count or threshold == least:
                return found
            else:
                too_few = rank
            rank = (too_few + too_many) / 2 if too_many else 2 * rank
        return None

    def _kernels(self, table: Tensor) -> SketchKernels:
        return sketch_kernels_for(table.device, table.dtype)

    def _check_table(self, table: Tensor) -> None:
        if table.shape != (self.rows, self.columns) or table.dtype not in _DTYPES or not table.is_contiguous():
            raise ValueError(
                f"table must be contiguous, float32 or float64, and of shape {(self.rows, self.columns)}: a row for"
                f" each estimate; got {table.dtype} of shape {tuple(table.shape)} and strides {table.stride()}."
                " Make one with empty()."
            )


def _check_vector(name: str, vector: Tensor, dtype: torch.dtype, table: Tensor) -> None:
    if vector.dim() != 1 or vector.dtype != dtype or vector.device != table.device:
        raise ValueError(
            f"{name} must be a vector of {dtype} on {table.device}, for a table of {table.dtype} there; got"
            f" {vector.dtype} of shape {tuple(vector.shape)} on {vector.device}. Flatten and convert it."
        )


def _check_positions(positions: Tensor, table: Tensor) -> None:
    _check_vector("positions", positions, torch.int64, table)
    if positions.numel() and int(positions.min()) < 0:
        raise ValueError(
            f"positions must not be negative, as they count from the vector's start; got {int(positions.min())}."
            " Add the vector's length to positions that count from its end."
        )


def _check_count(name: str, number: int) -> None:
    if number < 0:
        raise ValueError(f"{name} must be at least 0: a count of elements; got {number}. Use 0 for none.")
