"""Count sketches: a table much smaller than a vector, from which its larger elements can be told."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.kernels import Candidates, SketchKernels, kernels_for, sketch_kernels_for

_DTYPES = (torch.float32, torch.float64)

# Of that many blocks, the estimates in one are looked at to find what the largest of all are likely to reach. Odd, as
# `compensation.sample_stride` is, and small enough that the sample is 2% of the vector.
_STRIDE = 61
# Passes over the table in search of a threshold that enough reach, and not too many.
_PASSES = 4


@dataclass(frozen=True)
class CountSketch:
    """The form of a count sketch: each row holds every element once, with a random sign, in a random column.

    A table is linear in what is inserted: the sum of ranks' tables is the table of their sum, so tables can be
    all-reduced. It is `[rows, columns]`, float32 or float64; nothing else is stored, and hashes come from a seed, taken
    modulo 2^64. What is estimated depends on the table's bits and the seed alone: it is equal on all ranks and
    devices. Insertion adds in order of position on the CPU; on CUDA in any order, and its float32 additions take
    subnormal numbers for zeros. Tables and values must be finite.

    **Guarantee.** For r rows and c columns, whatever x is, the estimate of an element x_p is unbiased, and it is off by
    more than √(3/c)·‖x‖₂ with probability at most Σ C(r, i)·(1/3)^i·(2/3)^(r − i) over i = ⌈r/2⌉ … r: 0.333 for one
    row, 0.210 for 5, 0.088 for 15.

    Proof. Blocks of at most c consecutive elements go to consecutive columns from a start that is uniform over all c,
    modulo c. So two elements of one block never share a column; two of different blocks do with probability 1/c, as
    their starts are independent. Signs are independent of the starts and of one another. A row's estimate is
    x_p + Σ s_p·s_q·x_q over the q that share p's column: the sum has mean 0, as every s_q has; its cross terms vanish;
    and its variance is Σ x_q²/c over the other blocks' q, at most ‖x‖²/c. By Chebyshev, a row is off by more than
    √(3/c)·‖x‖ with probability at most 1/3. If the median is, or the mean of the middle two, then at least ⌈r/2⌉ of the
    independent rows are, to the same side. And a row's error is symmetric about 0, as s_p and −s_p are as likely: so is
    the median's, which hence has mean 0 too.

    Rounding comes on top. Starts are made of 32 bits: their probabilities differ from 1/c by c/2^32 of it at most.
    Randomness is over the seeds, a mixer's bits being taken for independent: hashes that are never drawn anew always
    err to the same side.

    Source: Finding frequent items in data streams (Charikar, Chen, Farach-Colton 2002); Sketched-SGD (Ivkin et al.
    2019) sums tables over ranks. There each element is hashed by itself, here blocks of 64 are: docs/formats.md.

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
        rows: Independent estimates of each element, of which the median is taken; of an even number, the mean of the
            middle two.
        columns: Length of each row, at most 2^31.

    Raises:
        ValueError: `rows` or `columns` is not a whole number, below 1 or above what it may be.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if type(self.rows) is not int or self.rows < 1:
            raise ValueError(
                f"rows must be a whole number, at least 1: a count of estimates; got {self.rows!r}. Did you mean 5?"
            )
        if type(self.columns) is not int or self.columns < 1:
            raise ValueError(
                f"columns must be a whole number, at least 1: the length of a row; got {self.columns!r}."
                " Give some times the number of elements that are to be found."
            )
        if self.columns > 2**31:
            raise ValueError(
                f"columns must be at most 2^31, as hashes have 32 bits; got {self.columns}. Give more rows instead."
            )

    def empty(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A table that nothing is in yet: `[rows, columns]` zeros, float32 or float64.

        Raises:
            ValueError: `dtype` is another.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be torch.float32 or torch.float64; got {dtype}. Convert what is inserted.")
        if device.type == "cpu":
            # numpy asks for huge pages, torch does not: columns are read all over the table, and more than small pages
            # are at hand for.
            return torch.from_numpy(np.zeros((self.rows, self.columns), np.float32 if dtype == _DTYPES[0] else float))
        return torch.zeros(self.rows, self.columns, dtype=dtype, device=device)

    def insert_(self, table: Tensor, x: Tensor, seed: int) -> None:
        """Adds `x`, `[n]` in the table's dtype, to `table`.

        Raises:
            ValueError: `table` is not one of this sketch, or `x` does not fit it.
        """
        self._check_table(table)
        _check_values("x", x, table)
        self._kernels(table).insert_(table, x, seed)

    def insert_at_(self, table: Tensor, positions: Tensor, values: Tensor, seed: int) -> None:
        """Adds a vector that is `values` (`[m]` in the table's dtype) at `positions` (`[m]` int64, sorted), else zero.

        On the CPU it leaves the bits that `insert_` of the whole vector leaves, if the table holds no −0.

        Raises:
            ValueError: `table` is not one of this sketch, `values` or `positions` do not fit, or a position
                is negative.
        """
        self._check_table(table)
        _check_values("values", values, table)
        _check_positions(positions, table)
        if positions.shape != values.shape:
            raise ValueError(
                f"values must be as many as positions, {positions.numel()}: one for each; got {values.numel()}."
                " Give values = x[positions]."
            )
        self._kernels(table).insert_at_(table, positions, values, seed)

    def query(self, table: Tensor, size: int, seed: int) -> Tensor:
        """Estimates of all elements of a vector of `size` elements, `[size]` in the table's dtype; a zero is +0.

        Raises:
            ValueError: `table` is not one of this sketch, or `size` is negative.
        """
        self._check_table(table)
        _check_count("size", size)
        return self._kernels(table).query(table, size, seed)

    def query_at(self, table: Tensor, positions: Tensor, seed: int) -> Tensor:
        """Estimates of the elements at `positions` (`[m]` int64), `[m]` in the table's dtype: the bits of `query`'s.

        Raises:
            ValueError: `table` is not one of this sketch, `positions` are not int64, or one is negative.
        """
        self._check_table(table)
        _check_positions(positions, table)
        return self._kernels(table).query_at(table, positions, seed)

    def largest(self, table: Tensor, size: int, count: int, seed: int) -> Tensor:
        """Positions of the largest estimates by magnitude: exactly min(count, those that are not zero).

        As if all were queried and ranked, with ties for the last places settled as `TopK` settles them. But memory is
        taken for little more than `count` of them: a sample tells what the largest are likely to reach, and one pass
        keeps those that do. Where no threshold is found that parts them (many tie, or most are wanted), all are ranked.

        Args:
            table: `[rows, columns]`; not changed.
            size: Length of the vector.
            count: How many are wanted.
            seed: The seed of what was inserted; also settles ties.

        Returns:
            `[k]` int64, strictly increasing.

        Raises:
            ValueError: `table` is not one of this sketch, or `size` or `count` is negative.
        """
        self._check_table(table)
        _check_count("size", size)
        _check_count("count", count)
        if min(count, size) == 0:
            return torch.empty(0, dtype=torch.int64, device=table.device)
        # Numbers of ties must not be negative.
        kernels, start = kernels_for(table.device, table.dtype), seed % 2**63
        found = self._candidates(table, size, count, seed)
        if found is None:
            return kernels.largest(self.query(table, size, seed), count, start)
        # Each is let go as soon as it has served.
        positions, estimates = found
        del found
        chosen = kernels.largest(estimates, count, start)
        del estimates
        positions = positions[chosen]
        del chosen
        return positions.to(torch.int64)

    def _candidates(self, table: Tensor, size: int, count: int, seed: int) -> Candidates | None:
        """Elements that hold the `count` largest estimates or all that are not zero, and not many more; None where no
        threshold is found that they alone reach."""
        room = count + count // 4 + 4096
        if room >= size:
            return None
        kernels, ranking = self._kernels(table), kernels_for(table.device, table.dtype)
        sample = kernels.query(table, size, seed, _STRIDE).abs_()
        least = torch.finfo(table.dtype).smallest_normal * torch.finfo(table.dtype).eps
        expected = count * sample.numel() / size
        # Four standard deviations more than are expected, so that too few are rare.
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


def _check_values(name: str, values: Tensor, table: Tensor) -> None:
    if values.dim() != 1 or values.dtype != table.dtype or values.device != table.device:
        raise ValueError(
            f"{name} must be a vector with the table's dtype and device, {table.dtype} on {table.device}; got"
            f" {values.dtype} of shape {tuple(values.shape)} on {values.device}. Flatten and convert it."
        )


def _check_positions(positions: Tensor, table: Tensor) -> None:
    if positions.dim() != 1 or positions.dtype != torch.int64 or positions.device != table.device:
        raise ValueError(
            f"positions must be a vector of torch.int64 on {table.device}; got {positions.dtype} of shape"
            f" {tuple(positions.shape)} on {positions.device}. Flatten and convert it."
        )
    if positions.numel() and int(positions.min()) < 0:
        raise ValueError(
            f"positions must not be negative: they count from the vector's beginning; got {int(positions.min())}."
            " Add the vector's length to those that count from its end."
        )


def _check_count(name: str, number: int) -> None:
    if number < 0:
        raise ValueError(f"{name} must be at least 0: a count of elements; got {number}. Give 0 for none.")
