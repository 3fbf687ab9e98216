"""What cannot work is refused before training, and in training what must not go on: each error names the parameter, the
value, the rule and the remedy."""

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader

from lightning_sparsecomm import (
    BucketSync,
    Channel,
    CompressionMonitor,
    DeltaSync,
    ErrorFeedback,
    GradientSync,
    Method,
    NonFiniteGradientError,
    ParameterAveraging,
    SparsityWarmup,
    wire,
)
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, SketchedTopK
from lightning_sparsecomm.memory import MomentumCorrection
from lightning_sparsecomm.methods import RECIPES, dense, dgc, gradient_dropping
from lightning_sparsecomm.schedules import DensityWarmup
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import run_ranks

# Construction


@pytest.mark.parametrize(
    ("density", "error", "text"),
    [
        (
            0,
            ValueError,
            "density must be in (0, 1]: the fraction of elements sent; got 0. Use 0.01 for a hundredth, or dense()",
        ),
        (-1, ValueError, "density must be in (0, 1]: the fraction of elements sent; got -1."),
        (1.5, ValueError, "density must be in (0, 1]: the fraction of elements sent; got 1.5."),
        (100, ValueError, "density must be in (0, 1]: the fraction of elements sent; got 100. Did you mean 0.01?"),
        (float("nan"), ValueError, "density must be in (0, 1]: the fraction of elements sent; got nan. Use 0.01 for"),
        (float("inf"), ValueError, "density must be in (0, 1]: the fraction of elements sent; got inf. Use 0.01 for"),
        ("x", TypeError, "density must be a number in (0, 1] or a Schedule; got 'x'."),
        (True, TypeError, "density must be a number in (0, 1] or a Schedule; got True."),
        (None, TypeError, "density must be a number in (0, 1] or a Schedule; got None."),
    ],
)
@pytest.mark.parametrize("make", [gradient_dropping, dgc, lambda density: DensityWarmup(density, 7)])
def test_density(make: Callable[..., object], density: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make(density=density)


def construction(text: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=re.escape(text))


def test_parts() -> None:
    with construction("exclude must be a list of patterns; got the string '*.bias'. Use ['*.bias'].", TypeError):
        gradient_dropping(exclude="*.bias")
    with construction("parameters must be a list of patterns; got the string 'head'. Use ['head'].", TypeError):
        GradientSync(Channel(DenseAllReduce()), parameters="head")
    with construction("scope must be 'model' (rank all elements together) or 'tensor'"):
        gradient_dropping(scope="layer")
    with construction("values must be one of float32, float16; got 'int8'. Use 'float32'"):
        gradient_dropping(values="int8")
    with construction("wire_dtype must be one of same, float32, float16, bfloat16; got 'fp16'. 'same' sends"):
        dense("fp16")
    with construction("decay must be in (0, 1]: the part of the residual that is kept; got 0. Use 1 to keep all."):
        ErrorFeedback(decay=0)
    with construction("warmup_steps must be a whole number, 0 or more; got -1. Use 0 for no warm-up."):
        dgc(warmup_steps=-1)
    with construction("warmup_epochs must be a whole number, 0 or more; got 1.5. Use 0 for no warm-up."):
        dgc(warmup_epochs=1.5)
    with construction("a warm-up is counted either in steps or in epochs; got steps=0, epochs=0. Give one of them"):
        SparsityWarmup()
    with construction("a warm-up's shape must be 'exponential', 'inverse_time' or a list of densities; got 'linear'"):
        SparsityWarmup(steps=5, shape="linear")
    with construction("each density of a warm-up must be in (0, 1]: the fraction of elements sent; got 25."):
        SparsityWarmup(steps=5, shape=[25, 0.1])
    with construction("each density of a warm-up must be a number in (0, 1] or a Schedule; got 'a'.", TypeError):
        SparsityWarmup(steps=5, shape=["a"])
    with construction("clip must be a positive number: the largest norm of the averaged gradient; got 0."):
        dgc(clip=0)
    with construction("clip must be a positive number: the largest norm of the averaged gradient; got -1.0."):
        dgc(clip=-1.0)
    for clip in ("1", True, float("inf"), float("nan")):
        with construction(f"clip must be a positive number: the largest norm of the averaged gradient; got {clip!r}."):
            dgc(clip=clip)
    with construction("a warm-up's shape must be a name or a list of densities; got 0.5.", TypeError):
        SparsityWarmup(steps=5, shape=0.5)
    with construction(
        "every (average_every of a method) must be a whole number of optimizer steps, at least 1; got 0."
    ):
        gradient_dropping(local="partial", average_every=0)
    with construction(
        "every (average_every of a method) must be a whole number of optimizer steps, at least 1; got 0."
    ):
        ParameterAveraging(every=0)
    with construction(
        "average_buffers and average_optimizer_state need a local mode, with which ranks' parameters are"
    ):
        gradient_dropping(average_buffers=True)
    with construction("local must be one of none, sum, partial, error; got 'all'."):
        gradient_dropping(local="all")
    with construction("local must be one of none, sum, partial; got 'error'. The paper's 'error' is 'partial' in a"):
        GradientSync(Channel(DenseAllReduce()), local="error")
    with pytest.warns(UserWarning, match="lets every rank's parameters go their own way, and with average_every=None"):
        gradient_dropping(local="sum", average_every=None)
    with construction("only one sync of a method can take the rest; got several with rest=True."):
        Method([GradientSync(Channel(DenseAllReduce()), rest=True)] * 2)
    with construction("a BucketSync works inside DDP's hook for all optimizers: it allows of no `otherwise`."):
        Method(dgc().syncs, otherwise=dense())
    for dimensions in ("2", -1, True):
        with construction(f"min_dimensions must be a whole number, 0 or more; got {dimensions!r}. Use 2 for weights"):
            GradientSync(Channel(DenseAllReduce()), min_dimensions=dimensions)
    with construction("every must be a number of optimizer steps, at least 1; DensityWarmup("):
        DeltaSync(Channel(DenseAllReduce()), every=DensityWarmup(0.01, steps=5))
    with construction("syncs must name at least one sync; got none. Use dense() to send everything."):
        Method([])
    with construction("a BucketSync must be the only sync of a method, since DDP's buckets hold all parameters; got 2"):
        Method([BucketSync(), GradientSync(Channel(DenseAllReduce()), parameters=["head.*"])])


SWITCHED: list[Callable[..., object]] = [
    *RECIPES.values(),
    functools.partial(GradientSync, Channel(DenseAllReduce())),
    functools.partial(DeltaSync, Channel(DenseAllReduce())),
    BlockReduce,
    SketchedTopK,
    MomentumCorrection,
    ParameterAveraging,
]


@pytest.mark.parametrize("make", SWITCHED)
def test_switches(make: Callable[..., object]) -> None:
    for name, parameter in inspect.signature(make).parameters.items():
        for given in ("no", 1, None) if parameter.annotation is bool else ():
            with construction(f"{name} must be True or False; got {given!r}. Leave it out for its default.", TypeError):
                make(**{name: given})


EVERY_STRATEGY = ["pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"]


@pytest.mark.parametrize("package", EVERY_STRATEGY)
def test_strategy(package: str) -> None:
    strategy: Any = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    with construction(
        "method must be a Method, such as lightning_sparsecomm.methods.dgc(density=0.001); got"
        " 'gradient_dropping'. Did you mean lightning_sparsecomm.methods.gradient_dropping()?",
        TypeError,
    ):
        strategy(method="gradient_dropping")
    # The function itself, not what it returns.
    with construction("Did you mean lightning_sparsecomm.methods.gradient_dropping()?", TypeError):
        strategy(method=gradient_dropping)
    with construction("Did you mean lightning_sparsecomm.methods.sbc1()?", TypeError):
        strategy(method="sbc1")
    with construction("got 'Channel'.", TypeError) as caught:
        strategy(method="Channel")
    assert "Did you mean" not in str(caught.value)
    for seed in ("0", 1.0, True, None):
        with construction(f"seed must be a whole number, equal on all ranks; got {seed!r}. Leave it out", TypeError):
            strategy(seed=seed)
    with construction("method must be a Method", TypeError):
        strategy(method="gossip")
    with construction("method must be a Method", TypeError):
        strategy(0.01)
    for every in (0, -1, True, 2.0, "3"):
        with construction(
            f"check_replicas_every must be a whole number of optimizer steps, at least 1; got {every!r}. Leave it out"
            " to compare replicas at the end of training only."
        ):
            strategy(check_replicas_every=every)
    assert strategy(check_replicas_every=3).check_replicas_every == 3
    if "fabric" not in package:
        with construction("ddp_comm_hook cannot be combined with a method, which takes the place of DDP's"):
            strategy(ddp_comm_hook=fp16_compress_hook)
    with pytest.raises(RuntimeError, match="no model is set up for training yet"):
        strategy().synchronizer  # noqa: B018
    assert strategy().ledger is None


# Set-up


class Model(pl.LightningModule):
    """Counts its batches, so that a test sees that an error came before the first."""

    def __init__(self, network: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = network if network is not None else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.options = options
        self.begun = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.begun += 1
        loss = (self.network(batch) - batch[:, :3].sin()).square().mean()
        if self.options.get("poison") == (self.global_rank, batch_idx):
            loss = loss + (self.network[2].weight * float("nan")).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self.options.get("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        return optimizer(self.parameters())


def _fit(rank: int, world_size: int, model: pl.LightningModule, strategy: Any, options: dict[str, Any]) -> Any:
    """In a process that is joined to the others already, as under torchrun: every rank's own error can be seen."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)})
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**options, "plugins": [TorchElasticEnvironment(), *options.get("plugins", [])]},
    )
    batches = torch.randn(4 * world_size * 4, 6, generator=torch.Generator().manual_seed(3))
    try:
        trainer.fit(model, DataLoader(batches, batch_size=4))
    except Exception as error:
        return f"{type(error).__name__}: {error} [after {model.begun} batches]"
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def fit(tmp_path: Path, model: pl.LightningModule, strategy: Any, **options: Any) -> list[dict[str, Any]]:
    """The weights of each rank."""
    found = run_ranks(tmp_path, 2, _fit, 2, model, strategy, options)
    assert all(isinstance(weights, dict) for weights in found), found
    return found


def refusals(tmp_path: Path, model: pl.LightningModule, strategy: Any, **options: Any) -> list[str]:
    """The error of each rank. All find it: none is left waiting for another."""
    found = run_ranks(tmp_path, 2, _fit, 2, model, strategy, options)
    assert all(isinstance(error, str) for error in found), found
    return found


def with_method(method: Method | None = None, **options: Any) -> SparseCommStrategy:
    return SparseCommStrategy(method, **options)


def sync(*parameters: str) -> GradientSync:
    return GradientSync(Channel(DenseAllReduce()), parameters=parameters or ("*",))


class Looking(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].long() % 4)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Scaler:
    """Has nothing that a torch.amp.GradScaler has."""

    def __repr__(self) -> str:
        return "a scaler of one's own"


REFUSED_AT_SETUP: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "exclude matches nothing": (
        lambda: {"strategy": with_method(gradient_dropping(exclude=["*.bais"]))},
        "ValueError: exclude: the pattern '*.bais' matches no parameter. Patterns are shell-style and match whole"
        " names; the names are network.0.weight, network.0.bias, network.2.weight, network.2.bias.",
    ),
    "two syncs claim a parameter": (
        lambda: {"strategy": with_method(Method([sync(), sync("*.bias")]))},
        "ValueError: each parameter must belong to exactly one sync; 'network.0.bias' belongs to 2. Change the"
        " `parameters` and `exclude` patterns of the method's syncs.",
    ),
    "no sync claims a parameter": (
        lambda: {"strategy": with_method(Method([sync("*.weight")]))},
        "ValueError: each parameter must belong to exactly one sync; 'network.0.bias' belongs to 0. Change the",
    ),
    "sparse embedding": (
        lambda: {"model": Model(Looking(sparse=True))},
        "TypeError: the gradient of 'network.table.weight' is sparse (sparse=True), which this method cannot take. Use"
        " methods.split(['network.table.weight'], methods.s2_reducer(), ...) with this method for the rest, a method"
        " that exchanges weights, such as methods.sbc(), or a layer with sparse=False.",
    ),
    "complex parameter": (
        lambda: {"model": Model(Complex())},
        "TypeError: parameter 'network.weight' is complex, which no method can take. Hold it as a real tensor"
        " (torch.view_as_real), or use strategy='ddp'.",
    ),
    "loss scaler of another kind": (
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", Scaler())]},
        "TypeError: the precision plugin's scaler must be a torch.amp.GradScaler, whose records all ranks are to agree"
        " on; got a scaler of one's own. Use precision='16-mixed', 'bf16-mixed' or '32-true'.",
    ),
    "LBFGS": (
        lambda: {"model": Model(optimizer=torch.optim.LBFGS)},
        "TypeError: the method is not defined for LBFGS: it evaluates the gradient several times per step",
    ),
    "monitor without anything to see": (
        lambda: {"strategy": "ddp", "callbacks": [CompressionMonitor()]},
        "TypeError: CompressionMonitor reports what a sparsecomm strategy sends, but the Trainer's strategy is"
        " DDPStrategy. Use strategy='sparsecomm' ('sparsecomm_dense' sends what ddp sends), or leave the callback out.",
    ),
}


@pytest.mark.parametrize("case", REFUSED_AT_SETUP)
def test_refused_at_setup(case: str, tmp_path: Path) -> None:
    options, text = REFUSED_AT_SETUP[case]
    for found in refusals(tmp_path, **{"model": Model(), "strategy": with_method(), **options()}):
        assert text in found
        assert found.endswith("[after 0 batches]")


@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
def test_an_embedding_with_dense_gradients_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, Model(Looking(sparse=False)), with_method())


def _begin_elsewhere(rank: int, device_type: str) -> str:
    strategy = SparseCommStrategy()
    try:
        strategy._begin(torch.device(device_type), None)
    except ValueError as error:
        return str(error)
    return ""


def test_devices_without_ddp(tmp_path: Path) -> None:
    for device_type in ("mps", "xla"):
        (found,) = run_ranks(tmp_path, 1, _begin_elsewhere, device_type)
        text = f"accelerator must be 'cpu' or 'cuda'; got '{device_type}', on which DDP does not run."
        assert found.startswith(text)
        assert found.endswith("Use accelerator='cpu'.")
    assert run_ranks(tmp_path, 1, _begin_elsewhere, "cpu") == [""]


def test_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, text in (
        ("mpi", "process_group_backend must be one of gloo, nccl, on which the collectives are tested; got 'mpi'."),
        ("nccl", "process_group_backend must be 'gloo' on CPUs; got 'nccl'."),
    ):
        monkeypatch.setattr(wire.dist, "get_backend", lambda group=None, backend=backend: backend)
        (found,) = run_ranks(tmp_path, 1, _begin_elsewhere, "cpu")
        assert found.startswith(text)


def test_lbfgs_with_a_dense_method_is_ddp(tmp_path: Path) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)

    ddp = fit(tmp_path, Model(optimizer=lbfgs), DDPStrategy())
    start = Model().state_dict()
    for weights in fit(tmp_path, Model(optimizer=lbfgs), with_method(dense())):
        for name, array in weights.items():
            assert array.tobytes() == ddp[0][name].tobytes()
            assert array.tobytes() != start[name].numpy().tobytes()


# Training


@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
def test_parameter_that_the_model_lacks(tmp_path: Path) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(5, 2))], lr=0.1)

    for found in refusals(tmp_path, Model(optimizer=optimizer), with_method()):
        assert (
            "ValueError: the optimizer holds 1 parameter(s) that the model lacks, of shapes (5, 2): their gradients"
            " would stay local, and the replicas drift apart. Make them part of the model."
        ) in found


class Manual(Model):
    automatic_optimization = False

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=self.way != "past the strategy")
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.way != "past the strategy":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if self.way == "zero_grad between":
            optimizer.zero_grad()
        if self.way in ("backward after clipping", "zero_grad between"):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_step_past_the_strategy(tmp_path: Path) -> None:
    for found in refusals(tmp_path, Manual("past the strategy"), with_method()):
        assert (
            "RuntimeError: SGD.step() was called past the strategy, so its gradients were never shared and the replicas"
            " would drift apart. Step the optimizer that self.optimizers() or fabric.setup() returns (without"
            " use_pl_optimizer=False)."
        ) in found


def test_backward_after_clipping(tmp_path: Path) -> None:
    for found in refusals(tmp_path, Manual("backward after clipping"), with_method()):
        assert (
            "RuntimeError: a backward pass added to gradients of SGD that clipping had already shared between ranks:"
            " the sum would differ from rank to rank. Call clip_gradients after the last backward pass before step(),"
            " or zero_grad() first."
        ) in found


def test_backward_after_clipping_and_zero_grad(tmp_path: Path) -> None:
    for way in ("zero_grad between", "in order"):
        first, second = fit(tmp_path, Manual(way), with_method())
        assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_gradient_that_is_not_finite(scope: Any, tmp_path: Path) -> None:
    found = refusals(tmp_path, Model(poison=(1, 2)), with_method(gradient_dropping(scope=scope)))
    for error in found:
        assert error.startswith(
            f"{NonFiniteGradientError.__name__}: rank 1 has a gradient that is not finite, for parameter"
            " 'network.2.weight' in step 2. Lower the learning rate, clip gradients, or look for a division by zero"
        )


# Fabric


def _train_by_hand(rank: int, case: str) -> str:
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    method = gradient_dropping(exclude=["2.bais"] if case == "exclude matches nothing" else ["2.bias"])
    plugins: list[Any] = [TorchElasticEnvironment()]
    if "loss scaler" in case:
        scaler: Any = Scaler() if "of another kind" in case else torch.amp.GradScaler("cpu")
        plugins.append(FabricMixedPrecision("16-mixed", "cpu", scaler))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=FabricStrategy(method), plugins=plugins)
    fabric.launch()
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if case == "sparse embedding":
        network.append(nn.Embedding(4, 3, sparse=True))
    try:
        strange = [nn.Parameter(torch.zeros(5, 2))] if case == "parameter that the model lacks" else []
        make = torch.optim.LBFGS if case == "LBFGS" else torch.optim.SGD
        module, optimizer = fabric.setup(network, make([*network.parameters(), *strange], lr=0.1))
        fabric.backward(module(torch.ones(2, 6)).sum())
        if case == "backward after clipping":
            fabric.clip_gradients(module, optimizer, max_norm=0.1)
            fabric.backward(module(torch.ones(2, 6)).sum())
        (optimizer.optimizer if case == "step past the strategy" else optimizer).step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("nothing wrong", ""),
        ("exclude matches nothing", "ValueError: exclude: the pattern '2.bais' matches no parameter"),
        ("loss scaler", ""),
        ("loss scaler of another kind", "TypeError: the precision plugin's scaler must be a torch.amp.GradScaler"),
        ("sparse embedding", "TypeError: the gradient of '3.weight' is sparse (sparse=True), which this method cannot"),
        ("LBFGS", "TypeError: the method is not defined for LBFGS: it evaluates the gradient several times per step"),
        ("parameter that the model lacks", "ValueError: the optimizer holds 1 parameter(s) that the model lacks"),
        ("backward after clipping", "RuntimeError: a backward pass added to gradients of SGD"),
        ("step past the strategy", "RuntimeError: SGD.step() was called past the strategy"),
    ],
)
def test_fabric(case: str, text: str, tmp_path: Path) -> None:
    (found,) = run_ranks(tmp_path, 1, _train_by_hand, case)
    assert found.startswith(text) if text else not found
