"""Matrices as products of two thin ones: the bytes of their sums do not depend on the number of ranks."""

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, Vector, Wire, phase
from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.exchange.base import Exchange, Exchanged, dense_values
from lightning_sparsecomm.exchange.low_rank import FactorSums, Matrix, groups_of
from lightning_sparsecomm.exchange.status import read_counts


class PowerSGD(Exchange):
    """Sends each matrix M as P and Q, of a few columns each, with P Qᵀ ≈ M; all other tensors whole. Biased.

    P is an orthonormal basis of the columns of M Q', where M is the mean over ranks and Q' the Q of the round before.
    Then Q is the mean of Mᵀ P. A tensor of several dimensions is a matrix of `shape[0]` rows; where two factors would
    be no shorter, it is sent whole. Use it with error feedback: a rank has sent P Pᵀ M of its own M.

    Bytes handed over, with any number of ranks: 4 for each of rank · (rows + columns) numbers of a matrix, for each
    element of the other tensors, and for each tensor. There are two all-reduces for each group of layers. Those of one
    group are on the wire while another's factors are computed.

    Memory: two vectors of the model's size, for what a round returns, which stay.

    State: Qᵀ of each matrix, `[rank, columns]` in the vector's dtype, by parameter name; equal on all ranks.

    Source: Vogels et al. 2019, PowerSGD, algorithms 1 and 2. There, a rank forgets what all share; here, its own part
    of it. That makes no difference to what is shared, and residuals of different ranks do not drift apart.

    >>> PowerSGD(rank=2, dense_steps=100)
    PowerSGD(rank=2, dense_steps=100, warm_start=True, group_elements=4194304)

    Args:
        rank: Columns of P and Q. A matrix with no more rows or columns than these is sent whole.
        dense_steps: Optimizer steps at the start in which everything is sent whole.
        warm_start: Whether Q' is the Q of the round before. Otherwise it is drawn at random in each round.
        group_elements: Elements in a group of layers, at least. A smaller model is one group.

    Raises:
        ValueError: `rank` or `group_elements` below 1, or `dense_steps` below 0.
        TypeError: `warm_start` is neither True nor False.
    """

    def __init__(
        self, rank: int = 1, dense_steps: int = 0, warm_start: bool = True, group_elements: int = 2**22
    ) -> None:
        check_whole_number("rank", rank, 1, "columns of a matrix's two factors", "Use 1, 2 or 4, as in the paper.")
        check_whole_number("dense_steps", dense_steps, 0, "", "Use 0 to compress from the first step on.")
        check_whole_number("group_elements", group_elements, 1, "", "Leave it out for its default.")
        check_booleans(warm_start=warm_start)
        self.rank = rank
        self.dense_steps = dense_steps
        self.warm_start = warm_start
        self.group_elements = group_elements
        self._factors: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}
        self._started: list[FactorSums] | None = None
        # Room for what a round returns. To ask for so much memory anew costs more than the products.
        self._room = torch.empty(0)

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self._started = self._start(x, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        groups = self._started or self._start(x, context, wire)
        self._started = None
        groups[0].wait()
        present = read_counts(groups[0].counts, x, context, wire)
        groups[0].start_second()
        for group in groups[1:]:
            group.wait()
            group.start_second()
        if (self._room.numel(), self._room.dtype) != (2 * x.values.numel(), x.values.dtype):
            self._room = x.values.new_empty(2 * x.values.numel())
        shared, sent = self._room.view(2, -1)
        for group in groups:
            group.wait()
            group.write(shared, sent)
        if self.warm_start:
            here = {segment.name for segment, anyone in zip(context.layout.segments, present) if anyone}
            found = [each for group in groups for each in zip(group.group.matrices, group.q)]
            self._next = {matrix.name: q.clone() for matrix, q in found if matrix.name in here}
        return Exchanged(shared, sent, present)

    def commit(self) -> None:
        self._factors |= self._next
        self._next = {}

    def abort(self) -> None:
        self._started, self._next = None, {}

    def state_dict(self) -> dict[str, Tensor]:
        return self._factors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._factors = {name: factor.clone() for name, factor in state.items()}

    def _start(self, x: Vector, context: Round, wire: Wire) -> list[FactorSums]:
        values, draws = dense_values(x, self), context.shared_generator()
        rank = self.rank if context.step >= self.dense_steps else 0
        started: list[FactorSums] = []
        for group in groups_of(context.layout, rank, self.group_elements):
            with phase("encode"):
                directions = [self._direction(matrix, values, draws) for matrix in group.matrices]
            status = 0 if started else len(context.layout.segments)
            started.append(FactorSums(group, x, directions, status, wire))
        return started

    def _direction(self, matrix: Matrix, like: Tensor, draws: torch.Generator) -> Tensor:
        """Q'ᵀ, scaled, which makes no difference to P; rows that are not known, or hold nothing, are drawn."""
        q = like.new_zeros(matrix.rank, matrix.columns)
        before = self._factors.get(matrix.name)
        if before is not None and before.shape[1] == matrix.columns:
            kept = before[: matrix.rank]
            q[: len(kept)] = kept
        largest = q.abs().amax(1, keepdim=True)
        unknown = (largest == 0) | ~largest.isfinite()
        if bool(unknown.any()):
            drawn = torch.randn(q.shape, generator=draws, dtype=torch.float32).to(q)
            q = torch.where(unknown, drawn, q)
            largest = q.abs().amax(1, keepdim=True)
        return q / (largest * matrix.columns)
