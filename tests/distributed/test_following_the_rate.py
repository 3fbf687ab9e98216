"""Whatever the density and the learning rates, what is applied in the end is what ddp applies."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.schedules import ByLength
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import default, dgc, gradient_dropping, powersgd, quantized, s2_reducer, sketched_sgd
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import SIZES, STEPS, WORLD_SIZE, Parameters, flat, gradients_of, starting_weights

# Falls, rises, stops for a while, starts again far lower, recovers, and ends near 0.
RATES = [0.0, 0.05, 0.1, 0.1, 0.3, 0.3, 0.0, 0.0, 0.0, 1e-6, 0.1, 0.2, 0.05, 0.01]
RATES += [0.1] * 30 + [0.01, 1e-3] + [1e-5] * 4


def _train(
    rank: int,
    method: Method,
    rates: list[float],
    length: float,
    momentum: float,
    settle: bool,
    sign: float = 1.0,
    frozen: bool = False,
) -> Any:
    module = Parameters()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    engine.length = length
    optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum, maximize=sign < 0)
    for step, (rate, gradient) in enumerate(zip(rates, gradients_of(rank), strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = sign * part.clone().view(parameter.shape)
        if frozen and step == len(rates) - 1:
            module.requires_grad_(False)
            optimizer.zero_grad()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    before = flat(p.detach() for p in module.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if settle:
            engine.settle()
    says_so = [each for each in caught if "frozen in training, and what still waited" in str(each.message)]
    assert bool(says_so) is (frozen and rank == 0)
    if frozen:
        np.testing.assert_array_equal(before, flat(p.detach() for p in module.parameters()))
    weights, norm = flat(p.detach() for p in module.parameters()), engine.residual_norm()
    engine.close()
    return weights, norm


def _ddp(rates: list[float], momentum: float) -> np.ndarray:
    weights, velocity = starting_weights().astype(np.float64), np.zeros(sum(SIZES))
    for step, rate in enumerate(rates):
        mean = np.mean([gradients_of(rank)[step] for rank in range(WORLD_SIZE)], axis=0, dtype=np.float64)
        velocity = momentum * velocity + mean
        weights -= rate * velocity
    return weights


# As the rate falls, what waits is scaled up beyond float16.
@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:.* values beyond")
@pytest.mark.parametrize("settle", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("method", "momentum"),
    [
        (default(), 0.9),
        (dgc(0.02), 0.9),
        (dgc(0.02, delay=1), 0.9),
        (dgc(0.02, every=3), 0.9),
        (dgc(0.02, residual_in_weights=True), 0.9),
        pytest.param(default(delay=1), 0.9, marks=pytest.mark.slow),
        (dgc(0.3, warmup_steps=0, values="float16"), 0.5),
        pytest.param(dgc(ByLength(), scope="balanced", values="two_bit"), 0.9, marks=pytest.mark.slow),
        pytest.param(dgc(ByLength(), scope="balanced", values="three_bit"), 0.9, marks=pytest.mark.slow),
        (gradient_dropping(0.05, scope="balanced"), 0.0),
        (sketched_sgd(0.05), 0.9),
        pytest.param(s2_reducer(0.1, block_size=4, sketch_ratio=None), 0.0, marks=pytest.mark.slow),
        pytest.param(powersgd(1), 0.0, marks=pytest.mark.slow),
        pytest.param(quantized(4), 0.0, marks=pytest.mark.slow),
    ],
)
def test_the_weights_end_where_ddp_would_put_them(
    tmp_path: Path, method: Method, momentum: float, settle: bool
) -> None:
    """These gradients do not depend on the weights: nothing may be lost, and nothing counted at another rate."""
    length = float("inf") if settle else STEPS
    for weights, norm in run_ranks(tmp_path, WORLD_SIZE, _train, method, RATES, length, momentum, settle):
        assert norm == 0
        np.testing.assert_allclose(weights, _ddp(RATES, momentum), rtol=1e-4, atol=2e-3)


def test_without_it_they_do_not(tmp_path: Path) -> None:
    method = dgc(0.02, warmup_steps=0, follow_rate=False)
    (weights, norm), *_ = run_ranks(tmp_path, WORLD_SIZE, _train, method, RATES, float(STEPS), 0.9, True)
    assert norm > 1
    assert np.abs(weights - _ddp(RATES, 0.9)).max() > 1


def test_a_rate_that_is_negative_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"the learning rate must be 0 or more, and finite; got -0\.1"):
        run_ranks(tmp_path, 1, _train, default(), [-0.1] * STEPS, float(STEPS), 0.9, True)


def test_what_waits_is_applied_upwards_where_sgd_maximizes(tmp_path: Path) -> None:
    for weights, _ in run_ranks(tmp_path, WORLD_SIZE, _train, dgc(0.02), RATES, float(STEPS), 0.9, True, -1.0):
        np.testing.assert_allclose(weights, _ddp(RATES, 0.9), rtol=1e-4, atol=2e-3)


def test_weights_that_are_frozen_before_the_last_step_stay_as_they_are(tmp_path: Path) -> None:
    run_ranks(tmp_path, WORLD_SIZE, _train, dgc(0.02), RATES, float("inf"), 0.9, True, 1.0, True)


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [1e-9, 1e8])
def test_the_default_suits_losses_of_any_scale(tmp_path: Path, scale: float) -> None:
    rates = [rate / scale for rate in RATES]
    for weights, _ in run_ranks(tmp_path, WORLD_SIZE, _train, default(), rates, float(STEPS), 0.9, True, scale):
        np.testing.assert_allclose(weights, _ddp(RATES, 0.9), rtol=1e-4, atol=2e-3)
