"""The laws, for every method, in every way of using DDP, on Gloo with two and three processes."""

from pathlib import Path

import pytest

from lightning_sparsecomm.methods import Method, dense, gradient_dropping
from tests import laws
from tests.distributed.recording import recorded
from tests.distributed.scenarios import SCENARIOS, fit

every_scenario = pytest.mark.parametrize("name", SCENARIOS)


@every_scenario
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_density_equals_ddp(tmp_path: Path, name: str, world_size: int) -> None:
    scenario = SCENARIOS[name]
    ddp = fit(tmp_path / "ddp", scenario, world_size)
    laws.trained(scenario.model().state_dict(), ddp[0])
    laws.replicas_are_equal(ddp)

    ours = fit(tmp_path / "dense", scenario, world_size, dense())
    if world_size == 2:
        for rank in range(world_size):
            laws.bit_equal(ours[rank], ddp[rank])
    else:
        laws.equal_to_round_off(ours[0], ddp[0], scenario.tolerance)
    laws.replicas_are_equal(ours)

    ours = fit(tmp_path / "sparse", scenario, world_size, gradient_dropping(density=1.0))
    # Buffers too, on every rank: they are broadcast from the first when ddp would.
    for rank in range(world_size):
        laws.equal_to_round_off(ours[rank], ddp[rank], scenario.tolerance)
    laws.replicas_are_equal(ours)


METHODS: dict[str, Method] = {
    "model": gradient_dropping(density=0.05),
    "tensor_float16": gradient_dropping(density=0.05, scope="tensor", values="float16"),
    "exclude": gradient_dropping(density=0.05, exclude=["*.bias"]),
}


@every_scenario
@pytest.mark.parametrize("method", METHODS)
def test_sparse_methods_obey_the_laws(tmp_path: Path, name: str, method: str) -> None:
    world_size = 3 if method == "model" else 2
    ranks = fit(tmp_path, SCENARIOS[name], world_size, recorded(METHODS[method]))
    laws.trained(SCENARIOS[name].model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    laws.shared_is_bit_equal(ranks)
    for rank in ranks:
        laws.sent_plus_residual_is_compensated(rank)
