"""On three ranks, each step of the literature's selectors equals a naive reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.methods import adacomp, dryden, gradient_dropping, strom
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.test_low_rank_reference import MATRICES, _train
from tests.distributed.test_reference import SHAPES, SIZES, STEPS, gradients_of
from tests.reference import selectors
from tests.reference.selectors import Array, WithResidual

WEIGHTS = [shape for shape in SHAPES if len(shape) > 1]
N = int(MATRICES.sum())
Quantize = Callable[[Array, Array, int], Array]

CASES: dict[str, tuple[Method, Quantize]] = {
    "strom": (strom(3.0), lambda x, g, seed: selectors.strom(x, 3.0, once=False)),
    "strom, once": (strom(3.0, once=True), lambda x, g, seed: selectors.strom(x, 3.0, once=True)),
    "dryden": (dryden(0.1), lambda x, g, seed: selectors.dryden(x, WEIGHTS, 0.1, seed)),
    "dryden, little": (dryden(0.001), lambda x, g, seed: selectors.dryden(x, WEIGHTS, 0.001, seed)),
    "adacomp": (adacomp(), lambda x, g, seed: selectors.adacomp(x, g, WEIGHTS, (50, 500), all_bins=True)),
    "adacomp, not all bins": (
        adacomp(bin_size=20, convolution_bin_size=7, all_bins=False),
        lambda x, g, seed: selectors.adacomp(x, g, WEIGHTS, (7, 20), all_bins=False),
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_step_by_step(tmp_path: Path, name: str) -> None:
    method, quantize = CASES[name]
    at = [0]
    ranks = run_ranks(tmp_path, 3, _train, method, torch.float64)
    reference = WithResidual(3, N, lambda x, g: quantize(x, g, Round(Layout([]), at[0]).shared_seed()))
    all_gradients = [gradients_of(rank) for rank in range(3)]
    for step in range(STEPS):
        at[0] = step
        gradients = [own[step].astype(np.float64) for own in all_gradients]
        expected = np.mean(gradients, axis=0)
        expected[MATRICES] = reference.step([gradient[MATRICES] for gradient in gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            # What is decoded is float32, and may cancel out.
            np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())
            np.testing.assert_allclose(residual, own, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by", ["norm", "entropy"])
def test_a_tensors_share_follows_from_what_it_has(tmp_path: Path, by: Literal["norm", "entropy"]) -> None:
    """gradient_dropping(scope="norm") and "entropy": of all tensors, biases too."""
    ranks = run_ranks(tmp_path, 3, _train, gradient_dropping(0.1, scope=by), torch.float64)
    at = [0]

    def quantize(residual: Array, gradient: Array) -> Array:
        counts = selectors.shares(residual, SHAPES, 0.1, by)
        return selectors.largest(residual, counts, SHAPES, Round(Layout([]), at[0]).shared_seed())

    reference = WithResidual(3, sum(SIZES), quantize)
    all_gradients = [gradients_of(rank) for rank in range(3)]
    for step in range(STEPS):
        at[0] = step
        expected = reference.step([own[step].astype(np.float64) for own in all_gradients])
        for trained, own in zip(ranks, reference.residuals, strict=True):
            seen, residual = trained[step]
            assert seen.tobytes() == ranks[0][step][0].tobytes()
            np.testing.assert_allclose(seen, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(residual, own, rtol=1e-12, atol=1e-11)
