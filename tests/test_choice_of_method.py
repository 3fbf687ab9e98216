"""Which method an optimizer gets: its own, the one for all others, or a refusal with the reason."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.memory import ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.methods import default, dgc, gradient_dropping
from lightning_sparsecomm.schedules import DensityWarmup
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.sync import GradientSync
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Classifier, Scenario, SeveralBackwards, fit


class Adam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ByHand(SeveralBackwards):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Sharp(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Twice(self.parameters(), lr=0.01, momentum=0.9)


class Ignoring(Classifier):
    _ddp_params_and_buffers_to_ignore = ("head.bias",)


class Steep(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=1.5)


class Bodies(pl.Callback):
    """Which memories each optimizer's gradients pass through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        used = [[sync.corrects_momentum for sync, _, _ in s.pieces] for s in strategy.synchronizer._streams]
        torch.save(used, self.folder / "used.pt")


@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
@pytest.mark.parametrize(("model", "corrects"), [(Classifier, [[True, True]]), (Adam, [[False]])])
def test_sparsecomm_is_dgc_for_sgd_and_gradient_dropping_otherwise(tmp_path: Path, model: Any, corrects: Any) -> None:
    ranks = fit(tmp_path, Scenario(model, steps=3), 2, default(), (Bodies(tmp_path),))
    assert torch.load(tmp_path / "used.pt") == corrects
    assert ranks[0]["ledger"].density() < 0.5


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            Adam,
            "the method is not defined for Adam: momentum correction takes momentum, dampening and Nesterov's method"
            " from torch.optim.SGD",
        ),
        (Sharp, "evaluates its closure more than once, so a step has several gradients"),
        (Ignoring, "an optimizer that also holds parameters which DDP is told to ignore"),
        (Steep, r"the momentum of SGD must be in \[0, 1\]; got 1.5"),
    ],
)
def test_dgc_refuses(tmp_path: Path, model: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        fit(tmp_path, Scenario(model, steps=3), 2, dgc())


def test_dgc_without_momentum_correction_takes_any_optimizer(tmp_path: Path) -> None:
    method = dgc(0.1, warmup_steps=0, momentum_correction=False)
    ranks = fit(tmp_path, Scenario(Adam, steps=3), 2, method)
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in ranks[1]["weights"].items())


def sparse(*memories: Any, **options: Any) -> GradientSync:
    return GradientSync(Channel(Gather(SparseCodec(TopK(0.1))), memories), **options)


def test_momentum_is_taken_over_for_all_parameters_or_none(tmp_path: Path) -> None:
    """Where one sync corrects momentum, the others apply it to what they share, as if they had been told to."""
    corrected = sparse(MomentumCorrection(), ErrorFeedback(), min_dimensions=2)
    ends = []
    for i, memories in enumerate(([], [Momentum()])):
        method = Method([corrected, GradientSync(Channel(DenseAllReduce(), memories), rest=True)])
        ends.append(fit(tmp_path / str(i), Scenario(Classifier, steps=5), 2, method)[0])
    laws.bit_equal(*ends)
    drifting = GradientSync(Channel(DenseAllReduce()), rest=True, local="partial")
    with pytest.raises(Exception, match=r"takes over the momentum of RecordingSGD, which also holds '.*bias': a sync"):
        fit(tmp_path, Scenario(Classifier, steps=3), 2, Method([corrected, drifting]))


@pytest.mark.parametrize(
    "memories", [(ErrorFeedback(), MomentumCorrection()), (MomentumCorrection(), ClipLocalNorm(0.001), ErrorFeedback())]
)
def test_order_of_memories(tmp_path: Path, memories: Any) -> None:
    with pytest.raises(Exception, match="must be in the order ClipLocalNorm, MomentumCorrection, ErrorFeedback"):
        fit(tmp_path, Scenario(Classifier, steps=3), 2, Method([sparse(*memories)]))


class Fails(pl.Callback):
    """Catches the warning in the rank, whose own it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.caught = warnings.catch_warnings(record=True)
        self.warned = self.caught.__enter__()
        warnings.simplefilter("always")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        texts = [str(each.message) for each in self.warned if "warm-up" in str(each.message)]
        torch.save(texts, self.folder / f"warned-{trainer.global_rank}.pt")


@pytest.mark.parametrize(
    ("method", "model", "limits", "words"),
    [
        (dgc(warmup_steps=10), Classifier, {"max_steps": 10}, "10 steps of warm-up in a run of 10"),
        (dgc(warmup_steps=10), Classifier, {"max_steps": 11}, None),
        (dgc(warmup_steps=20), Classifier, {"max_steps": -1, "max_epochs": 2}, "20 steps of warm-up in a run of 20"),
        (dgc(warmup_steps=19), Classifier, {"max_steps": -1, "max_epochs": 2}, None),
        (dgc(warmup_epochs=2), Classifier, {"max_steps": 20}, "2 epochs of warm-up in a run of 2"),
        (dgc(warmup_epochs=2), Classifier, {"max_steps": 25}, None),
        (gradient_dropping(warmup_steps=9), Classifier, {"max_steps": 9}, "9 steps of warm-up in a run of 9"),
        (dgc(DensityWarmup(0.1, steps=9)), Classifier, {"max_steps": 9}, "9 steps of warm-up in a run of 9"),
        (default(), Classifier, {"max_steps": 3}, "1,000 steps of warm-up in a run of 3"),
        (dgc(warmup_steps=10), ByHand, {"max_steps": 10}, "10 steps of warm-up in a run of 10"),
        # Another method, which has none.
        (default(), Adam, {"max_steps": 3}, None),
    ],
)
def test_warmups_that_outlast_the_training(
    tmp_path: Path, method: Method, model: Any, limits: dict[str, Any], words: str | None
) -> None:
    fit(tmp_path, Scenario(model), 2, method, (Fails(tmp_path),), **limits)
    found = torch.load(tmp_path / "warned-0.pt")
    assert [words in text for text in found] == [True] if words else not found
    assert not torch.load(tmp_path / "warned-1.pt")


def run_in_one_process(function: Any) -> list[Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(Path(folder), 1, function)


def test_fabric_counts_no_epochs() -> None:
    def setup(rank: int) -> str:
        strategy = FabricStrategy(method=dgc(warmup_epochs=2))
        strategy._begin(torch.device("cpu"), None)
        with pytest.raises(ValueError, match="warmup_epochs=2 needs a Trainer, which counts epochs; Fabric does not"):
            strategy._refuse_epochs()
        strategy._end()
        return "refused"

    assert run_in_one_process(setup) == ["refused"]


def test_rest_takes_what_nobody_claims() -> None:
    parameters = list(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).named_parameters())
    method = dgc(exclude=["1.*"])
    (first, sparse_names), (second, dense_names) = method.parts(parameters)
    assert [name for name, _ in sparse_names] == ["0.weight"]
    assert [name for name, _ in dense_names] == ["0.bias", "1.weight", "1.bias"]
    assert not first.rest
    assert second.rest
    # Nothing is left for the dense sync.
    assert len(dgc().parts(parameters[:1])) == 1
