"""SparsityWarmup sets the density of any method. Callbacks that change the strategy refuse all but ours."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sparsecomm import Method, ParameterAveraging, SparsityWarmup
from lightning_sparsecomm.methods import dgc, gradient_dropping, s2_reducer, sbc, sketched_sgd, sparse_loco
from tests.distributed.scenarios import Classifier, Scenario, fit

PARAMETERS = sum(p.numel() for p in Classifier().parameters())


class Densities(pl.Callback):
    """Notes how many elements are sent in each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: list[int] = [0]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.sent.append(trainer.strategy.ledger.sent_elements)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save([after - before for before, after in pairwise(self.sent)], self.folder / "sent.pt")


@pytest.mark.parametrize(
    ("warmup", "stages"),
    [
        ({"steps": 8}, [0.25 ** (stage / 5) for stage in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]),
        ({"steps": 4, "shape": [1.0, 0.5]}, [1, 1, 0.5, 0.5] + [0.25] * 6),
        ({"epochs": 1}, [0.25 ** (1 / 2)] * 10),
        ({"steps": 5, "shape": "inverse_time"}, [1 - 0.75 ** max(1.0, 5 / t) for t in range(1, 11)]),
    ],
)
def test_density_of_any_method(warmup: dict[str, Any], stages: list[float], tmp_path: Path) -> None:
    callbacks = (SparsityWarmup(**warmup), Densities(tmp_path))
    fit(tmp_path, Scenario(Classifier, steps=10), 2, gradient_dropping(0.25), callbacks)
    assert torch.load(tmp_path / "sent.pt") == [round(stage * PARAMETERS) for stage in stages]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method",
    [
        dgc(0.1, warmup_steps=0),
        sbc(0.1, every=1),
        sketched_sgd(0.1),
        s2_reducer(block_density=0.1, block_size=4),
        sparse_loco(every=1, density=0.1, chunk=20),
    ],
    ids=lambda method: type(method).__name__,
)
def test_density_of_every_method(method: Method, tmp_path: Path) -> None:
    """A tenth without the warm-up, everything with it, or everything of one sign where a method sends one sign only."""
    fit(tmp_path, Scenario(Classifier, steps=4), 2, method, (SparsityWarmup(steps=2, shape=[1.0]), Densities(tmp_path)))
    sent = torch.load(tmp_path / "sent.pt")
    assert min(sent[:2]) > 0.4 * PARAMETERS
    assert max(sent[2:]) < 0.3 * PARAMETERS


def test_the_methods_own_warmup_by_epochs(tmp_path: Path) -> None:
    """With ten steps an epoch, each epoch is one stage."""
    method = dgc(0.04, warmup_epochs=1, scope="model")
    fit(tmp_path, Scenario(Classifier, steps=20), 2, method, (Densities(tmp_path),))
    biases = sum(p.numel() for p in Classifier().parameters() if p.dim() < 2)
    sent = [round(density * (PARAMETERS - biases)) + biases for density in (0.2, 0.04)]
    assert torch.load(tmp_path / "sent.pt") == [sent[0]] * 10 + [sent[1]] * 10


@pytest.mark.parametrize("callback", [SparsityWarmup(steps=3), ParameterAveraging(every=3)])
def test_callbacks_need_the_strategy(callback: Any, tmp_path: Path) -> None:
    with pytest.raises(
        Exception, match=f"must be a sparsecomm strategy with the callback {type(callback).__name__}; got DDP"
    ):
        fit(tmp_path, Scenario(Classifier, steps=3), 2, None, (callback,))
