"""A run goes on with fewer ranks, then with more: what waits is kept, in units that count alike in the new mean."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.summed import in_regions, summed
from tests.distributed.test_resume import outside_launcher

RATE, STEPS = 0.1, 5  # Of one world.
# Ranks, and batches in an epoch of each: also fewer than the world before has already made of one.
WORLDS = ((3, 8), (2, 4), (4, 9), (1, 3), (2, 6))

METHODS: dict[str, Callable[[], Method]] = {
    "gradient_dropping": lambda: methods.gradient_dropping(0.1),
    "in regions": lambda: in_regions(methods.gradient_dropping(0.1)),
    "dgc": lambda: methods.dgc(0.1, warmup_steps=0),
    "dgc, late": lambda: methods.dgc(0.1, warmup_steps=0, delay=1),
    "dgc, local steps": lambda: methods.dgc(0.1, warmup_steps=0, every=3),
    "dgc, ahead": lambda: methods.dgc(0.1, warmup_steps=0, residual_in_weights=True),
    "dgc, summed": lambda: summed(methods.dgc, 0.2, warmup_steps=0),
    "quantized": lambda: methods.quantized(2),
    "ok_topk": lambda: methods.ok_topk(0.1, balance_every=3),
    "random_k": lambda: methods.random_k(0.1),
    "aligned_topk": lambda: methods.aligned_topk(0.1, block_size=4),
    "powersgd": lambda: methods.powersgd(1, dense_steps=0),
    "s2_reducer": lambda: methods.s2_reducer(block_size=4),
    "sketched_sgd": lambda: methods.sketched_sgd(density=0.1, columns=20, candidates=2),
    "sbc": lambda: methods.sbc(0.1, every=3),
    "sbc, ahead": lambda: methods.sbc(0.1, every=3, residual_in_weights=True),
    "sparse_loco": lambda: methods.sparse_loco(every=3),
    "sbc, streamed": lambda: methods.sbc(0.1, every=3, fragments=2, delay=2),
}

# A sketch gives back estimates, and a residual that decays forgets: these lose something in any world.
LOSSY = ("s2_reducer", "sparse_loco")


class Network(pl.LightningModule):
    """Trained by SGD without momentum, so that each gradient moves weights by the rate, whenever it arrives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.taken = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in self.named_parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.network(batch) - batch[:, :3].sin()).square().mean()

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            self.taken[name] += parameter.grad

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def _held(strategy: SparseCommStrategy) -> dict[str, dict[str, Tensor]]:
    """This rank's state, by kind and parameter name."""
    (stream,) = strategy.engine.state.state_dict()["streams"]
    held: dict[str, dict[str, Tensor]] = stream["held"]
    return held


def _total(held: dict[str, dict[str, Tensor]], module: Network) -> dict[str, np.ndarray]:
    """This rank's weights, and what they will move by when all that waits has arrived."""
    anchors = held.get("GradientSync.late, anchors", {}) | held.get("GradientSync.local steps, anchors", {})
    found = {}
    for name, parameter in module.named_parameters():
        total = anchors.get(name, parameter).detach().double()
        for kind in ("GradientSync.ErrorFeedback", "GradientSync.late, shared"):
            if name in held.get(kind, {}):
                total = total - RATE * held[kind][name].double()
        # Weights that are ahead have the residual in them.
        if name in held.get("DeltaSync.ErrorFeedback", {}) and not held.get("DeltaSync.ahead", {}).get(name):
            total = total + held["DeltaSync.ErrorFeedback"][name].double()
        # What is in flight: sent, in no residual any more, and neither in the weights.
        if name in (flying := held.get("DeltaSync.in flight, mean", {})):
            began, anchor = (held[f"DeltaSync.{kind}"][name] for kind in ("in flight, weights at its start", "anchor"))
            total = total + flying[name].double() - (began.double() - anchor.double())
        found[name] = total.numpy().copy()
    return found


class Weighing(pl.Callback):
    """Notes the total when a world begins, and when its last step is saved; `waits` is the largest residual."""

    def __init__(self) -> None:
        self.totals: list[dict[str, np.ndarray]] = []
        self.waits = 0.0

    def _note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SparseCommStrategy) and isinstance(module, Network)
        held = _held(strategy)
        self.totals.append(_total(held, module))
        residuals = [part for kind, parts in held.items() if kind.endswith(".ErrorFeedback") for part in parts.values()]
        self.waits = RATE * max((float(part.abs().max()) for part in residuals), default=0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step % STEPS == 0:
            self._note(trainer, pl_module)
            # A run's last step would send what waits. The checkpoint is saved after this, and before the run ends.
            trainer.should_stop = True


def _world(rank: int, world_size: int, batches: int, number: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """Trains on in one world; by method, the totals, what the gradients of this rank add up to, and how much waits."""
    outside_launcher(rank, world_size)
    found: dict[str, Any] = {}
    for name in names:
        model, weighing = Network(), Weighing()
        checkpoints = ModelCheckpoint(
            folder / name, "last", every_n_train_steps=STEPS, save_top_k=1, enable_version_counter=False
        )
        trainer = pl.Trainer(
            devices=world_size,
            strategy=SparseCommStrategy(METHODS[name]()),
            max_steps=100,
            callbacks=[weighing, checkpoints],
            use_distributed_sampler=False,
            **QUIET,
        )
        # Each rank has data of its own.
        samples = torch.randn(4 * batches, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", ".*(empty memories|is lost|no place|other code than the optimizer).*")
            trainer.fit(model, DataLoader(samples, batch_size=4), ckpt_path="last")
        assert trainer.global_step == STEPS * (number + 1)
        found[name] = weighing.totals, {key: value.numpy() for key, value in model.taken.items()}, weighing.waits
    return found


def _mean(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "worlds"),
    [
        (["dgc, summed", "dgc, local steps", "sbc"], WORLDS[:3]),
        pytest.param([*METHODS], WORLDS, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_what_waits_is_kept_when_the_number_of_ranks_changes(
    names: list[str], worlds: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """In the mean over ranks: weights + what waits = weights at the start − rate · all gradients, in whatever world."""
    before: dict[str, dict[str, np.ndarray]] = {}
    for number, (world_size, batches) in enumerate(worlds):
        ranks = run_ranks(tmp_path, world_size, _world, world_size, batches, number, tmp_path, names, timeout=110)
        for name in names:
            begins = _mean([rank[name][0][0] for rank in ranks])
            taken = _mean([rank[name][1] for rank in ranks])
            ends = _mean([rank[name][0][1] for rank in ranks])
            assert min(rank[name][2] for rank in ranks) > 1e-3, "nothing waits"
            for key, value in begins.items():
                if number:
                    np.testing.assert_allclose(value, before[name][key], rtol=0, atol=2e-6, err_msg=f"{name}, {key}")
                if name not in LOSSY:
                    moved = value - RATE * taken[key]
                    np.testing.assert_allclose(ends[key], moved, rtol=0, atol=2e-6, err_msg=f"{name}, {key}")
            before[name] = ends
