"""Methods that send everything: gradients that are not finite, and unusual optimizers and parameters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.exchange import DenseAllReduce, NonFiniteGradientError
from lightning_sparsecomm.exchange.dense import addend_limit
from lightning_sparsecomm.methods import gradient_dropping
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Adversarial, Scenario, SeveralBackwards, fit


def _one_nan(rank: int, wire_dtype: Any) -> str:
    layout = Layout([("fine", (3,)), ("broken", (2,))])
    channel = Channel(DenseAllReduce(wire_dtype))
    channel.bind(layout, torch.float32, torch.device("cpu"))
    gradients = [torch.ones(3), torch.tensor([1.0, float("nan") if rank == 1 else 1.0])]
    with pytest.raises(NonFiniteGradientError) as raised:
        channel.reduce(gradients, Round(layout, step=7), Wire())
    return str(raised.value)


@pytest.mark.parametrize("wire_dtype", ["same", "float16", "bfloat16"])
def test_a_gradient_that_is_not_finite_raises_on_all_ranks(tmp_path: Path, wire_dtype: str) -> None:
    for message in run_ranks(tmp_path, 2, _one_nan, wire_dtype):
        assert message.startswith("rank 1 has a gradient that is not finite, for parameter 'broken' in step 7.")


def _beyond_float16(rank: int) -> tuple[list[float], list[float]]:
    layout = Layout([("weight", (4,))])
    feedback = ErrorFeedback()
    channel = Channel(DenseAllReduce("float16"), [feedback])
    channel.bind(layout, torch.float32, torch.device("cpu"))
    gradient = torch.tensor([1e5, -3e38, 60_000.0, 3.0])
    with pytest.warns(UserWarning, match="2 values beyond"):
        shared = channel.reduce([gradient], Round(layout, step=0), Wire()).shared
    assert isinstance(shared, Tensor)
    return shared.tolist(), feedback.state_dict()["residual"]["weight"].tolist()


def test_what_float16_cannot_hold_is_sent_as_far_as_it_can(tmp_path: Path) -> None:
    most = 3 * addend_limit(torch.float16, 3)
    assert 65_000 < most < 65_504
    for shared, residual in run_ranks(tmp_path, 3, _beyond_float16):
        assert shared == pytest.approx([most, -most, 60_000, 3], rel=2e-3)
        assert residual == pytest.approx([1e5 - most, -3e38, 0, 0], rel=2e-3, abs=30)


@pytest.mark.parametrize("addends", [2, 3, 4, 7, 90, 349, 1000, 4093])
def test_no_sum_of_addends_within_their_limit_is_infinite(addends: int) -> None:
    """Added one after another, the order that rounds most. With 90 addends, many sums are rounded up."""
    limit = addend_limit(torch.float16, addends)
    each = np.linspace(limit / 2, limit, 500).astype(np.float16)
    total = np.zeros_like(each)
    for _ in range(addends):
        total += each
    assert np.isfinite(total).all()


class StepsWhileFrozen(Adversarial):
    """The discriminator steps while toggling has frozen it. torch's optimizers only look at `.grad`."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        self.manual_backward(self._generator_loss(batch[0]) + self._discriminator_loss(batch[0]))
        self.toggle_optimizer(of_generator)
        of_generator.step()
        of_discriminator.step()
        self.untoggle_optimizer(of_generator)


def test_parameters_frozen_after_backward_are_shared(tmp_path: Path) -> None:
    scenario = Scenario(lambda: StepsWhileFrozen(toggle=True))
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "ours", scenario, 2, gradient_dropping(1.0))
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


class IgnoresItsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class NeverShared(SeveralBackwards):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return IgnoresItsClosure(self.parameters(), lr=0.1)


def test_an_optimizer_that_ignores_its_closure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="did not call the closure that it was given"):
        fit(tmp_path, Scenario(NeverShared), 2, gradient_dropping(0.1))
