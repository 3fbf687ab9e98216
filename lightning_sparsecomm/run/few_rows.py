"""Tables whose gradients have few rows, such as embeddings of many ids: found in the first step, once and for all."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_sparsecomm.basis.ledger import SETUP, link_bytes
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.sharing.gradients import (
    NamedParameters,
    few_rows_of,
    has_few_rows,
    note_few_rows,
    note_sparse_gradient,
)
from lightning_sparsecomm.sharing.sync import Sync, matches

# Rows take at least so many times fewer bytes than ddp's sum of the whole table.
_FEWER = 20

# Bytes of a row's position, and of an element in bfloat16.
_POSITION, _ELEMENT = 8, 2


class FewRows:
    """Finds the tables of which a step's gradients have few rows that are not zero, on each rank.

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
        self._judged: set[int] = set()
        # Parameters of other modules, which may be tables too.
        self._elsewhere: set[int] = set()

    def scan(self, module: nn.Module) -> None:
        """Notes which of a module's own weights are tables, and which have sparse gradients; it may come again."""
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            # An output layer that shares a table makes its gradient dense.
            self._elsewhere |= {id(each) for each in module.parameters(recurse=False)}
            return
        if module.sparse:
            note_sparse_gradient(module.weight)
        elif isinstance(module.weight, Parameter) and id(module.weight) not in self._tables:
            self._tables.add(id(module.weight))
            # What an earlier run has noted on the parameter itself.
            note_few_rows(module.weight, 0)

    def judge(self, parameters: Iterable[Parameter], syncs: Iterable[Sync]) -> bool:
        """Finds them among parameters that `syncs` begin to exchange, each once, and the same on all ranks.

        A collective, if there are tables; returns whether it took place. Bytes: 8 for each table.
        """
        self.wanted = self.wanted or any(sync.takes_few_rows for sync in syncs)
        tables = [each for each in parameters if id(each) in self._tables - self._judged]
        if not (self.wanted and tables and self._wire.world_size > 1):
            return False
        counts = torch.tensor([_rows_of(each.grad) for each in tables], dtype=torch.float64, device=tables[0].device)
        with self._wire.in_step():
            # All payloads are as long as the longest.
            most = self._wire.all_gather(counts, SETUP).amax(0)
        for table, rows in zip(tables, most.tolist()):
            note_few_rows(table, int(rows) if _are_few(rows, table, self._wire.world_size) else 0)
        self._judged |= {id(each) for each in tables}
        return True

    def may_find(self, parameters: NamedParameters, syncs: Iterable[Sync]) -> bool:
        """Whether tables not judged yet, a tenth of these bytes or more, may turn out to have few rows."""
        taking = [sync for sync in syncs if sync.takes_few_rows]
        unknown = self._tables - self._judged - self._elsewhere
        tables = sum(
            table.nbytes
            for name, table in parameters
            if id(table) in unknown
            and any(not matches(name, sync.exclude) for sync in taking)
            and _are_few(1, table, self._wire.world_size)
        )
        return tables > 0 and sum(each.nbytes for _, each in parameters) <= 10 * tables

    @staticmethod
    def state_dict(named: NamedParameters) -> dict[str, int]:
        """Of those found, by name, the most rows of a rank."""
        return {name: few_rows_of(parameter) for name, parameter in named if has_few_rows(parameter)}

    def load_state_dict(self, named: NamedParameters, found: Mapping[str, int]) -> None:
        """Takes over what `state_dict` returned, before these parameters are exchanged."""
        for name, parameter in named:
            note_few_rows(parameter, found.get(name, 0))
            self._judged.add(id(parameter))


def _rows_of(gradient: Tensor | None) -> int:
    return 0 if gradient is None or gradient.is_sparse else int((gradient != 0).flatten(1).any(1).sum())


def _are_few(rows: float, table: Tensor, world_size: int) -> bool:
    """Whether so many rows of each rank take few bytes; where there are none, nothing is known."""
    row_bytes = table.shape[1] * _ELEMENT + _POSITION
    sent = link_bytes("all_gather", rows * row_bytes, world_size)
    return rows > 0 and sent * _FEWER <= link_bytes("all_reduce", table.nbytes, world_size)
