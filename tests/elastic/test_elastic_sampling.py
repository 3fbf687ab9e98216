"""Which samples real replicas read, while some come and go, and after resuming."""

import multiprocessing
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import methods
from lightning_sparsecomm.elastic.reader import Reader
from lightning_sparsecomm.elastic.turns import ElasticTurns
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy
from tests.distributed.launch import QUIET
from tests.elastic.replicas import TIMEOUTS, Replica, lighthouse, needs_torchft, replicas

pytestmark = [needs_torchft, pytest.mark.slow, pytest.mark.timeout(300)]

SIZE, BATCH = 120, 4
DILOCO = methods.diloco(every=5, outer_lr=0.5)
DROPPING = methods.gradient_dropping(density=0.2)
FLYING = methods.streaming_diloco(every=5, fragments=1, delay=2, outer_lr=0.5)

Read = tuple[int, list[int], list[int]]
"""Rounds that had counted before, and the positions and indices of a batch."""


class Model(pl.LightningModule):
    """Notes what it reads, and at each of its stops tells it, and waits for a word."""

    def __init__(self, pipe: Connection, stops: Sequence[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.pipe, self.stops = pipe, stops
        self.read: list[Read] = []
        self.positions: list[int] = []
        self.epochs: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        turns = self.trainer.strategy.turns  # type: ignore[attr-defined]
        self.read.append((turns.round, self.positions, batch[0].flatten().int().tolist()))
        self.epochs.append(self.trainer.current_epoch)
        return self.layer(batch[0] / SIZE).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step in self.stops:
            turns = self.trainer.strategy.turns  # type: ignore[attr-defined]
            self.pipe.send(("told", (turns.round, self.read)))
            self.pipe.recv()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(
    pipe: Connection,
    address: str,
    name: str,
    method: Any,
    stops: Sequence[int] = (),
    workers: int = 0,
    save: str | None = None,
    ckpt_path: str | None = None,
    size: int = SIZE,
    drop_last: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains, and returns what the replica has read."""
    # Workers of loaders are children, which Python forbids those that it ends with the test.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = Model(pipe, stops)
    deliver, begin = Reader.deliver, ElasticTurns.begin

    def delivering(reader: Reader) -> bool:
        spans = reader._fetched[0].spans
        model.positions = [position for span in spans for position in range(*span)]
        return deliver(reader)

    def beginning(turns: ElasticTurns) -> None:
        pipe.send(("told", "ready"))
        pipe.recv()
        begin(turns)

    Reader.deliver = delivering  # type: ignore[method-assign]
    ElasticTurns.begin = beginning  # type: ignore[method-assign]
    data = TensorDataset(torch.arange(float(size)).unsqueeze(1))
    strategy = ElasticSparseCommStrategy(method, lighthouse=address, replica=name, **TIMEOUTS)
    if save is not None:
        folder, _, filename = save.rpartition("/")
        options["callbacks"] = [ModelCheckpoint(folder, filename, save_top_k=-1, every_n_train_steps=7)]
    options = {"num_sanity_val_steps": 0, **options}
    trainer = pl.Trainer(strategy=strategy, devices=1, enable_checkpointing=save is not None, **QUIET, **options)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, drop_last=drop_last)
    trainer.fit(model, loader, DataLoader(data, SIZE), ckpt_path=ckpt_path)
    return {
        "read": model.read,
        "epochs": model.epochs,
        "validated": model.validated,
        "steps": trainer.global_step,
        "borrowed": sum(reader.borrowed for reader in strategy.readers.values()),
    }


def together(start: Any, address: str, method: Any, names: str, last_stops: Sequence[int] = (), **options: Any) -> Any:
    """Replicas that begin together; the last one stops after some steps."""
    begun: list[Replica] = []
    for name in names:
        begun.append(start(train, address, name, method, last_stops if name == names[-1] else (), **options))
    for replica in begun:
        assert replica.hear() == "ready"
    for replica in begun:
        replica.say("go on")
    return begun


def counts(read: Sequence[Read]) -> Counter[int]:
    return Counter(position for _, positions, _ in read for position in positions)


def check_order(read: Sequence[Read]) -> None:
    """All replicas share the order of each pass."""
    for _, positions, indices in read:
        orders = {
            number: torch.randperm(SIZE, generator=torch.Generator().manual_seed(number)).tolist()
            for number in {position // SIZE for position in positions}
        }
        assert indices == [orders[position // SIZE][position % SIZE] for position in positions]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("method", [DILOCO, DROPPING, FLYING], ids=["diloco", "gradient_dropping", "in_flight"])
def test_each_sample_counts_once_in_an_epoch_though_one_is_killed_and_one_joins(method: Any, workers: int) -> None:
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, "abc", [7], workers=workers, max_epochs=4)
        rounds, lost = c.hear()
        # The others wait for it in their next exchange: so they have not ended yet when the new one comes.
        d = start(train, address, "d", method, workers=workers, max_epochs=4)
        assert d.hear() == "ready"
        d.say("go on")
        c.kill()
        results = [replica.hear() for replica in (a, b, d)]
    # In flight, what is read before the exchange has landed is not in it.
    counted = [each for each in lost if each[0] < rounds] if method is DROPPING else lost[: 5 * rounds]
    if method is not DROPPING:
        assert len(counted) < len(lost)
    everything = [*counted, *(each for result in results for each in result["read"])]
    check_order(everything)
    found = counts(everything)
    assert max(found.values()) == 1
    # What the lost one had read, and nobody has counted, others have read again.
    assert all(found[position] == 1 for _, positions, _ in lost for position in positions)
    # All of three epochs and, of the last one, all but what replicas held that had not ended when the first one did.
    missing = [position for position in range(4 * SIZE) if not found[position]]
    assert all(position >= 3 * SIZE for position in missing)
    assert len(missing) <= 2 * BATCH
    for result in results:
        assert not result["borrowed"]
        assert set(result["epochs"]) <= set(range(4))
    # Each epoch of a replica ends with a validation, after a third or half of the batches.
    assert len(results[0]["validated"]) == 4
    assert results[0]["steps"] < 4 * SIZE / BATCH / 2


def test_a_run_resumes_with_another_number_of_replicas_where_it_was(tmp_path: Path) -> None:
    save = str(tmp_path / "checkpoints" / "{step}")
    options = {"save": save, "limit_val_batches": 0}
    with lighthouse() as address, replicas() as start:
        begun = together(start, address, DROPPING, "abc", max_steps=7, **options)
        before = [each for replica in begun for each in replica.hear()["read"]]
    checkpoint = str(tmp_path / "checkpoints" / "step=7.ckpt")
    # Both are there in the first meeting, and one gets from the other how far it is in the epoch: beyond its half.
    with lighthouse(least=2) as address, replicas() as start:
        begun = together(start, address, DROPPING, "ab", ckpt_path=checkpoint, max_epochs=2, max_steps=-1, **options)
        results = [replica.hear() for replica in begun]
    after = [each for result in results for each in result["read"]]
    assert [set(result["epochs"]) for result in results] == [{0, 1}] * 2
    found = counts([*before, *after])
    check_order(after)
    assert max(found.values()) == 1
    missing = [position for position in range(2 * SIZE) if not found[position]]
    assert all(position >= SIZE for position in missing)
    assert len(missing) <= 2 * BATCH


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_replica_trains_though_it_gets_no_batch_of_the_first_pass(drop_last: bool) -> None:
    options = {"size": 2 * BATCH + 2 * drop_last, "drop_last": drop_last, "max_epochs": 6}
    with lighthouse(least=3) as address, replicas() as start:
        begun = together(start, address, DILOCO, "abc", **options)
        assert all(replica.hear()["steps"] for replica in begun)


def test_replicas_with_unequal_data_are_refused() -> None:
    """And those whose user deals samples out."""
    with lighthouse() as address, replicas() as start:
        (a,) = together(start, address, DILOCO, "a", [6], max_steps=20)
        a.hear()
        b = start(train, address, "b", DILOCO, max_steps=20, use_distributed_sampler=False)
        assert b.hear() == "ready"
        b.say("go on")
        a.say("go on")
        with pytest.raises(AssertionError, match="the number of training samples must be equal on all replicas"):
            b.hear()
        assert a.hear()["steps"] == 20
