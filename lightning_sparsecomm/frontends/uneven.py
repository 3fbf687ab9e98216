"""Ranks with different numbers of batches: those that have run out go on with batches that do not count."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sparsecomm.basis.ledger import UNEVEN
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.engine import Engine

if TYPE_CHECKING:
    import pytorch_lightning as pl

_NOTHING = object()


class UnevenLoader:
    """A dataloader that gives equally many batches on all ranks: a rank that has run out repeats its last one.

    The loss of a repeated batch must be multiplied by zero. So a rank without data counts as one with gradient zero,
    as with torch's `Join`, and code that communicates in the training step runs on all ranks.

    If all ranks' loaders have a length, ranks compare it once. Otherwise they agree before each batch, in one byte.
    Making and iterating it are collectives.

    Attributes:
        filling: Whether the batch given last is a repeated one.
        fills: The same for the batches given last, of which the consumer removes those it has used.

    Raises:
        ValueError: A rank has no batch at all. Raised on all ranks, here or at the first batch.
    """

    def __init__(self, loader: Iterable[Any], wire: Wire, device: torch.device) -> None:
        self._loader, self._wire, self._device = loader, wire, device
        self.filling = False
        # No consumer of ours fetches more than a few ahead. Fabric's loops remove nothing.
        self.fills: deque[bool] = deque(maxlen=100)
        try:
            length: int = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = -1
        lengths = wire.all_gather(torch.tensor([length], device=device), UNEVEN).view(-1).tolist()
        self._length: int | None = None if min(lengths) < 0 else max(lengths)
        self._refuse_nothing([length != 0 for length in lengths])

    def _refuse_nothing(self, any_batch: list[bool]) -> None:
        if not all(any_batch) and any(any_batch):
            raise ValueError(
                f"each rank must have at least one batch, to repeat it once it has run out; rank"
                f" {any_batch.index(False)} has none. Give it some data, or train on fewer ranks."
            )

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the loader of some rank has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        batches, last, number = iter(self._loader), None, 0
        self.fills.clear()
        try:
            while self._length is None or number < self._length:
                batch = next(batches, _NOTHING)
                if self._length is None:
                    mine = torch.tensor([batch is not _NOTHING], dtype=torch.uint8, device=self._device)
                    having = self._wire.all_gather(mine, UNEVEN).view(-1).bool().tolist()
                    if not any(having):
                        return
                    if not number:
                        self._refuse_nothing(having)
                self.filling = batch is _NOTHING
                number += 1
                if batch is None:
                    # Lightning passes over it without asking whether it counts, and it is nothing to repeat.
                    yield None
                    continue
                if self.filling and last is None:
                    # Resumed where this rank had run out: any batch serves.
                    last = next(iter(self._loader), None)
                last = last if self.filling else batch
                self.fills.append(self.filling)
                yield last
        finally:
            self.filling = False

    # Lightning reads and sets a loader's attributes.
    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """That of the loader; Lightning sets it to seed workers."""
        return self._loader.worker_init_fn  # type: ignore[attr-defined]

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function  # type: ignore[attr-defined]


class UnevenMixin:
    """Lets a Trainer's ranks have different numbers of batches, if the user asks for it."""

    uneven_inputs: bool
    root_device: torch.device
    _engine: Engine | None
    _fills = False

    if TYPE_CHECKING:

        @property
        def _trainer(self) -> "pl.Trainer": ...

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if self.uneven_inputs and self._engine is not None and self._trainer.training:
            return UnevenLoader(dataloader, self._engine.wire, self.root_device)
        return dataloader

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self.uneven_inputs:
            loader = self._trainer.train_dataloader
            if not isinstance(loader, UnevenLoader) or not loader.fills:
                raise TypeError(
                    "uneven_inputs=True needs one training dataloader, whose batches training_step gets; got"
                    f" {type(loader).__name__}, or a training_step that fetches batches from an iterator. Join the"
                    " dataloaders into one, or give all ranks equally many batches and leave uneven_inputs out."
                )
            self._fills = loader.fills.popleft()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # This, and not no backward pass, is equal on all ranks: DDP's hook communicates in it.
        loss: Tensor = super().backward(closure_loss * 0 if self._fills else closure_loss, *args, **kwargs)  # type: ignore[misc]
        return loss
