"""The strategy in a Trainer: what cannot work is refused before the first batch, and in training on all ranks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import Channel, CompressionMonitor, GradientSync, Method, NonFiniteGradientError
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import dense, gradient_dropping
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.frontends.fitting import Model, fit, refusals


def with_method(method: Method | None = None, **options: Any) -> SparseCommStrategy:
    return SparseCommStrategy(method, **options)


def sync(*parameters: str) -> GradientSync:
    return GradientSync(Channel(DenseAllReduce()), parameters=parameters or ("*",))


class UnknownStrategy(DDPStrategy):
    """As engines of other packages: derived from DDPStrategy, without DDP."""

    def _setup_model(self, model: nn.Module) -> Any:
        return model


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


# Each by its stable part: parameter, value, remedy.
REFUSED_AT_SETUP: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "exclude matches nothing": (
        lambda: {"strategy": with_method(gradient_dropping(exclude=["*.bais"]))},
        r"ValueError: exclude: the pattern '\*.bais' matches no parameter.*network.0.weight, network.0.bias,"
        r" network.2.weight, network.2.bias\.",
    ),
    "two syncs claim a parameter": (
        lambda: {"strategy": with_method(Method([sync(), sync("*.bias")]))},
        "ValueError: each parameter must belong to exactly one sync; 'network.0.bias' belongs to 2. .*`parameters` and"
        " `exclude` patterns",
    ),
    "no sync claims a parameter": (
        lambda: {"strategy": with_method(Method([sync("*.weight")]))},
        "ValueError: each parameter must belong to exactly one sync; 'network.0.bias' belongs to 0. .*`parameters` and"
        " `exclude` patterns",
    ),
    "sparse embedding": (
        lambda: {"model": Model(Looking(sparse=True))},
        r"TypeError: the gradient of 'network.table.weight' is sparse \(sparse=True\).*"
        r"methods.split\(\['network.table.weight'\], methods.s2_reducer\(\), methods.local_adam\(\)\).*"
        r"methods.sbc\(\).*sparse=False",
    ),
    "complex parameter": (
        lambda: {"model": Model(Complex())},
        "TypeError: parameter 'network.weight' is complex.*torch.view_as_real.*strategy='ddp'",
    ),
    "loss scaler of another kind": (
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", Scaler())]},
        "TypeError: the precision plugin's scaler must be a torch.amp.GradScaler.*got a scaler of one's own."
        " Use precision='16-mixed'",
    ),
    "LBFGS": (
        lambda: {"model": Model(optimizer=torch.optim.LBFGS)},
        r"TypeError: the method is not defined for LBFGS: .*methods.dense\(\)",
    ),
    "monitor of what it cannot count": (
        lambda: {"strategy": UnknownStrategy(), "callbacks": [CompressionMonitor()]},
        "TypeError: .*CompressionMonitor; got UnknownStrategy, whose bytes it cannot count. Use strategy='sparsecomm'",
    ),
}


@pytest.mark.parametrize("case", REFUSED_AT_SETUP)
def test_refused_at_setup(case: str, tmp_path: Path) -> None:
    options, text = REFUSED_AT_SETUP[case]
    for found in refusals(tmp_path, **{"model": Model(), "strategy": with_method(), **options()}):
        assert re.match(text, found), found
        assert found.endswith("[after 0 batches]")


@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
def test_an_embedding_with_dense_gradients_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, Model(Looking(sparse=False)), with_method())


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
        text = r"ValueError: the optimizer holds 1 parameter\(s\) that the model lacks, of shapes \(5, 2\)"
        assert re.match(text, found), found


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
        text = r"RuntimeError: SGD.step\(\) was called past the strategy.*self.optimizers\(\).*use_pl_optimizer=False"
        assert re.match(text, found), found


def test_backward_after_clipping(tmp_path: Path) -> None:
    for found in refusals(tmp_path, Manual("backward after clipping"), with_method()):
        text = (
            r"RuntimeError: a backward pass added to gradients of SGD that clipping had already shared.*zero_grad\(\)"
        )
        assert re.match(text, found), found


def test_backward_after_clipping_and_zero_grad(tmp_path: Path) -> None:
    for way in ("zero_grad between", "in order"):
        first, second = fit(tmp_path, Manual(way), with_method())
        assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_gradient_that_is_not_finite(scope: Any, tmp_path: Path) -> None:
    found = refusals(tmp_path, Model(poison=(1, 2)), with_method(gradient_dropping(scope=scope)))
    for error in found:
        text = r"rank 1 has a gradient that is not finite, for parameter 'network.2.weight' in step 2\."
        assert re.match(f"{NonFiniteGradientError.__name__}: {text}", error), error


def _twice(rank: int, rebinds: bool) -> list[str]:
    class Extra(Callback):
        pass

    class Late(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if rebinds:
                trainer.callbacks = [*trainer.callbacks, Extra()]

    strategy = with_method(gradient_dropping())
    options = {**QUIET, "enable_checkpointing": False}
    trainer = Trainer(max_steps=1, strategy=strategy, devices=1, callbacks=[Late()], **options)
    trainer.fit(Model(), DataLoader(torch.zeros(1, 6)))
    return [type(each).__name__ for each in trainer.callbacks]


def test_no_callback_of_ours_stays_where_another_has_set_a_list_of_its_own(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 1, _twice, False) == [["Late"]]
    assert run_ranks(tmp_path, 1, _twice, True) == [["Late", "Extra"]]
