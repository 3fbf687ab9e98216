"""The optimizer is given signs."""

import torch

from lightning_sparsecomm.basis.layout import SparseVector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel.contribution import Contribution
from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchanged


class SharedSign(Memory):
    """Replaces what is shared by its sign: −1, 0 or 1. What ranks send and forget stays as it is.

    All elements of a weight then move by the learning rate in a step, or not at all. So the rate is about that of Adam,
    such as 1e-3, and not that of SGD. It comes before other memories, which then see what was shared.

    Source: DeMo (Peng et al. 2024), algorithm 1 and section 3; signSGD (Bernstein et al. 2018).

    >>> SharedSign()
    SharedSign()
    """

    def __init__(self) -> None:
        super().__init__()

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return contribution

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        shared = exchanged.shared
        if isinstance(shared, SparseVector):
            return exchanged._replace(shared=shared._replace(values=torch.sign(shared.values)))
        return exchanged._replace(shared=torch.sign(shared))
