"""Local moments of Adam: each step equals a naive reference, and one rank alone is torch's optimizer."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import coherence
from lightning_sparsecomm.methods import local_adam
from lightning_sparsecomm.run.choice import method_for
from lightning_sparsecomm.run.engine import Engine
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Classifier, Scenario, Training, fit, fit_several
from tests.distributed.test_reference import (
    SHAPES,
    SIZES,
    STEPS,
    WORLD_SIZE,
    Parameters,
    flat,
    gradients_of,
    starting_weights,
)
from tests.distributed.test_resume import BATCHES, Network, outside_launcher, train
from tests.reference.local_adam import LocalAdam

DENSE = [len(shape) < 2 for shape in SHAPES]
SPARSE = [index for index, dense in enumerate(DENSE) if not dense]
BOUNDS = np.cumsum(SIZES)[:-1]


class Trained(NamedTuple):
    """After each step: a rank's weights, and what it holds by kind, over the sparse tensors."""

    weights: list[np.ndarray]
    held: list[dict[str, np.ndarray]]


def settings_at(step: int, options: dict[str, Any], scheduled: bool) -> dict[str, Any]:
    """What the optimizer's group holds in one step."""
    if not scheduled:
        return options
    first, second = options["betas"]
    wave = 0.5 + 0.5 * np.cos(step / 7)
    return {**options, "lr": options["lr"] * (0.05 + 0.95 * wave), "betas": (first * (0.6 + 0.4 * wave), second)}


def absent(step: int, rank: int, tensor: int) -> bool:
    """The last sparse tensor lacks a gradient in some steps: on one rank, or on all."""
    return tensor == SPARSE[-1] and ((step % 5 == 2 and rank == 1) or step % 11 == 7)


def _train(
    rank: int,
    kind: type[torch.optim.Adam],
    method: dict[str, Any],
    options: dict[str, Any],
    scheduled: bool,
    gaps: bool,
) -> Trained:
    module = Parameters()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(local_adam(**method), Wire())
    engine.registry.add_module(module)
    optimizer = kind(module.parameters(), **options)
    trained = Trained([], [])
    for step, gradient in enumerate(gradients_of(rank)):
        for index, (parameter, part) in enumerate(zip(module.parameters(), torch.from_numpy(gradient).split(SIZES))):
            parameter.grad = None if gaps and absent(step, rank, index) else part.clone().view(parameter.shape)
        optimizer.param_groups[0].update(settings_at(step, options, scheduled))
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        (tracked,) = engine.registry.optimizers
        # The sync that comes first is the compressed one.
        state = next(iter(tracked.shares.values())).state_dict()
        trained.held.append({kind.split(".", 1)[1]: flat(parts.values()) for kind, parts in state.items()})
        trained.weights.append(flat(p.detach() for p in module.parameters()))
    engine.close()
    return trained


ADAM = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
CASES = [
    ("Adam", {}, ADAM, False, False),
    ("Adam", {}, {**ADAM, "weight_decay": 0.1}, True, False),
    ("Adam", {"clip": 3.0}, {**ADAM, "weight_decay": 0.1, "maximize": True}, True, True),
    ("AdamW", {}, {**ADAM, "weight_decay": 0.1, "eps": 0.1}, False, True),
    ("AdamW", {"density": 0.3, "clip": 5.0}, {**ADAM, "weight_decay": 0.1}, True, False),
    ("AdamW", {"density": 1.0}, {**ADAM, "weight_decay": 0.1}, True, True),
    ("AdamW", {}, {**ADAM, "betas": (0.0, 0.99), "weight_decay": 0.1}, False, False),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("kind", "method", "options", "scheduled", "gaps", "first_steps"),
    [
        *((*case, 300) for case in CASES[:1] + CASES[4:]),
        *((*case, 3) for case in CASES[2:4]),
        *(pytest.param(*case, 300, marks=pytest.mark.slow) for case in CASES[1:4]),
    ],
)
def test_each_step_equals_the_reference(
    tmp_path: Path,
    kind: str,
    method: dict[str, Any],
    options: dict[str, Any],
    scheduled: bool,
    gaps: bool,
    first_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first steps, ranks compare their gradients in every eighth only."""
    monkeypatch.setattr(coherence, "_FIRST_STEPS", first_steps)
    # After one step, all directions have a magnitude of 1: which are the largest is a matter of round-off.
    density = method.get("density", 0.05)
    recipe = {**method, "density": Stages([1.0, density], steps=[0, 1])}
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, getattr(torch.optim, kind), recipe, options, scheduled, gaps)
    reference = LocalAdam(np.split(starting_weights(), BOUNDS), DENSE, WORLD_SIZE, method.get("clip"), first_steps)
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        gradients = [
            [None if gaps and absent(step, rank, t) else g for t, g in enumerate(np.split(own[step], BOUNDS))]
            for rank, own in enumerate(all_gradients)
        ]
        settings = settings_at(step, options, scheduled)
        reference.step(gradients, density if step else 1.0, decoupled=kind == "AdamW", **settings)
        for rank, trained in enumerate(ranks):
            held = trained.held[step]
            rate = settings["lr"]
            np.testing.assert_allclose(trained.weights[step], np.concatenate(reference.weights), rtol=1e-5, atol=2e-5)
            for name, expected in (
                ("LocalAdam.exp_avg", reference.firsts),
                ("LocalAdam.exp_avg_sq", reference.seconds),
            ):
                np.testing.assert_allclose(held[name], _sparse(expected[rank]), rtol=1e-5, atol=1e-5)
            residual = held["ErrorFeedback"]
            np.testing.assert_allclose(residual * rate, _sparse(reference.residuals[rank]), rtol=1e-4, atol=2e-5)
            assert held["LocalAdam.step"].tolist() == [reference.steps[rank][t] for t in SPARSE]
    for rank in range(WORLD_SIZE):
        held = _sparse(reference.sent[rank]) + _sparse(reference.residuals[rank])
        np.testing.assert_allclose(held, _sparse(reference.directions[rank]), rtol=1e-9, atol=1e-9)


def _sparse(tensors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[t] for t in SPARSE])


def adam(kind: type[torch.optim.Adam] = torch.optim.Adam, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda module: kind(module.parameters(), **{"lr": 0.01, **options})


def groups(module: nn.Module) -> Any:
    body = {"params": module.body.parameters(), "betas": (0.5, 0.9), "weight_decay": 0.3, "lr": 0.02}
    rest = {"params": [*module.side.parameters(), *module.head.parameters()], "eps": 1e-3}
    return torch.optim.AdamW([body, rest], lr=0.01)


class Descent(torch.optim.AdamW):
    """Overrides step(), so that torch's hooks run for both its step() and Adam's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


OPTIMIZERS = {
    "plain": adam(),
    "decay": adam(weight_decay=0.1),
    "decoupled": adam(torch.optim.AdamW, weight_decay=0.1),
    "groups": groups,
    "fused": adam(torch.optim.AdamW, weight_decay=0.1, fused=True),
    "for_loop": adam(weight_decay=0.1, foreach=False),
    "tensor_lr": adam(lr=torch.tensor(0.01), weight_decay=0.1, foreach=False),
    "maximize": adam(lr=1e-3, weight_decay=0.1, maximize=True),
    "subclass": adam(Descent, weight_decay=0.1),
}


class Configured(Classifier):
    """Has any optimizer, with a state as after loading a checkpoint of ddp if one is given."""

    def __init__(self, configure: Callable[[nn.Module], Any], state: list[tuple[torch.Tensor, ...]] | None) -> None:
        super().__init__()
        self.configure, self.state = configure, state

    def configure_optimizers(self) -> Any:
        return self.configure(self)

    def on_train_start(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        for parameter, (first, second) in zip(self.parameters(), self.state or []):
            moments = {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}
            optimizer.state[parameter].update(step=torch.tensor(7.0), **moments)


@pytest.mark.parametrize("begun", [pytest.param(False, marks=pytest.mark.slow), True])
def test_alone_at_full_density_it_is_torchs_optimizer(tmp_path: Path, begun: bool) -> None:
    state = [(torch.randn(p.shape) * 0.1, torch.rand(p.shape) + 0.1) for p in Classifier().parameters()]
    trainings, scenarios = {}, {}
    for name, configure in OPTIMIZERS.items():
        scenarios[name] = Scenario(lambda configure=configure: Configured(configure, state if begun else None))
        trainings[name] = Training(scenarios[name])
        trainings[f"{name}, ours"] = Training(scenarios[name], local_adam(1.0))
    found = fit_several(tmp_path, 1, trainings)
    for name, scenario in scenarios.items():
        laws.trained(scenario.model().state_dict(), found[name][0])
        # Where a gradient is next to nothing, round-off decides on Adam's direction.
        laws.equal_to_round_off(found[f"{name}, ours"][0], found[name][0], 5e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_replicas_stay_equal(tmp_path: Path, precision: str) -> None:
    scenario = Scenario(lambda: Configured(OPTIMIZERS["groups"], None), {"precision": precision})
    ranks = fit(tmp_path, scenario, 2, local_adam(0.05, values="float16", scope="model"))
    laws.trained(scenario.model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)


def _checkpoints(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Trains an epoch with one of ddp and local_adam, and goes on with the other."""
    outside_launcher(rank, 2)
    states = []
    for name, first, second in (("to ddp", local_adam(0.05), None), ("from ddp", None, local_adam(0.05))):
        train(folder / name, 2, first, 1, Network(adam=True))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(sparsecomm|beside).*")
            trainer, _ = train(folder / name, 2, second, 2, Network(adam=True), folder / name / "epoch=0.ckpt")
        (optimizer,) = trainer.optimizers
        model = trainer.lightning_module
        state = optimizer.state[model.body[0].weight]
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        states.append({"steps": float(state["step"]), "moments": bool(state["exp_avg_sq"].all()), "finite": finite})
    return states


def test_checkpoints_of_ddp_and_ours_go_on_with_the_other(tmp_path: Path) -> None:
    for states in run_ranks(tmp_path, 2, _checkpoints, tmp_path, timeout=110):
        assert states == [{"steps": 2.0 * BATCHES, "moments": True, "finite": True}] * 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.NAdam, "the method is not defined for NAdam: local moments replace those of torch.optim.Adam and"),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), "amsgrad must be False with local moments"),
    ],
)
def test_other_optimizers_are_refused(make: Any, text: str) -> None:
    module = nn.Linear(3, 2)
    optimizer = make(module.parameters())
    with pytest.raises(TypeError, match=text):
        method_for(optimizer, [local_adam()], list(module.named_parameters()))
