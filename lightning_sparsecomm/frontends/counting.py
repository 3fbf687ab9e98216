"""How many samples a replica trains on: known where samples are dealt out, else read off the batches."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from lightning_sparsecomm.frontends.dealing import DealingMixin, loaders_of
from lightning_sparsecomm.frontends.reporting import say

# Of one batch, no more parts are looked at: a batch may be a list of a million numbers.
_PARTS = 64


class CountingMixin(DealingMixin):
    """Counts the samples of each batch that is trained on, for each optimizer."""

    # Whether the batch has not been trained on yet, and how many samples dataloaders have delivered for it.
    _fresh, _delivered = False, 0
    _told_of_steps = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._fresh = True
        # Also of a batch that is not trained on, as the module ends the epoch here.
        self._delivered = sum(reader.count_delivered() for reader in self.readers.values())

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # An optimizer may compute its loss more than once in a batch.
        if self._fresh:
            self._fresh = False
            samples = self._samples_in(args[0])
            for tracked in self.engine.registry.optimizers:
                tracked.samples.add(samples)
        return super().training_step(*args, **kwargs)

    def _samples_in(self, batch: Any) -> float:
        trainer = self._trainer
        if isinstance(batch, Iterator):
            # The module fetches batches by itself.
            samples = math.nan
        elif self.readers and len(self.readers) == len(loaders_of(trainer)):
            samples = self._delivered
        else:
            combined = trainer.fit_loop._combined_loader
            assert combined is not None
            samples = samples_in(batch, None if combined._mode == "sequential" else combined.iterables)
        if math.isnan(samples) and not self._told_of_steps:
            self._told_of_steps = True
            say(
                "sparsecomm: batches do not tell how many samples they hold, so changes of replicas count by optimizer"
                " steps",
                trainer,
            )
        return samples


def samples_in(batch: Any, loaders: Any = None) -> float:
    """How many samples a batch holds: the first dimension that its tensors have in common; NaN where they have none.

    It looks at no values, and at few of many parts.

    >>> import torch
    >>> samples_in({"x": torch.zeros(8, 3), "y": torch.zeros(8), "scale": torch.ones(())})
    8
    >>> samples_in([torch.zeros(5), torch.zeros(7)])
    nan

    Args:
        batch: Tensors in any dictionaries, lists, tuples and dataclasses.
        loaders: What has delivered it. Of several dataloaders, in a collection as the batch is, samples add up. A
            dataloader delivers no more samples than its `batch_size`.
    """
    if isinstance(loaders, Mapping) and isinstance(batch, Mapping) and loaders.keys() == batch.keys():
        return sum(samples_in(batch[key], loader) for key, loader in loaders.items())
    if isinstance(loaders, (list, tuple)) and isinstance(batch, (list, tuple)) and len(loaders) == len(batch):
        return sum(map(samples_in, batch, loaders))
    if batch is None:
        # A dataloader that is at its end, while others are not.
        return 0
    tensors = (part for part in islice(_parts(batch), _PARTS) if isinstance(part, Tensor))
    sizes = {tensor.size(0) for tensor in tensors if tensor.ndim}
    most = getattr(loaders, "batch_size", None)
    if len(sizes) != 1 or (isinstance(most, int) and max(sizes) > most):
        return math.nan
    return sizes.pop()


def _parts(item: Any) -> Iterator[Any]:
    """The item, and all that it holds."""
    yield item
    if isinstance(item, Mapping):
        inner = iter(item.values())
    elif isinstance(item, (list, tuple)):
        inner = iter(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        inner = (getattr(item, field.name) for field in dataclasses.fields(item))
    else:
        return
    for each in inner:
        yield from _parts(each)
