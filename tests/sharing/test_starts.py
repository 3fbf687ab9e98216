"""Ranks that train on from what they have not sent yet, too."""

from typing import Any

import pytest
import torch

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing.share import Turn
from tests.sharing.mirrored import Mirrored


class Training(Mirrored):
    def __init__(self, **options: Any) -> None:
        super().__init__(methods.sbc(density=0.2, momentum_masking=False, **options))

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
