"""How many times fewer bytes a run says that it will send."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.planning.exchanges import more_by_epochs
from lightning_sparsecomm.planning.saving import times_fewer_bytes
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Averaging, Method
from tests.distributed.launch import run_ranks
from tests.planning.test_chooser import train


def _said(rank: int, folder: str, method: Method) -> Any:
    ratios: list[float] = []
    end = pl.Trainer.fit

    def fit(trainer: pl.Trainer, *args: Any, **options: Any) -> None:
        end(trainer, *args, **options)
        ratios.append(trainer.strategy.ledger.compression_ratio())  # type: ignore[attr-defined]

    pl.Trainer.fit = fit  # type: ignore[method-assign]
    _, _, said = train(rank, folder, method, None)
    return said, ratios[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method",
    [
        methods.gradient_dropping(0.1),
        methods.sbc(0.2, every=5),
        methods.dgc(0.1, warmup_steps=0),
        methods.dgc(0.1, warmup_steps=0, delay=1),
        # The last steps of three epochs are nearly half of its exchanges.
        methods.dgc(0.1, warmup_steps=0, every=25),
        # As the default: what exchanges tables of few rows in each step has none here.
        methods.dgc(0.1, warmup_steps=0, every=25, few_rows=True),
        # It exchanges once amid the run, and once at its end.
        methods.diloco(every=60),
        # Each other exchange averages one moment, each third the other.
        methods.des_loc(every=5),
    ],
    ids=repr,
)
def test_the_line_at_the_start_says_what_the_ledger_counts_in_the_end(tmp_path: Path, method: Method) -> None:
    (said, ratio), (nothing, _) = run_ranks(tmp_path, 2, _said, str(tmp_path), method)
    assert nothing == []
    found = re.search(r"; about ([\d.,]+) times fewer bytes than ddp$", said[0])
    assert found is not None, said
    assert float(found[1].replace(",", "")) == pytest.approx(ratio, rel=0.15)


def test_ddp_says_nothing_of_the_kind(tmp_path: Path) -> None:
    (said, _), _ = run_ranks(tmp_path, 2, _said, str(tmp_path), methods.dense())
    assert "times fewer" not in said[0]


def test_nothing_is_said_of_what_follows_from_how_large_gradients_are(tmp_path: Path) -> None:
    (said, _), _ = run_ranks(tmp_path, 2, _said, str(tmp_path), methods.strom(0.001))
    assert "strom(threshold=0.001)" in said[0]
    assert "times fewer" not in said[0]


@pytest.mark.parametrize(
    ("method", "averaging", "normalized", "more"),
    [
        # Two running statistics of 100 float32 with each exchange.
        (methods.sbc(0.1, every=10), None, True, 2 * 400 / 10),
        (methods.sbc(0.1, every=10), None, False, 0),
        (methods.gradient_dropping(0.1), None, True, 0),
        # All weights and biases, every 50 steps.
        (methods.gradient_dropping(0.1), Averaging(50), False, 4 * 10_100 / 50),
    ],
)
def test_what_ranks_average_besides_counts(
    method: Method, averaging: Averaging | None, normalized: bool, more: float
) -> None:
    def fewer(average: Averaging | None, norm: nn.Module) -> float:
        engine = Engine(method, MirrorWire(2))
        linear = nn.Linear(100, 100)
        engine.registry.add_module(nn.Sequential(linear, norm))
        engine.replicas.averaging = average
        tracked = engine.register(torch.optim.SGD(linear.parameters(), lr=0.1))
        found = times_fewer_bytes(engine, tracked, 1000.0)
        engine.close()
        return found

    ddp = 4 * 10_100
    plain = ddp / fewer(None, nn.Identity())
    norm = nn.BatchNorm1d(100, affine=False) if normalized else nn.Identity()
    assert ddp / fewer(averaging, norm) - plain == pytest.approx(more, abs=0.5)


@pytest.mark.parametrize(
    ("method", "length", "epoch_steps", "times"),
    [
        # Steps 0, 4, 8 and, at the ends of epochs, 5 and 11.
        (methods.dgc(0.1, every=4), 12, 6, 5 / 3),
        (methods.dgc(0.1, every=4), 12, 12, 4 / 3),
        # Step 4 ends an epoch, and 9 another.
        (methods.dgc(0.1, every=4), 10, 5, 4 / 3),
        # 0, 4, 6 and not 8, 12, 13, 16, 20, 24, 27.
        (methods.dgc(0.1, every=4), 28, 7, 9 / 7),
        (methods.dgc(0.1, every=2), 1000, 11, 1.0),
        (methods.dgc(0.1), 12, 6, 1.0),
        (methods.sbc(0.1, every=4), 12, 6, 1.0),
        (methods.dgc(0.1, every=4), math.inf, 6, 1.0),
        (methods.dgc(0.1, every=4), 12, math.inf, 1.0),
    ],
)
def test_exchanges_at_the_ends_of_epochs_count(method: Method, length: float, epoch_steps: float, times: float) -> None:
    assert more_by_epochs(method.syncs, length, epoch_steps) == pytest.approx(times)
