"""What users do between two steps: freeze, take away a group, put another optimizer in place, set weights."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn

from lightning_sparsecomm.exchange import NonFiniteGradientError
from lightning_sparsecomm.methods import (
    dense,
    dgc,
    diloco,
    federated_averaging,
    gradient_dropping,
    local_adam,
    powersgd,
    quantized,
    s2_reducer,
    sbc,
    sketched_sgd,
)
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy
from tests.distributed.launch import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:other code than the optimizer has changed"),
    pytest.mark.filterwarnings("ignore:.* frozen in training"),
]

WORLD_SIZE, STEPS, EVENT_AT = 2, 12, 5


class Branches(nn.Module):
    """A body, and a branch that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.branch, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = self.body(x)
        return self.head(torch.tanh(hidden + self.branch(x) if branch else hidden))


def _optimizer(parameters: Any, kind: str, rate: float = 0.1) -> torch.optim.Optimizer:
    if kind == "Adam":
        return torch.optim.Adam(parameters, lr=rate / 10)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3)


class Run:
    """A Fabric loop of which one step is preceded by an event."""

    def __init__(self, rank: int, method: Method | None, kind: str) -> None:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
        self.rank, self.kind = rank, kind
        unused = {"find_unused_parameters": True}
        options = unused if method is None or isinstance(method, dense) else {}
        ours = SparseCommStrategy(method, length=STEPS, **options)
        self.strategy = ours if method is not None else DDPStrategy(**options)
        self.fabric = Fabric(
            accelerator="cpu", devices=WORLD_SIZE, strategy=self.strategy, plugins=[TorchElasticEnvironment()]
        )
        self.fabric.launch()
        self.model = Branches()
        parts = [self.model.body.parameters(), [*self.model.branch.parameters(), *self.model.head.parameters()]]
        self.optimizer: Any = _optimizer([{"params": list(part)} for part in parts], kind)
        self.module, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def train(self, event: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.rank)
        for step in range(STEPS):
            if step == EVENT_AT:
                getattr(self, event, lambda: None)()
            x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
            branch = event != "freeze_before_the_first_step" or self.rank == 0
            self.fabric.backward(nn.functional.mse_loss(self.module(x, branch), y))
            if event == "freeze_before_the_first_step" and step == 0:
                self.model.branch.requires_grad_(False)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.after_step(step)
        if hasattr(self.strategy, "settle"):
            self.strategy.settle()
        return {name: weight.detach().numpy().copy() for name, weight in self.model.named_parameters()}

    def after_step(self, step: int) -> None:
        """Called after each step."""

    def replace_the_optimizer(self) -> None:
        self.optimizer = self.fabric.setup_optimizers(_optimizer(self.model.parameters(), self.kind, 0.05))

    def split_the_optimizer(self) -> None:
        """The new optimizer trains what the former one is deprived of."""
        self.optimizer.optimizer.param_groups.pop()
        other = self.fabric.setup_optimizers(_optimizer([*self.model.branch.parameters()], self.kind, 0.05))
        former = self.optimizer

        class Both:
            def step(self) -> None:
                former.step()
                other.step()

            def zero_grad(self) -> None:
                former.zero_grad()
                other.zero_grad()

        self.optimizer = Both()

    def set_a_weight(self) -> None:
        """And train it no more, so that it must stay what it was set to."""
        with torch.no_grad():
            self.model.body.weight.data.fill_(3.0)
        self.optimizer.optimizer.param_groups[0]["lr"] = 0.0

    def remove_a_group(self) -> None:
        self.optimizer.optimizer.param_groups.pop()


def _train(rank: int, method: Method | None, kind: str, event: str) -> dict[str, Any]:
    return Run(rank, method, kind).train(event)


EVENTS = ["freeze_before_the_first_step", "replace_the_optimizer", "split_the_optimizer", "remove_a_group"]
METHODS: dict[str, tuple[Method, str]] = {
    "dense": (dense(), "SGD"),
    "dgc": (dgc(0.1), "SGD"),
    "gradient_dropping": (gradient_dropping(0.1), "SGD"),
    "sketched_sgd": (sketched_sgd(0.1, columns=20), "SGD"),
    "s2_reducer": (s2_reducer(block_density=0.3, block_size=8), "SGD"),
    "powersgd": (powersgd(1), "SGD"),
    "quantized": (quantized(4), "SGD"),
    "local_adam": (local_adam(0.1), "Adam"),
    "dgc, late": (dgc(0.1, delay=1), "SGD"),
    "dgc, local steps": (dgc(0.1, every=3), "SGD"),
    "dgc, ahead": (dgc(0.1, residual_in_weights=True), "SGD"),
    "sbc": (sbc(0.1, every=3), "SGD"),
    "sbc, ahead": (sbc(0.1, every=3, residual_in_weights=True), "SGD"),
    "federated_averaging": (federated_averaging(every=3), "SGD"),
    "diloco": (diloco(every=3), "Adam"),
}


# One of gradients and one of weights; the others are slow together.
QUICK = ("dgc", "sbc")


@pytest.mark.few(4)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_replicas_stay_equal(tmp_path: Path, name: str, event: str) -> None:
    method, kind = METHODS[name]
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, kind, event)
    start = dict(Branches().named_parameters())
    for name in ranks[0]:
        assert np.array_equal(ranks[0][name], ranks[1][name]), name
        assert np.isfinite(ranks[0][name]).all()
        assert not np.array_equal(ranks[0][name], start[name].detach().numpy()), name


# With federated averaging a rank without a gradient takes no step of its own, so the first event is not one of ddp's.
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "event"),
    [(name, event) for name in ("dense", "dgc") for event in EVENTS]
    + [pytest.param("gradient_dropping", event, marks=pytest.mark.slow) for event in EVENTS]
    + [("federated_averaging", event) for event in EVENTS[1:]],
)
def test_at_full_density_it_is_ddp(tmp_path: Path, name: str, event: str) -> None:
    method = {
        "dense": dense(),
        "dgc": dgc(1.0),
        "gradient_dropping": gradient_dropping(1.0),
        # Local momentum is averaged only as far as it has changed weights; so every step, and a rate that is small.
        "federated_averaging": federated_averaging(every=1, buffers="own"),
    }[name]
    ddp = run_ranks(tmp_path, WORLD_SIZE, _train, None, "SGD", event)
    ours = run_ranks(tmp_path, WORLD_SIZE, _train, method, "SGD", event)
    for key in ddp[0]:
        np.testing.assert_allclose(ours[0][key], ddp[0][key], rtol=0, atol=2e-5, err_msg=key)


def _residuals(rank: int, name: str, event: str) -> list[Any]:
    run = Run(rank, *METHODS[name])
    counts: list[Any] = []
    change = getattr(run, event)

    def held() -> tuple[float, list[int]]:
        optimizers = run.strategy.engine.registry.optimizers
        shares = [share.state_dict() for each in optimizers for share in each.shares.values()]
        residuals = [
            state[kind] for state in shares for kind in state if "ErrorFeedback" in kind and "unit" not in kind
        ]
        norm = sum(float(part.norm()) ** 2 for parts in residuals for part in parts.values()) ** 0.5
        return norm, [each.steps for each in optimizers]

    def noted() -> None:
        counts.append(held())
        change()
        counts.append(held())

    setattr(run, event, noted)
    run.train(event)
    return counts


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dgc", "gradient_dropping", "local_adam", "sbc"])
def test_a_new_optimizer_takes_over_residual_and_steps(tmp_path: Path, name: str) -> None:
    for before, after in run_ranks(tmp_path, WORLD_SIZE, _residuals, name, "replace_the_optimizer"):
        assert before[0] > 0
        assert after[0] == pytest.approx(before[0], rel=1e-5)
        assert before[1] == after[1] == [EVENT_AT]


def test_a_new_optimizer_takes_over_part_of_another(tmp_path: Path) -> None:
    for before, after in run_ranks(tmp_path, WORLD_SIZE, _residuals, "dgc", "split_the_optimizer"):
        assert before[0] > 0
        assert after[0] == pytest.approx(before[0], rel=1e-5)
        assert (before[1], after[1]) == ([EVENT_AT], [EVENT_AT, EVENT_AT])


def _set(rank: int, name: str, event_at: int) -> list[list[float]]:
    run, found = Run(rank, *METHODS[name]), []

    def look(step: int) -> None:
        if step == event_at - 1:
            run.set_a_weight()
        # The exchange after that: one step in three ends with one.
        if step == event_at // 3 * 3 + 2:
            found.append(run.model.body.weight.flatten().tolist())

    run.after_step = look
    run.train("")
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("event_at", [6, 7, 8], ids=["after an exchange", "amid training", "before an exchange"])
@pytest.mark.parametrize("name", ["sbc", "federated_averaging", "diloco"])
def test_what_is_set_on_all_ranks_moves_the_anchor(tmp_path: Path, name: str, event_at: int) -> None:
    for found in run_ranks(tmp_path, WORLD_SIZE, _set, name, event_at):
        assert found == [[3.0] * 48]


def _clamp(rank: int, name: str) -> list[float]:
    run, largest = Run(rank, *METHODS[name]), []

    def clamp(step: int) -> None:
        largest.append(max(float(weight.detach().abs().max()) for weight in run.model.parameters()))
        for weight in run.model.parameters():
            weight.data.clamp_(-0.05, 0.05)

    run.after_step = clamp
    run.train("")
    return largest


@pytest.mark.parametrize("name", ["sbc", "federated_averaging", "diloco"])
def test_what_is_clamped_stays_clamped(tmp_path: Path, name: str) -> None:
    """After each step, as a Wasserstein GAN does: an exchange does not undo it."""
    for largest in run_ranks(tmp_path, WORLD_SIZE, _clamp, name):
        # Every third step ends with an exchange, and none lies further beyond the bound than one step leads.
        assert max(largest[5::3]) <= 1.2 * max(*largest[3::3], *largest[4::3])


def _set_differently(rank: int, everywhere: bool) -> str:
    run = Run(rank, *METHODS["sbc"])

    def look(step: int) -> None:
        if step == 5 and (everywhere or rank == 1):
            run.model.body.weight.data.fill_(float(rank))

    run.after_step = look
    try:
        run.train("")
    except ValueError as error:
        return str(error)
    return ""


def _set_and_replace(rank: int, name: str) -> tuple[float, float]:
    run, found = Run(rank, *METHODS[name]), []

    def look(step: int) -> None:
        if step == 5:
            run.model.body.weight.data.fill_(3.0)
            run.optimizer = run.fabric.setup_optimizers(_optimizer(run.model.parameters(), run.kind, 1e-9))
        # The exchange after that; the one after the next also sends what residuals held before.
        if step == 8:
            weight = run.model.body.weight.detach()
            found.append((float(weight.min()), float(weight.max())))

    run.after_step = look
    run.train("")
    return found[0]


@pytest.mark.parametrize("name", ["sbc", "diloco"])
def test_what_is_set_while_the_optimizer_is_replaced_moves_the_anchor(tmp_path: Path, name: str) -> None:
    for least, largest in run_ranks(tmp_path, WORLD_SIZE, _set_and_replace, name):
        assert least == pytest.approx(3.0, abs=1e-5)
        assert largest == pytest.approx(3.0, abs=1e-5)


def _save_what_was_set(rank: int, name: str, path: str, set_at: int) -> list[float]:
    run = Run(rank, *METHODS[name])
    generator = torch.Generator().manual_seed(rank)
    ends: list[Tensor] = []
    for resumed in (False, True):
        for step in range(STEPS):
            x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
            if resumed and step < set_at:
                continue
            if step == set_at:
                state = {"model": run.module, "optimizer": run.optimizer}
                if resumed:
                    run.fabric.load(path, state)
                else:
                    run.model.body.weight.data.fill_(3.0)
                    run.fabric.save(path, state)
            run.fabric.backward(nn.functional.mse_loss(run.module(x), y))
            run.optimizer.step()
            run.optimizer.zero_grad()
        ends.append(run.model.body.weight.detach().clone())
        generator.manual_seed(rank)
    return [float((ends[0] - ends[1]).abs().max())]


@pytest.mark.few(2)
@pytest.mark.parametrize("set_at", [4, 6], ids=["amid training", "after an exchange"])
@pytest.mark.parametrize("name", ["sbc", "diloco"])
def test_what_is_set_before_a_save_moves_the_anchor_in_a_resumed_run(tmp_path: Path, name: str, set_at: int) -> None:
    for (off,) in run_ranks(tmp_path, WORLD_SIZE, _save_what_was_set, name, str(tmp_path / "a.ckpt"), set_at):
        assert off == 0


def _train_on_nan(rank: int, at: int) -> str:
    run = Run(rank, *METHODS["federated_averaging"])

    def look(step: int) -> None:
        # What a backward pass with NaN in it makes of weights: they change in a step, and not by the user.
        if rank == 1 and step + 1 == at:
            run.optimizer.optimizer.param_groups[0]["lr"] = float("nan")

    run.after_step = look
    try:
        run.train("")
    except NonFiniteGradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at", [6, 7, 8])
def test_a_weight_that_training_made_nan_is_not_taken_for_set(tmp_path: Path, at: int) -> None:
    for text in run_ranks(tmp_path, WORLD_SIZE, _train_on_nan, at):
        assert text.startswith("rank 1 has a weight update that is not finite")


def _set_to_nan(rank: int) -> str:
    run = Run(rank, *METHODS["sbc"])

    def look(step: int) -> None:
        if step == 6 and rank == 1:
            run.model.body.weight.data.fill_(float("nan"))

    run.after_step = look
    try:
        run.train("")
    except NonFiniteGradientError as error:
        return str(error)
    return ""


def test_what_is_set_to_nan_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(tmp_path, WORLD_SIZE, _set_to_nan):
        assert text.startswith("rank 1 has a weight update that is not finite, for parameter 'body.weight'")


def _warned(rank: int) -> list[str]:
    run = Run(rank, *METHODS["sbc"])
    run.after_step = lambda step: run.model.body.weight.data.clamp_(-0.05, 0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train("")
    return [str(each.message) for each in caught if "other code than the optimizer" in str(each.message)]


def test_that_it_travels_whole_is_said_once(tmp_path: Path) -> None:
    said, other = run_ranks(tmp_path, WORLD_SIZE, _warned)
    assert other == []
    (words,) = said
    assert "changed 1 parameter(s) between two steps, such as 'body.weight'" in words
    assert "48 elements" in words


@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_set_differently_is_refused(tmp_path: Path, everywhere: bool) -> None:
    who = "set to different values" if everywhere else "left alone by ranks 0"
    for text in run_ranks(tmp_path, WORLD_SIZE, _set_differently, everywhere):
        assert text.startswith("parameter 'body.weight' was changed between two steps, and not equally on all ranks")
        assert who in text
