"""Replicas with batches of different sizes: what each has trained on, and how much it counts."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.members import Plan, successor
from lightning_sparsecomm.elastic.rounds import Rounds
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy
from tests.distributed.launch import QUIET
from tests.elastic.replicas import TIMEOUTS

RATE = 0.05

Batch = tuple[np.ndarray, np.ndarray]
Kind = Literal["dealt", "own", "stream", "two loaders", "opaque"]
"""Whose samples they are, or how batches come."""


class _Twice(torch.optim.SGD):
    """Computes each loss twice, as LBFGS does more often."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class _Linear(pl.LightningModule):
    """A linear regression by SGD in float64. It notes its batches, for each step."""

    def __init__(self, accumulate: int | None, optimizer: type[torch.optim.SGD]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.steps: list[list[Batch]] = []
        self._batches: list[Batch] = []
        # Of a module that steps by itself: batches for each step.
        self._accumulate = accumulate
        self.automatic_optimization = accumulate is None
        self._optimizer, self._noted = optimizer, -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        x, y = (torch.cat([part[each] for part in parts]) for each in range(2))
        if (now := self.trainer.fit_loop.epoch_loop.total_batch_idx) > self._noted:
            self._batches.append((x.numpy(), y.numpy()))
        self._noted = now
        loss = (x @ self.weight - y).square().mean()
        if self._accumulate is None:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / self._accumulate)
        if len(self._batches) == self._accumulate:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step > len(self.steps):
            self.steps.append(self._batches)
            self._batches = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters(), lr=RATE)


class _Stream(IterableDataset[Any]):
    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self._samples[number] for number in range(len(self._samples)))


def _opaque(samples: Sequence[Any]) -> Any:
    """A batch whose size no tensor tells."""
    x, y = (torch.stack(each) for each in zip(*samples))
    return x, y, torch.zeros(len(samples) + 1)


def fit(
    pipe: Connection,
    address: str,
    name: str,
    method: Any,
    size: int,
    batch_size: int,
    kind: Kind = "own",
    manual: bool = False,
    accumulate: int = 1,
    twice: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains, and returns the weights, and the batches of each step.

    Args:
        pipe: To the test.
        address: Of the lighthouse.
        name: Of the replica.
        method: As of the strategy.
        size: Samples in all.
        batch_size: Of each loader.
        kind: Of the loaders.
        manual: Whether the module steps by itself.
        accumulate: Batches for each step.
        twice: Whether the optimizer computes each loss twice.
        options: Of the Trainer.
    """
    # Where samples are dealt out, all have the same.
    generator = torch.Generator().manual_seed(0 if kind == "dealt" else ord(name))
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) + torch.randn(size, generator=generator)
    samples = TensorDataset(x, y)
    collate = _opaque if kind == "opaque" else None
    loader: Any = DataLoader(_Stream(samples) if kind == "stream" else samples, batch_size, collate_fn=collate)
    if kind == "two loaders":
        loader = {"first": loader, "second": DataLoader(samples, batch_size // 2)}
    model = _Linear(accumulate if manual else None, _Twice if twice else torch.optim.SGD)
    strategy = ElasticSparseCommStrategy(method, lighthouse=address, replica=name, **TIMEOUTS)
    options = {"max_epochs": -1, "use_distributed_sampler": kind == "dealt", "devices": 1, **QUIET, **options}
    if not manual:
        options["accumulate_grad_batches"] = accumulate
    trainer = pl.Trainer(strategy=strategy, enable_checkpointing=False, **options)
    trainer.fit(model, loader)
    return {"weight": model.weight.detach().numpy(), "steps": model.steps}


def gradient(weight: np.ndarray, batches: Sequence[Batch], accumulate: int) -> np.ndarray:
    """Of the squared error, as Lightning accumulates it."""
    return sum(2 / len(y) * x.T @ (x @ weight - y) for x, y in batches) / accumulate


def count(steps: Sequence[Sequence[Batch]]) -> int:
    """The samples of some steps."""
    return sum(len(y) for batches in steps for _, y in batches)


class _Scale:
    """How much this replica has counted in each exchange, and what it has trained on since the last one that counts.

    It counts samples by itself, in `training_step`.
    """

    def __init__(self) -> None:
        self.said: dict[str, tuple[int, float, int]] = {}
        self._trained = self._counted = 0
        self._at: dict[str, int] = {}

    def watch(self, module: Any) -> None:
        """From now on, in this process; for methods without fragments."""
        step, make, commit, take = module.training_step, Rounds.make, Rounds.commit, Joining.take

        def stepped(model: Any, batch: Tensor, batch_idx: int) -> Any:
            self._trained += len(batch)
            return step(model, batch, batch_idx)

        def made(rounds: Rounds, plan: Plan, offer: Any, names: Any, turn: Any, weight: float = 1.0) -> Any:
            state = successor(plan.state, names, rounds._quorum.number)
            self._at[state] = self._trained
            self.said[state] = len(names), weight, self._trained - self._counted
            return make(rounds, plan, offer, names, turn, weight)

        def committed(rounds: Rounds) -> Any:
            if rounds.made is not None:
                self._counted = self._at[rounds.made.state]
            return commit(rounds)

        def taken(joining: Joining, *args: Any) -> Any:
            self._counted = self._trained
            return take(joining, *args)

        module.training_step = stepped
        Rounds.make, Rounds.commit, Joining.take = made, committed, taken  # type: ignore[method-assign]


SCALE = _Scale()


def weighed(results: Sequence[dict[str, Any]], before: int = 0) -> list[list[float]]:
    """The weights of each exchange that all who took part in it have told of; checks that they are by samples.

    Args:
        results: Of `train`, with what `SCALE` has.
        before: Samples that the first replica had trained on in an earlier process, in its first exchange.
    """
    found = []
    for state in results[0]["scale"]:
        said = [each["scale"][state] for each in results if state in each["scale"]]
        if len(said) < said[0][0]:
            continue
        samples = [trained for _, _, trained in said]
        samples[0] += before if not found else 0
        weights = [weight for _, weight, _ in said]
        mean = sum(samples) / len(samples)
        np.testing.assert_allclose(weights, [each / mean if mean else 1.0 for each in samples], rtol=1e-12)
        found.append(weights)
    return found
