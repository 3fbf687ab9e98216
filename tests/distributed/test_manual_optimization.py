"""Mistakes in manual optimization raise or warn. None differs from ddp in silence."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.methods import dense, gradient_dropping
from tests import laws
from tests.distributed.scenarios import Scenario, SeveralBackwards, fit


class ClipsByHand(SeveralBackwards):
    """Clips with torch's function between backward and step. By then ddp has averaged gradients, and we have not."""

    share_first = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        first = self.global_step == 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
            if self.share_first:
                self.trainer.strategy.synchronize(optimizer)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
        warned = any("before they were shared: each rank changed its own" in str(warning.message) for warning in caught)
        # Before the first step there is nothing to compare with.
        assert warned == (not first and not self.share_first)


class SharesFirst(ClipsByHand):
    share_first = True


def test_clipping_unshared_gradients_warns(tmp_path: Path) -> None:
    laws.replicas_are_equal(fit(tmp_path, Scenario(ClipsByHand), 2, gradient_dropping(0.1)))


class ClipsUnderDdp(ClipsByHand):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


def test_shared_on_request_they_equal_ddp(tmp_path: Path) -> None:
    ddp = fit(tmp_path / "ddp", Scenario(ClipsUnderDdp), 2)
    ours = fit(tmp_path / "ours", Scenario(SharesFirst), 2, gradient_dropping(1.0))
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


class BackwardAfterClipping(SeveralBackwards):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def test_backward_after_clipping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="clipping had already shared between ranks"):
        fit(tmp_path, Scenario(BackwardAfterClipping), 2, gradient_dropping(0.1))
    # DDP's own hook has no such limit, and so dense() has none.
    ours = fit(tmp_path / "dense", Scenario(BackwardAfterClipping), 2, dense())
    ddp = fit(tmp_path / "ddp", Scenario(BackwardAfterClipping), 2)
    laws.bit_equal(ours[0], ddp[0])


class SkipsAStep(SeveralBackwards):
    """Clips every gradient, and throws every third one away."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        if batch_idx % 3:
            optimizer.step()


def test_a_skipped_step_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    # Two epochs, since Lightning would count steps, and not batches.
    scenario = Scenario(SkipsAStep, {"max_epochs": 2, "max_steps": -1})
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "ours", scenario, 2, gradient_dropping(1.0))
    laws.trained(SkipsAStep().state_dict(), ddp[0])
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)
    laws.replicas_are_equal(fit(tmp_path / "sparse", scenario, 2, gradient_dropping(0.1)))
