"""Ranks that train on from what they have not sent yet, too."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.sharing import DeltaSync
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.share import Turn


class Training:
    """Steps of a small network whose weights are exchanged with a rank that does the same."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        sync = methods.sbc(density=0.2, momentum_masking=False, **options).syncs[0]
        assert isinstance(sync, DeltaSync)
        share = sync.start(self.optimizer, list(self.network.named_parameters()), MirrorWire(2))
        assert isinstance(share, DeltaShare)
        self.share, self.made = share, 0

    def step(self) -> None:
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(self.made))
        self.share.before_step()
        self.optimizer.zero_grad()
        self.network(inputs).square().mean().backward()
        self.share.before_update()
        self.optimizer.step()
        self.share.after_update()
        self.share.after_step()
        self.made += 1

    def exchange(self) -> None:
        turn = Turn("weights", self.made - 1)
        if self.share.due(turn):
            with torch.no_grad():
                self.share.prepare(turn)
                self.share.exchange()
                self.share.commit()

    def train(self, steps: int) -> "Training":
        for _ in range(steps):
            self.step()
            self.exchange()
        return self

    def resumed(self, **options: Any) -> "Training":
        """A training with other options that goes on with this one's state."""
        other = Training(**options)
        other.network.load_state_dict(self.network.state_dict())
        other.share.load_state_dict({kind: dict(parts) for kind, parts in self.share.state_dict().items()})
        other.made = self.made
        return other

    @property
    def residual(self) -> torch.Tensor:
        return self.share.channel.residuals[0].held["residual"].flat

    def apart(self) -> torch.Tensor:
        """What the weights have that the anchors lack."""
        pairs = [(weight, self.share.anchors[name]) for name, weight in self.share.parameters]
        return torch.cat([(weight - anchor).detach().flatten() for weight, anchor in pairs])


def test_after_an_exchange_weights_are_the_anchors_and_the_residual() -> None:
    training = Training(every=2, residual_in_weights=True).train(4)
    assert float(training.residual.norm()) > 0
    torch.testing.assert_close(training.apart(), training.residual)
    torch.testing.assert_close(Training(every=2).train(4).apart(), torch.zeros_like(training.residual))


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
def test_a_weight_that_is_set_in_each_step_goes_nowhere() -> None:
    """Its residual is in the mean that becomes its anchor, and is not added again."""
    training = Training(every=1, residual_in_weights=True).train(5)
    training.optimizer.param_groups[0]["lr"] = 0.0
    weight = training.network[0].weight
    largest = float(weight.detach().abs().max())
    for _ in range(20):
        training.step()
        with torch.no_grad():
            weight[0, 0] = 0
        training.share.before_step()
        training.exchange()
    assert float(weight.detach().abs().max()) <= largest
    with torch.no_grad():
        weight.zero_()
    training.train(1)
    assert not weight.detach().any()


@pytest.mark.parametrize("delay", [0, 1])
def test_switched_off_the_residual_waits_as_it_would_have(delay: int) -> None:
    """It is taken out of the weights, once, also where the run is saved and resumed again before the next exchange."""
    ahead = Training(every=4, residual_in_weights=True).train(6)
    residual, trained = ahead.residual.clone(), ahead.apart() - ahead.residual
    for stops in (1, 2):
        other = ahead.resumed(every=4, delay=delay)
        for _ in range(stops):
            other.share.before_step()
            other = other.resumed(every=4, delay=delay)
        other.share.before_step()
        torch.testing.assert_close(other.residual, residual)
        torch.testing.assert_close(other.apart(), trained)


def test_switched_on_training_goes_on_from_the_residual_after_the_next_exchange() -> None:
    training = Training(every=2).train(3).resumed(every=2, residual_in_weights=True)
    training.train(1)
    torch.testing.assert_close(training.apart(), training.residual)
    assert float(training.residual.norm()) > 0
