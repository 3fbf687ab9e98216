"""A loss scaler in manual optimization and in Fabric, whoever unscales, clips or steps first, and however often."""

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.plugins.precision.amp import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.methods import dense
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scaled import METHODS, diaries, finite, make_scaler, same, scaled, scales, scales_in, with_diary
from tests.distributed.scenarios import FEATURES, Adversarial, Scenario, SeveralBackwards, Training, fit_several

SKIPPED = 4


def overflows(rank: int, step: int) -> bool:
    return (rank, step) == (1, SKIPPED)


class ByHand(SeveralBackwards):
    """Two backward passes, clipping, and a step. Rank 1 overflows once."""

    def __init__(self, unscales: bool = False, leaves_out: bool = False) -> None:
        super().__init__()
        self.unscales, self.leaves_out = unscales, leaves_out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.leaves_out and batch_idx == SKIPPED:
            return
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        half = len(batch[0]) // 2
        with torch.autocast("cpu", enabled=False):
            for part in (slice(0, half), slice(half, None)):
                loss = cross_entropy(self(batch[0][part]), batch[1][part])
                self.manual_backward(loss * math.inf if overflows(self.global_rank, batch_idx) else loss)
        if self.unscales:
            scaler: Any = self.trainer.scaler
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), math.inf)
            # All ranks see the overflow, as under ddp.
            assert bool(norm.isfinite()) == (batch_idx != SKIPPED)
            assert norm < 100 or batch_idx == SKIPPED
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class ThrowingAway(ByHand):
    """Clips a gradient in every batch. Even batches then make no step. Odd ones first compute a new gradient."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            super().training_step(batch, batch_idx)


class SilentAtFirst(ByHand):
    """Rank 0 has no loss in the first batch, so its scaler is not set up when it steps with the others."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx == 0:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
        else:
            super().training_step(batch, batch_idx)


class BothAtOnce(Adversarial):
    """Clips both optimizers' gradients before either steps. Updating the scaler after one step makes it forget both."""

    def __init__(self, fused: bool = False, leaves_out: bool = False) -> None:
        super().__init__(toggle=False)
        self.fused, self.leaves_out = fused, leaves_out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.leaves_out and batch_idx == SKIPPED:
            return
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = self._discriminator_loss(batch[0]) + self.generator(batch[0]).square().mean()
            self.manual_backward(loss * math.inf if overflows(self.global_rank, batch_idx) else loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.5, fused=self.fused) for part in parts]


def by_hand(method: str, model: Any, **options: Any) -> Training:
    callbacks = with_diary if options else lambda folder: ()
    return Training(Scenario(model, {"max_epochs": 1, "max_steps": -1}), METHODS[method], callbacks, options)


def test_manual_optimization(tmp_path: Path) -> None:
    """Bit for bit as without a scaler, if that training leaves out the step that overflows."""
    trainings = {}
    for name in ("dense", "gradient_dropping"):
        trainings[f"{name}-left out"] = by_hand(name, lambda: ByHand(leaves_out=True))
        trainings[name] = by_hand(name, ByHand, **scaled())
        trainings[f"{name}-unscales"] = by_hand(name, lambda: ByHand(unscales=True), **scaled())
    trainings["sbc"] = by_hand("sbc", ByHand, **scaled())
    found = fit_several(tmp_path, 2, trainings)
    laws.replicas_are_equal(found.pop("sbc"))
    for way in [way for way in found if "left out" not in way]:
        name = way.split("-")[0]
        laws.replicas_are_equal(found[way])
        laws.bit_equal(found[way][1], found[f"{name}-left out"][1])
        for diary in diaries(tmp_path / way):
            assert scales_in(diary) == scales(SKIPPED)


def test_gradients_without_a_step_and_steps_without_a_gradient(tmp_path: Path) -> None:
    """Each gradient is unscaled once, and the scaler forgets those that were thrown away."""
    trainings = {"unscaled": by_hand("gradient_dropping", ThrowingAway)}
    trainings["scaled"] = by_hand("gradient_dropping", ThrowingAway, **scaled())
    trainings["silent"] = by_hand("gradient_dropping", SilentAtFirst, **scaled())
    trainings["silent-left out"] = by_hand("gradient_dropping", lambda: SilentAtFirst(leaves_out=True))
    found = fit_several(tmp_path, 2, trainings)
    for scaled_one, other in (("scaled", "unscaled"), ("silent", "silent-left out")):
        laws.replicas_are_equal(found[scaled_one])
        laws.bit_equal(found[scaled_one][0], found[other][0])
    for diary in diaries(tmp_path / "silent"):
        assert scales_in(diary) == scales(SKIPPED)


def test_two_optimizers(tmp_path: Path) -> None:
    trainings = {}
    for fused in (False, True):
        trainings[f"{fused}"] = by_hand("gradient_dropping", lambda fused=fused: BothAtOnce(fused), **scaled())
        left_out = by_hand("gradient_dropping", lambda fused=fused: BothAtOnce(fused, leaves_out=True))
        trainings[f"{fused}-left out"] = left_out
    found = fit_several(tmp_path, 2, trainings)
    for fused in ("False", "True"):
        laws.replicas_are_equal(found[fused])
        laws.bit_equal(found[fused][0], found[f"{fused}-left out"][0])
        for diary in diaries(tmp_path / fused):
            # The scaler is updated after each optimizer's step, so twice.
            assert scales_in(diary)[SKIPPED] == scales_in(diary)[SKIPPED - 1] / 4
            assert same(diary[SKIPPED]["weights"], diary[SKIPPED - 1]["weights"])


class BackwardAfterClipping(ByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        with pytest.raises(
            RuntimeError, match="already divided by the loss scale: the sum would mix scaled and unscaled"
        ):
            self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        optimizer.zero_grad()


def test_backward_after_clipping_is_refused(tmp_path: Path) -> None:
    """Also with methods that allow it without a scaler."""
    fit_several(tmp_path, 2, {name: by_hand(name, BackwardAfterClipping, **scaled()) for name in ("dense", "sbc")})


class ClipsScaled(ByHand):
    """Changes gradients that DDP has summed already and that are still scaled."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert not [warning for warning in caught if "before they were shared" in str(warning.message)]


def test_in_buckets_they_are_shared_already(tmp_path: Path) -> None:
    """As under ddp, and without the warning of methods that share later."""
    ours = by_hand("dense", ClipsScaled, **scaled())
    ddp = Training(ours.scenario, None, options=scaled())
    found = fit_several(tmp_path, 2, {"ours": ours, "ddp": ddp})
    laws.bit_equal(found["ours"][0], found["ddp"][0])


# Fabric


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layers(x.float()).square().mean()


def _fabric(method: str) -> tuple[Any, torch.amp.GradScaler]:
    plugins: list[Any] = [TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler := make_scaler())]
    fabric = Fabric(accelerator="cpu", devices=2, strategy=SparseCommStrategy(METHODS[method]), plugins=plugins)
    fabric.launch()
    return fabric, scaler


def _train(rank: int, method: str, clipping: str) -> dict[str, Any]:
    fabric, scaler = _fabric(method)
    made = Regression()
    module, optimizer = fabric.setup(made, torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9, fused=True))
    assert "unscale_" in vars(scaler)
    given, norms, refused = [], [], []
    for step, x in enumerate(torch.randn(10, 8, FEATURES, generator=torch.Generator().manual_seed(rank))):
        optimizer.zero_grad()
        # A rank without a gradient learns that another rank's overflows.
        if not (clipping == "none on rank 0" and rank == 0 and step in (1, SKIPPED)):
            loss = module(x)
            fabric.backward(loss * math.inf if overflows(rank, step) else loss)
        if clipping in ("clips", "raises"):
            raises = clipping == "raises"
            try:
                norms.append(float(fabric.clip_gradients(module, optimizer, max_norm=0.1, error_if_nonfinite=raises)))
            except RuntimeError as error:
                refused.append((step, "is non-finite" in str(error)))
        if step == SKIPPED and method != "sbc":
            fabric.strategy.synchronize(optimizer)
            assert not finite([parameter.grad for parameter in made.parameters()])
        optimizer.step()
        given.append(scaler.get_scale())
    fabric.strategy.settle()
    fabric.strategy.teardown()
    # The scaler and the optimizer are as they were.
    assert "unscale_" not in vars(scaler)
    assert optimizer.optimizer._step_supports_amp_scaling
    assert finite(list(made.parameters()))
    weights = b"".join(laws.bits(parameter.detach()) for parameter in made.parameters())
    return {"weights": weights, "scales": given, "norms": norms, "refused": refused}


WAYS = [
    ("dense", ""),
    ("gradient_dropping", "clips"),
    ("gradient_dropping", "raises"),
    ("gradient_dropping", "none on rank 0"),
    ("dgc", "clips"),
    ("dgc", "raises"),
    ("dgc", "none on rank 0"),
    ("sbc", ""),
]


def _train_in_all_ways(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    # Lightning refuses to clip gradients that an optimizer unscales by itself. With our strategy, none does.
    return {way: _train(rank, *way) for way in WAYS}


def test_fabric(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _train_in_all_ways)
    for (method, clipping), mine in first.items():
        theirs = second[method, clipping]
        assert mine["weights"] == theirs["weights"]
        assert mine["scales"] == scales(None if method == "sbc" else SKIPPED)
        assert theirs["scales"] == scales(SKIPPED)
        # As under ddp, a norm that is not finite is refused on all ranks.
        assert mine["refused"] == theirs["refused"] == ([(SKIPPED, True)] if clipping == "raises" else [])
        if clipping == "clips":
            for norms in (mine["norms"], theirs["norms"]):
                assert [math.isfinite(norm) for norm in norms] == [step != SKIPPED for step in range(10)]
                # These are norms of unscaled gradients.
                assert all(norm < 10 for norm in norms if math.isfinite(norm))


def _foreign(rank: int) -> float:
    """The scaler unscales an optimizer of parameters that no method knows as usual."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    plugins: list[Any] = [TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scaler := make_scaler())]
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SparseCommStrategy(dense()), plugins=plugins)
    fabric.launch()
    fabric.setup_module(Regression())
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight * 3).backward()
    scaler.unscale_(optimizer)
    assert weight.grad == 3
    scaler.step(optimizer)
    scaler.update()
    return weight.item()


def test_other_optimizers_of_the_scaler(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 1, _foreign) == [-0.5]
