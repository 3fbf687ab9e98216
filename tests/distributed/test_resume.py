"""A run that is stopped and resumed equals one that never stopped: weights, memories and counts, to the bit."""

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightnings
from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import ParameterAveraging, SparsityWarmup, methods
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.summed import in_regions, summed

FEATURES, CLASSES, BATCH, BATCHES = 12, 5, 4, 6


class Network(pl.LightningModule):
    """Has buffers, a parameter that only rank 0 uses, a learning rate schedule, and any optimizer."""

    def __init__(self, adam: bool = False, two: bool = False, nesterov: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.adam, self.two, self.nesterov = adam, two, nesterov
        # In manual optimization ddp does not broadcast buffers, and a checkpoint holds those of rank 0.
        middle = nn.BatchNorm1d(16) if norm and not two else nn.Identity()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), middle, nn.ReLU())
        self.head = nn.Linear(16, CLASSES)
        self.side = nn.Linear(16, CLASSES)
        self.automatic_optimization = not two

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.body(x)
        output = self.head(hidden)
        if self.global_rank == 0:
            output = output + self.side(hidden)
        return cross_entropy(output, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if not self.two:
            return self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        return None

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(parameters, lr=1e-2)
        dampening = 0.0 if self.nesterov else 0.1
        return torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, dampening=dampening, weight_decay=1e-3, nesterov=self.nesterov
        )

    def configure_optimizers(self) -> Any:
        if self.two:
            return [self._optimizer(self.body.parameters()), self._optimizer(self.head.parameters())]
        optimizer = self._optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Watch(pl.Callback):
    """Notes what a rank holds at the end of the last epoch, before the end of training changes it."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales += [scaler.get_scale()] if scaler is not None else []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        self.seen = {
            "weights": copy.deepcopy(pl_module.state_dict()),
            "optimizers": [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
        }
        # dense() has no state and writes no files.
        if isinstance(strategy, SparseCommStrategy) and strategy.engine.hook is None:
            state = copy.deepcopy(strategy.engine.state.state_dict())
            del state["ledger"]["seconds"]
            # A resumed run repeats what is not the method's, such as its set-up.
            rows = state["ledger"]["rows"]
            state["ledger"]["rows"] = {row: rows[row] for row in rows if row in ("gradients", "weight updates")}
            self.seen["state"] = state
        self.seen["scales"] = self.scales[-2 * BATCHES :]


def outside_launcher(rank: int, world_size: int) -> None:
    """Tells Lightning that the processes have been started already."""
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


def train(
    folder: Path,
    world_size: int,
    method: Method | None,
    epochs: int,
    model: pl.LightningModule | None = None,
    resume: Path | str | None = None,
    callbacks: tuple[pl.Callback, ...] = (),
    **options: Any,
) -> tuple[pl.Trainer, Watch]:
    """Trains in processes that are running already. Keeps a checkpoint for each epoch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * world_size * BATCHES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (len(x),), generator=generator)
    torch.manual_seed(7)
    watch = Watch()
    trainer = pl.Trainer(
        **{
            **QUIET,
            "devices": world_size,
            "strategy": (
                DDPStrategy(find_unused_parameters=True)
                if method is None
                else SparseCommStrategy(method, find_unused_parameters=True)
            ),
            "max_epochs": epochs,
            "default_root_dir": folder,
            "callbacks": [watch, ModelCheckpoint(folder, "{epoch}", save_top_k=-1), *callbacks],
            **options,
        }
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            ".*(num_workers|LeafSpec|Checkpoint directory|The dirpath|litlogger).*",
        )
        trainer.fit(
            Network() if model is None else model,
            DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True),
            ckpt_path=resume,
        )
    watch.seen["in the end"] = {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()}
    return trainer, watch


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """The places where two nested values are not equal to the bit."""
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        equal = same and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
        return [] if equal else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [where]
        return [found for i, pair in enumerate(zip(one, other)) for found in differences(*pair, f"{where}/{i}")]
    return [] if one == other else [f"{where}: {one} {other}"]


class Clamp(pl.Callback):
    """Keeps weights in a range, as some adversarial trainings do."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def _following() -> Method:
    """Its form for longer runs exchanges in every second step."""
    often, seldom = (methods.dgc(0.02, warmup_steps=4, every=every) for every in (1, 2))
    return often.following(lambda steps, ranks: seldom if steps > 2 * BATCHES else often)


CASES: dict[str, tuple[Callable[[], Method], dict[str, Any], Callable[[], tuple[pl.Callback, ...]]]] = {
    "dense": (methods.dense, {}, tuple),
    "gradient_dropping": (lambda: methods.gradient_dropping(0.05, warmup_steps=15), {"adam": True}, tuple),
    "local gradients, sum": (lambda: methods.gradient_dropping(0.05, local="sum", average_every=7), {}, tuple),
    "local gradients, partial": (
        lambda: methods.gradient_dropping(0.05, local="partial", average_every=7),
        {"adam": True},
        lambda: (ParameterAveraging(5, buffers=True, optimizer_state=True),),
    ),
    "dgc": (lambda: methods.dgc(0.02, warmup_epochs=2, clip=0.5), {}, tuple),
    "dgc, nesterov": (
        lambda: methods.dgc(0.02, warmup_steps=4),
        {"nesterov": True},
        lambda: (SparsityWarmup(steps=16),),
    ),
    "local_adam": (lambda: methods.local_adam(0.05, warmup_steps=4, clip=0.5), {"adam": True}, tuple),
    "dgc, late": (lambda: methods.dgc(0.02, warmup_steps=4, delay=1), {"nesterov": True}, tuple),
    "local_adam, late": (lambda: methods.local_adam(0.05, delay=1), {"adam": True}, tuple),
    "dgc, late, two optimizers": (lambda: methods.dgc(0.02, warmup_steps=4, delay=1), {"two": True}, tuple),
    "dgc, local steps": (lambda: methods.dgc(0.02, warmup_steps=4, every=3), {"nesterov": True}, tuple),
    "local_adam, local steps": (lambda: methods.local_adam(0.05, every=4), {"adam": True}, tuple),
    "dgc, ahead": (
        lambda: methods.dgc(0.02, warmup_steps=4, every=3, residual_in_weights=True),
        {"nesterov": True},
        tuple,
    ),
    "local_adam, ahead": (lambda: methods.local_adam(0.05, residual_in_weights=True), {"adam": True}, tuple),
    "local steps, by the run's length": (_following, {"nesterov": True}, tuple),
    "local steps, clamped": (lambda: methods.local_adam(0.05, every=4), {"adam": True}, lambda: (Clamp(),)),
    "dgc, local steps, two optimizers": (lambda: methods.dgc(0.02, warmup_steps=4, every=3), {"two": True}, tuple),
    "dgc, summed": (lambda: summed(methods.dgc, 0.2, warmup_steps=4), {}, tuple),
    "local_adam, summed": (lambda: summed(methods.local_adam, 0.2, warmup_steps=4), {"adam": True}, tuple),
    "dgc, regions": (lambda: in_regions(methods.dgc(0.02, warmup_steps=4)), {}, tuple),
    "local_adam, ok_topk": (lambda: methods.local_adam(0.05, exchange="ok_topk"), {"adam": True}, tuple),
    "dgc, two optimizers": (lambda: methods.dgc(0.02, warmup_steps=4), {"two": True}, tuple),
    "sbc": (lambda: methods.sbc(0.02, every=4), {"adam": True}, tuple),
    "sbc, ahead": (lambda: methods.sbc(0.02, every=4, residual_in_weights=True), {"adam": True}, tuple),
    "sbc, two optimizers": (lambda: methods.sbc(0.02, every=5), {"two": True}, tuple),
    "federated_averaging": (lambda: methods.federated_averaging(every=4), {}, tuple),
    "diloco": (lambda: methods.diloco(every=4, delay=3, mix=0.5), {"adam": True}, tuple),
    "sparse_loco": (lambda: methods.sparse_loco(every=4, fragments=2, delay=1), {"adam": True}, tuple),
    "streaming_diloco": (lambda: methods.streaming_diloco(every=4, delay=1), {"adam": True}, tuple),
    "muloco": (lambda: methods.muloco(every=3), {}, tuple),
    "des_loc": (lambda: methods.des_loc(every=2, first_every=2, second_every=3), {"adam": True}, tuple),
    "des_loc, in flight": (
        lambda: methods.des_loc(every=4, first_every=1, second_every=1, fragments=2, delay=3),
        {"adam": True},
        tuple,
    ),
    "sketched_sgd": (lambda: methods.sketched_sgd(density=0.02, columns=40, candidates=2), {}, tuple),
    "s2_reducer": (lambda: methods.s2_reducer(block_size=8), {"adam": True}, tuple),
    "powersgd": (lambda: methods.powersgd(1, dense_steps=3), {}, tuple),
    "quantized": (lambda: methods.quantized(4), {"adam": True}, tuple),
    "random_k": (lambda: methods.random_k(0.05), {}, tuple),
    "ok_topk": (lambda: methods.ok_topk(0.05, balance_every=5), {}, tuple),
    "aligned_topk": (lambda: methods.aligned_topk(0.05, block_size=8), {"adam": True}, tuple),
    "qsgd": (methods.qsgd, {}, tuple),
    "terngrad": (methods.terngrad, {"adam": True}, tuple),
    "natural": (methods.natural, {}, tuple),
    "onebit_sgd": (methods.onebit_sgd, {}, tuple),
    "ef_signsgd": (methods.ef_signsgd, {"adam": True}, tuple),
    "signsgd": (methods.signsgd, {}, tuple),
    "strom": (lambda: methods.strom(0.001), {}, tuple),
    "dryden": (lambda: methods.dryden(0.05), {"adam": True}, tuple),
    "adacomp": (lambda: methods.adacomp(bin_size=50), {}, tuple),
    "by entropy": (lambda: methods.dgc(0.05, warmup_steps=4, scope="entropy"), {}, tuple),
    "ef21": (lambda: methods.ef21(0.05, warmup_steps=4, clip=0.5), {"nesterov": True}, tuple),
    "ef21, adam": (lambda: methods.ef21(0.05), {"adam": True}, tuple),
    "ef21, plain": (lambda: methods.ef21(0.05, momentum_correction=False), {"adam": True}, tuple),
    "demo": (lambda: methods.demo(k=2, side=8), {}, tuple),
    "parallax": (lambda: methods.parallax(tables=["head.*"]), {"adam": True}, tuple),
    "omnireduce": (lambda: methods.omnireduce(block_density=0.3, block_size=8), {}, tuple),
    "sparcml": (lambda: methods.sparcml(density=0.1, bucket=32), {"adam": True}, tuple),
    "post_local_sgd": (lambda: methods.post_local_sgd(dense_steps=9, every=4), {"adam": True}, tuple),
    "post_local_sgd, in flight": (
        lambda: methods.post_local_sgd(dense_steps=3, every=4, fragments=2, delay=3),
        {},
        tuple,
    ),
    "heavymix": (lambda: methods.sketched_sgd(0.1, columns=40, recovery="heavymix"), {}, tuple),
    "clients": (lambda: methods.federated_averaging(every=4, fraction=0.5, weights=[1, 2]), {"adam": True}, tuple),
    "onebit_adam": (lambda: methods.onebit_adam(warmup_steps=4, clip=0.5), {"adam": True}, tuple),
    "onebit_adam, summed": (lambda: methods.onebit_adam(warmup_steps=9), {"adam": True}, tuple),
    "powersgd, two optimizers": (lambda: methods.powersgd(2), {"two": True}, tuple),
    "split": (lambda: methods.split(["head.*"], methods.gradient_dropping(0.1), methods.sbc(0.05, every=4)), {}, tuple),
    # With callbacks that average each rank's own weights over time.
    "sbc, moving average": (
        lambda: methods.sbc(0.02, every=4),
        {"adam": True, "norm": False},
        lambda: (lightnings.EMAWeightAveraging(decay=0.8),),
    ),
    "local gradients, stochastic average": (
        lambda: methods.gradient_dropping(0.05, local="sum", average_every=7),
        {"norm": False},
        lambda: (StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),),
    ),
}
assert CASES.keys() >= methods.RECIPES.keys()


def loss_scaler() -> dict[str, Any]:
    """A scaler that doubles its scale every other step, until some rank overflows."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**16, growth_interval=2))]}


SCALED = {"dgc, loss scaler": "dgc", "sbc, loss scaler": "sbc"}


QUICK = [
    "local gradients, partial",
    "dgc",
    "local_adam",
    "sbc, two optimizers",
    "sketched_sgd",
    "powersgd",
    "diloco",
    "des_loc, in flight",
    "sbc, moving average",
    "sbc, loss scaler",
]
# Lightning has had this callback since 2.6.
if not hasattr(lightnings, "EMAWeightAveraging"):
    QUICK.remove("sbc, moving average")
    del CASES["sbc, moving average"]
# In halves, so that each has time enough.
ALL = [pytest.param(2, [*CASES, *SCALED][half::2], marks=pytest.mark.slow) for half in (0, 1)]
SUMMED = [name for name in CASES if name.endswith(", summed")]
"""Two ranks do not add up pieces."""


def ranks_of(name: str) -> int:
    return 3 if name in SUMMED else 2


def _stopped_and_not(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, list[str]]:
    outside_launcher(rank, world_size)
    found = {}
    for name in names:
        method, model, callbacks = CASES[SCALED.get(name, name)]
        place, watches = folder / name.replace(" ", "_"), []
        for where, resume in ((place, None), (place / "resumed", place / "epoch=0.ckpt")):
            options = loss_scaler() if name in SCALED else {}
            _, watch = train(where, world_size, method(), 3, Network(**model), resume, callbacks(), **options)
            watches.append(watch)
        found[name] = differences(watches[0].seen, watches[1].seen)
        if name in SCALED:
            assert min(watches[0].scales) < max(watches[0].scales), "nothing was skipped"
    return found


def _ended_and_resumed(rank: int, folder: Path, names: list[str]) -> dict[str, list[str]]:
    outside_launcher(rank, 2)
    found = {}
    for name in names:
        method, model, callbacks = CASES[name]
        place = folder / name.replace(" ", "_")
        _, ended = train(place, 2, method(), 3, Network(**model), callbacks=callbacks())
        _, resumed = train(place, 2, method(), 3, Network(**model), place / "epoch=2.ckpt", callbacks())
        assert resumed.seen.keys() == {"in the end"}, "something was trained"
        found[name] = differences(ended.seen["in the end"], resumed.seen["in the end"])
    return found


def test_a_run_that_is_resumed_with_nothing_left_to_do_ends_all_the_same(tmp_path: Path) -> None:
    """Like a job that is started again after it has ended. Lightning trains nothing, and calls no hook at the end."""
    names = ["sbc", "sbc, two optimizers", "federated_averaging", "diloco", "split", "local gradients, partial"]
    for rank in run_ranks(tmp_path, 2, _ended_and_resumed, tmp_path, names, timeout=110):
        assert rank == {name: [] for name in names}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world_size", "names"), [(2, QUICK), (3, SUMMED), *ALL], ids=["some", "summed", "half", "other half"]
)
def test_a_resumed_run_is_the_run_that_never_stopped(world_size: int, names: list[str], tmp_path: Path) -> None:
    for rank in run_ranks(tmp_path, world_size, _stopped_and_not, world_size, tmp_path, names, timeout=110):
        assert rank == {name: [] for name in names}
