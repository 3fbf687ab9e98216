"""A method that clips each rank's own gradient takes over the threshold of the Trainer or of a call, and clips once."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.methods import default, dgc
from tests import laws
from tests.distributed.scenarios import Classifier, Scenario, SeveralBackwards, fit

# Everything is sent, so the optimizer sees the clipped gradients themselves.
FULL = {"density": 1.0, "warmup_steps": 0, "momentum_masking": False}


class Clipped(Classifier):
    """Notes the norm of what the optimizer sees."""

    def __init__(self) -> None:
        super().__init__(momentum=0.0)
        self.norms: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:
            self.norms.append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))))


class Norms(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        torch.save(pl_module.norms, self.folder / "norms.pt")


def train(folder: Path, method: Any, model: type[Classifier] = Clipped, **options: Any) -> list[dict[str, Any]]:
    return fit(folder, Scenario(model, steps=6), 2, method, (Norms(folder),), **options)


def test_the_trainers_threshold_is_taken_over_once(tmp_path: Path) -> None:
    taken = train(tmp_path / "taken", dgc(**FULL), gradient_clip_val=0.01)
    own = train(tmp_path / "own", dgc(**FULL, clip=0.01))
    laws.bit_equal(taken[0], own[0])
    # Each rank's own norm is at most τ·√2 before averaging. Were the average clipped too, no norm would exceed τ.
    norms = torch.load(tmp_path / "taken" / "norms.pt")
    assert 0.0101 < max(norms) <= 0.01 * 2**0.5 + 1e-6
    # The same threshold may be given twice.
    laws.bit_equal(train(tmp_path / "both", dgc(**FULL, clip=0.01), gradient_clip_val=0.01)[0], own[0])


def test_no_threshold_of_the_trainer_means_none(tmp_path: Path) -> None:
    """Lightning takes 0 and negative thresholds for none."""
    unclipped = train(tmp_path / "none", dgc(**FULL))
    for index, threshold in enumerate((0, -1.0)):
        laws.bit_equal(train(tmp_path / str(index), dgc(**FULL), gradient_clip_val=threshold)[0], unclipped[0])


class ByHand(SeveralBackwards):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        optimizer.step()


def test_a_call_in_manual_optimization_is_taken_over(tmp_path: Path) -> None:
    automatic = train(tmp_path / "automatic", dgc(**FULL), gradient_clip_val=0.01)
    by_hand = fit(tmp_path / "manual", Scenario(ByHand, steps=6), 2, dgc(**FULL))
    laws.bit_equal(by_hand[0], automatic[0])


def test_by_default_clipping_by_value_is_ddps(tmp_path: Path) -> None:
    """What is clipped is each element of the mean, which is rounded to 8 bits."""
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    scenario = Scenario(Classifier, steps=6)
    ours = fit(tmp_path / "default", scenario, 2, default(), **options)
    ddps = fit(tmp_path / "ddp", scenario, 2, **options)
    laws.replicas_are_equal(ours)
    for name, before in Classifier().named_parameters():
        after, expected = ours[0]["weights"][name], ddps[0]["weights"][name]
        assert (after - expected).norm() < 0.05 * (before - expected).norm(), name


class AnotherThreshold(Clipped):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class ByValue(Clipped):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="value")


@pytest.mark.parametrize(
    ("model", "method", "options", "text"),
    [
        (
            Clipped,
            {"clip": 1.0},
            {"gradient_clip_val": 0.5},
            "clip=1.0 of the method and 0.5 of the Trainer's gradient_clip_val, or of a clipping call, are two",
        ),
        (AnotherThreshold, {"clip": 1.0}, {}, "clip=1.0 of the method and 0.5 of the Trainer's gradient_clip_val"),
        (
            Clipped,
            {},
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm must be 'norm' with a method that clips each rank's own gradient",
        ),
        (
            AnotherThreshold,
            {},
            {},
            "gradients were shared with gradient_clip_val=None, and are now to be clipped by 0.5: the method clips",
        ),
        (ByValue, {}, {}, "gradient_clip_algorithm must be 'norm'"),
        (Clipped, {}, {"gradient_clip_val": float("nan")}, "gradient_clip_val must be a number, the largest norm"),
    ],
)
def test_refusals(
    tmp_path: Path, model: type[Classifier], method: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(Exception, match=text):
        train(tmp_path, dgc(**{**FULL, **method}), model, **options)
