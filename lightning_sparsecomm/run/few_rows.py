"""Tables whose gradients have few rows, such as embeddings of many ids: found in the first step, once and for all."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_sparsecomm.basis.ledger import SETUP
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_few_rows, note_few_rows, note_sparse_gradient
from lightning_sparsecomm.sharing.sync import Sync

# Rows take at least so many times fewer bytes than ddp's sum of the whole table.
_FEWER = 20

# Bytes of a row's position, and of an element in bfloat16.
_POSITION, _ELEMENT = 8, 2


class FewRows:
    """Finds the tables of which a step's gradients, on all ranks together, have few rows that are not zero.

    Only weights of `nn.Embedding` and `nn.EmbeddingBag` count: their rows are zero where a batch has not met them, and
    not by chance. What is found holds for the rest of the run, and for runs that resume from it.

    Args:
        wire: Between all ranks.

    Attributes:
        wanted: Whether a method that the run may use takes such tables apart.
    """

    def __init__(self, wire: Wire) -> None:
        self.wanted = False
        self._wire = wire
        self._tables: set[int] = set()

    def scan(self, module: nn.Module) -> None:
        """Notes which of a module's own weights are tables, and which have sparse gradients; it may come again."""
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return
        if module.sparse:
            note_sparse_gradient(module.weight)
        elif isinstance(module.weight, Parameter) and id(module.weight) not in self._tables:
            self._tables.add(id(module.weight))
            # Of an earlier run.
            note_few_rows(module.weight, False)

    def judge(self, parameters: Iterable[Parameter], syncs: Iterable[Sync], averaged: bool) -> None:
        """Finds them among parameters that `syncs` begin to exchange, the same on all ranks.

        A collective, if there are tables. Where DDP has `averaged` gradients, ranks have each other's rows. Bytes: 8
        for each table.
        """
        self.wanted = self.wanted or any(sync.takes_few_rows for sync in syncs)
        tables = [each for each in parameters if id(each) in self._tables]
        if not (self.wanted and tables and self._wire.world_size > 1):
            return
        counts = torch.tensor([_rows_of(each.grad) for each in tables], dtype=torch.float64, device=tables[0].device)
        with self._wire.in_step():
            self._wire.all_reduce_(counts, SETUP)
        for table, rows in zip(tables, counts.tolist()):
            note_few_rows(table, _are_few(rows / (self._wire.world_size if averaged else 1), table))

    @staticmethod
    def state_dict(named: NamedParameters) -> list[str]:
        """The names of those found."""
        return [name for name, parameter in named if has_few_rows(parameter)]

    @staticmethod
    def load_state_dict(named: NamedParameters, names: Collection[str]) -> None:
        """Takes over what `state_dict` returned, before these parameters are exchanged."""
        for name, parameter in named:
            if name in names:
                note_few_rows(parameter, True)


def _rows_of(gradient: Tensor | None) -> int:
    return 0 if gradient is None or gradient.is_sparse else int((gradient != 0).flatten(1).any(1).sum())


def _are_few(rows: float, table: Tensor) -> bool:
    """Whether so many rows, of all ranks together, take few bytes; where there are none, nothing is known."""
    count, width = table.shape
    # Each rank's rows go to W - 1 others; a sum sends each element of the table 2 (W - 1) / W times.
    sent, summed = rows * (width * _ELEMENT + _POSITION), 2 * count * width * table.element_size()
    return rows > 0 and sent * _FEWER <= summed
