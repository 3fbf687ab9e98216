"""An exchange of weights that has failed, and is repeated: nothing is lost by it."""

import pytest
import torch

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing.share import Turn
from tests.sharing.mirrored import Mirrored

METHODS = [
    methods.sbc(density=0.2, every=2),
    methods.sbc(density=0.2, every=2, residual_in_weights=True),
    methods.sparse_loco(every=2, chunk=16, density=0.25, outer_lr=0.5),
    methods.diloco(every=2),
]


class Training(Mirrored):
    def start(self) -> None:
        self.share.prepare(Turn("weights", self.made))
        self.share.exchange()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_taken_back_and_repeated_is_as_if_it_had_not_failed(
    method: methods.sbc | methods.sparse_loco | methods.diloco, dtype: torch.dtype
) -> None:
    undisturbed, disturbed = Training(method, dtype), Training(method, dtype)
    with torch.no_grad():
        for _ in range(3):
            for training in (undisturbed, disturbed):
                with torch.enable_grad():
                    training.step()
                    training.step()
            before, norm, steps = disturbed.weights(), disturbed.share.residual_norm(), disturbed.share.steps
            for _ in range(2):
                disturbed.start()
                disturbed.share.take_back()
                torch.testing.assert_close(disturbed.weights(), before)
                assert disturbed.share.residual_norm() == pytest.approx(norm, abs=1e-6)
                assert disturbed.share.steps == steps
            for training in (undisturbed, disturbed):
                training.start()
                training.share.commit()
            torch.testing.assert_close(disturbed.weights(), undisturbed.weights(), atol=1e-6, rtol=1e-5)
    assert disturbed.share.steps == 0


def test_before_the_exchange_there_is_nothing_to_take_back() -> None:
    training = Training(METHODS[0], torch.float32)
    training.step()
    before = training.weights()
    with torch.no_grad():
        training.share.take_back()
    assert torch.equal(training.weights(), before)
