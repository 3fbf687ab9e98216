"""Averages of replicas that drift, where ranks hold unlike state."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import federated_averaging
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Averaging
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import SIZES, Parameters, gradients_of

MISSING = 2
"""The parameter for which rank 1 never has a gradient."""


def _train(rank: int) -> list[np.ndarray | None]:
    """After an average: the first moment of each parameter, None where there is none."""
    module = Parameters()
    engine = Engine(federated_averaging(100), Wire())
    engine.registry.add_module(module)
    engine.replicas.averaging = Averaging(2, optimizer_state=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    weights = list(module.parameters())
    for _, gradient in zip(range(2), gradients_of(rank)):
        for index, (weight, part) in enumerate(zip(weights, torch.from_numpy(gradient).split(SIZES))):
            weight.grad = None if rank and index == MISSING else part.clone().view(weight.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    engine.close()
    moments = [optimizer.state.get(weight, {}).get("exp_avg") for weight in weights]
    return [None if each is None else each.numpy() for each in moments]


@pytest.mark.filterwarnings("ignore:ParameterAveraging leaves 4 of 4 parameters alone")
def test_state_that_one_rank_lacks_stays_and_the_rest_is_averaged(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _train)
    assert second[MISSING] is None
    gradients = [[np.split(each, np.cumsum(SIZES)[:-1]) for each in gradients_of(rank)[:2]] for rank in range(2)]
    for index, moment in enumerate(first):
        own = [0.09 * earlier[index] + 0.1 * later[index] for earlier, later in gradients]
        expected = own[0] if index == MISSING else (own[0] + own[1]) / 2
        np.testing.assert_allclose(moment, expected.reshape(moment.shape), rtol=1e-5, atol=1e-6)
        if index != MISSING:
            np.testing.assert_array_equal(moment, second[index])
