"""An exchange with state: PowerSGD."""

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Round, Vector, Wire
from lightning_sparsecomm.exchange import PlainExchange


class PowerSGD(PlainExchange):
    """Sends each matrix M as two thin ones, P and Q, with P Qᵀ ≈ M, and all other tensors whole. Biased.

    P comes from M and the Q of the round before, and has orthonormal columns. A rank sends Q = Mᵀ P of its own M, so
    that it has sent P Qᵀ.

    Source: Vogels et al. 2019, PowerSGD, algorithm 1.

    Args:
        rank: Columns of P and Q.
    """

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        self.factors: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        layout, draws = context.layout, context.shared_generator()
        values = {segment.name: view for segment, view in zip(layout.segments, layout.views(x.values))}
        matrices = {name: value.flatten(1) for name, value in values.items() if value.dim() > 1}
        random = {name: torch.randn(m.shape[1], self.rank, generator=draws) for name, m in matrices.items()}
        before = {**random, **self.factors}
        p = _mean({name: m @ before[name].to(m) for name, m in matrices.items()}, wire)
        p = {name: torch.linalg.qr(each).Q for name, each in p.items()}
        own = {name: m.T @ p[name] for name, m in matrices.items()}
        mean = _mean({**values, **own}, wire)

        shared, sent = torch.empty_like(x.values), x.values.clone()
        for name, all_ranks, this_rank in zip(values, layout.views(shared), layout.views(sent)):
            if name in p:
                all_ranks.copy_((p[name] @ mean[name].T).view_as(all_ranks))
                this_rank.copy_((p[name] @ own[name].T).view_as(this_rank))
            else:
                all_ranks.copy_(mean[name])
        self._next = {name: mean[name].clone() for name in p}
        return shared, sent

    def commit(self) -> None:
        self.factors |= self._next

    def abort(self) -> None:
        self._next = {}

    def state_dict(self) -> dict[str, Tensor]:
        return self.factors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.factors = dict(state)


def _mean(tensors: dict[str, Tensor], wire: Wire) -> dict[str, Tensor]:
    """The mean of each tensor over ranks, in one all-reduce."""
    if not tensors:
        return {}
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]) / wire.world_size
    parts = wire.all_reduce_(flat).split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view_as(tensor) for (name, tensor), part in zip(tensors.items(), parts)}
