"""The samples of a Trainer that is one of several replicas: dealt out anew in each exchange."""

import hashlib
import math
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from lightning_sparsecomm.elastic.deal import Deal
from lightning_sparsecomm.elastic.reader import Loading, Reader
from lightning_sparsecomm.frontends.expected import steps_left
from lightning_sparsecomm.frontends.reporting import say
from lightning_sparsecomm.frontends.trainer import TrainerMixin

if TYPE_CHECKING:
    import pytorch_lightning as pl

SAMPLES = "sparsecomm_samples"
"""The entry of a checkpoint that says which samples of the epoch have been read."""


class DealingMixin(TrainerMixin):
    """Deals the samples of the training dataloaders out among replicas, where Lightning puts in a sampler of its own.

    Attributes:
        readers: By number of the dataloader, what this replica reads of it; empty where the user's own samplers do.
    """

    replica: str
    readers: dict[int, Reader] = {}  # noqa: RUF012
    _samples: dict[int, Any] = {}  # noqa: RUF012

    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == "fit":
            self.readers = {}
        super().setup(trainer)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each replica's loaders have all samples: which of them it reads, replicas agree upon."""
        # By this, samplers that Lightning has put in are told from those of the user.
        own = int.from_bytes(hashlib.blake2b(self.replica.encode(), digest_size=4).digest(), "big")
        return {"num_replicas": 1, "rank": 0, "seed": own}

    def process_dataloader(self, dataloader: Any) -> Any:
        dataloader, trainer = super().process_dataloader(dataloader), self._trainer
        sampler = getattr(dataloader, "sampler", None)
        put_in = isinstance(sampler, DistributedSampler) and sampler.seed == self.distributed_sampler_kwargs["seed"]
        if not put_in or not trainer.training or vars(trainer).get("overfit_batches"):
            return dataloader
        if not (dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler):
            kind = type(dataloader.batch_sampler).__name__
            say(f"sparsecomm: each replica reads all samples, by its {kind}, as it chooses batches by itself", trainer)
            return dataloader
        if not getattr(dataloader, "in_order", True):
            raise ValueError(
                "in_order must be True in dataloaders whose samples replicas share: by the order, they know which have"
                " been read. Leave it out, or pass a sampler of your own and Trainer(use_distributed_sampler=False)."
            )
        return _dealt(dataloader, self)

    def _read_as(self, name: str) -> Sequence[Reader]:
        """The readers of a replica of that name, at the beginning of a fit."""
        loaders = enumerate(loaders_of(self._trainer))
        self.readers = {number: Reader(name, each.loading) for number, each in loaders if hasattr(each, "loading")}
        for number, reader in self.readers.items():
            saved = self._samples.get(number)
            if saved is not None and saved["deal"]["size"] == reader.loading.size:
                reader.deal, reader.number = Deal.from_plain(saved["deal"]), saved["number"]
        # Those that join in the first meeting take over how far this replica is in its epoch.
        self._note_batches()
        return list(self.readers.values())

    def _note_batches(self) -> None:
        """Batches of the epoch that were read before this fit, or by others."""
        for reader in self.readers.values():
            reader.fetched = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def _begin_reading(self) -> None:
        """Replicas have met: from here on, a Trainer counts the batches of its epoch as they are dealt."""
        self._note_batches()
        for reader in self.readers.values():
            if not reader.fetched:
                # Lightning ends a fit whose epoch has no batches.
                reader.skip_empty()
        self._note_length()

    def _reader_of(self, loader: Any) -> Reader | None:
        """What this replica reads of a loader; None before it has met others."""
        numbers = [number for number, each in enumerate(loaders_of(self._trainer)) if each is loader]
        reader = self.readers.get(numbers[0]) if numbers else None
        return reader if reader is not None and reader.deal is not None else None

    def _note_length(self) -> None:
        """An epoch has as many batches as this replica has read, and has still to read, in the pass."""
        trainer = self._trainer
        loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
        length = _length_of(loop._combined_loader)
        if length is None or fetcher is None or fetcher.length is None or not self.readers:
            return
        loop.max_batches = fetcher.length = length
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = math.inf if interval == 1 else max(1, int(length * interval))

    def _before_batch(self) -> None:
        """A loader is about to deliver."""
        self._note_length()
        trainer = self._trainer
        length, fetcher = trainer.fit_loop.max_batches, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        later = max(reader.batches_of_a_pass for reader in self.readers.values())
        done = self.engine.registry.steps
        self.engine.length = done + steps_left(trainer, fetcher.fetched, length, later)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves on the replica that leads; does nothing on others, as on ranks other than 0."""
        if self._leads:
            joined = {number: reader for number, reader in self.readers.items() if reader.deal is not None}
            if joined and "optimizer_states" in checkpoint:
                checkpoint[SAMPLES] = {number: reader.saved() for number, reader in joined.items()}
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._leads:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._samples = checkpoint.get(SAMPLES, {})
        return checkpoint

    @property
    def _leads(self) -> bool:
        raise NotImplementedError

    def teardown(self) -> None:
        super().teardown()
        self._samples = {}


def _kind_of(kind: Any) -> Any:
    """The class of a dataloader that reads what its replica holds, for those that Lightning makes of a class."""

    class Dealt(kind):  # type: ignore[misc]
        strategy: DealingMixin
        loading: Loading
        batches: Any

        def __iter__(self) -> Iterator[Any]:
            # As Lightning asks for the length before the first batch.
            if (reader := self.strategy._reader_of(self)) is not None:
                reader.begin()
            return self._delivered()

        def _delivered(self) -> Iterator[Any]:
            reader = self.strategy._reader_of(self)
            if reader is None:
                yield from super().__iter__()
                return
            _check_size(reader, self.loading)
            reader.loading = self.loading
            while not reader.over:
                for batch in super().__iter__():
                    self.strategy._before_batch()
                    if reader.deliver():
                        yield batch

        def __len__(self) -> int:
            reader = self.strategy._reader_of(self)
            return len(self.batches) if reader is None else reader.fetched + reader.left()

    Dealt.__name__, Dealt.__qualname__, Dealt.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Dealt


def _check_size(reader: Reader, loading: Loading) -> None:
    if reader.loading.size != loading.size:
        raise ValueError(
            f"a dataloader that replaces another must have as many samples, {reader.loading.size:,}; got"
            f" {loading.size:,}. To change that, pass a sampler of your own and"
            " Trainer(use_distributed_sampler=False)."
        )


class _Batches:
    """What a dataloader takes its indices from.

    Args:
        loader: The dataloader.
        sampler: Lightning's, with all samples.
        plain: What it has had instead of this.
    """

    def __init__(self, loader: Any, sampler: Any, plain: Any) -> None:
        self.sampler = sampler
        self._loader, self._plain = loader, plain
        # By number of a pass and its seed.
        self._orders: dict[tuple[int, int], Sequence[Any]] = {}

    def __iter__(self) -> Iterator[Any]:
        reader = self._loader.strategy._reader_of(self._loader)
        if reader is None:
            return iter(self._plain)
        assert reader.deal is not None
        size, seed = reader.loading.size, reader.deal.seed
        batches = reader.batches(lambda position: self._order(position // size, seed)[position % size])
        # Without batches of its own, a loader takes single indices.
        return batches if self._loader.batch_sampler is self else (batch[0] for batch in batches)

    def __len__(self) -> int:
        return len(self._plain)

    def _order(self, number: int, seed: int) -> Sequence[Any]:
        key = number, seed
        if key not in self._orders:
            # Of the pass before, some may come back.
            self._orders = dict(list(self._orders.items())[-1:]) | {key: order_of(self.sampler, number, seed)}
        return self._orders[key]


def order_of(sampler: Any, number: int, seed: int) -> Sequence[Any]:
    """The indices of a pass, in an order that is equal on all replicas.

    Args:
        sampler: A `DistributedSampler` for one replica, or Lightning's around one of the user, which draws from the
            random numbers of torch, NumPy or Python.
        number: Of the pass.
        seed: Of the run.
    """
    sampler.seed = seed
    sampler.set_epoch(number)
    if type(sampler) is DistributedSampler:
        count = len(sampler)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + number))
        return array("q", (order if sampler.shuffle else torch.arange(count)).numpy().tobytes())
    with _seeded(seed + number):
        return list(sampler)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context with random numbers of its own."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _dealt(loader: Any, strategy: DealingMixin) -> Any:
    """The same loader, whose samples are dealt out."""
    kind, sampler = type(loader), loader.sampler
    loader.__class__ = _kind_of(kind)
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    own = loader.batch_sampler is not None
    size, seed = len(sampler), int(os.environ.get("PL_GLOBAL_SEED", 0))
    loader.strategy = strategy
    loader.loading = Loading(size, loader.batch_size if own else 1, own and loader.drop_last, ahead, seed)
    loader.batches = _Batches(loader, sampler, loader.batch_sampler if own else sampler)
    # DataLoader refuses to set these once it is made.
    object.__setattr__(loader, "batch_sampler" if own else "sampler", loader.batches)
    return loader


def loaders_of(trainer: "pl.Trainer") -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
