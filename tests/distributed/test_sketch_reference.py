"""On three ranks, each step of Sketched-SGD and S2 Reducer equals a naive reference written from the papers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.methods import s2_reducer, sketched_sgd
from tests.distributed.launch import run_ranks
from tests.distributed.test_reference import (
    SHAPES,
    SIZES,
    STEPS,
    WORLD_SIZE,
    _train,
    gradients_of,
    starting_weights,
)
from tests.reference import count_sketch
from tests.reference.s2_reducer import S2Reducer
from tests.reference.sketched_sgd import SketchedSGD

SPARSE = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]


class Sketch:
    """The naive count sketch of one step, with the hashes that all ranks draw in it."""

    def __init__(self, step: int, rows: int, columns: int, size: int) -> None:
        self.seed = Round(Layout([]), step).shared_seed()
        self.shape = (rows, columns)
        places = [[count_sketch.place(i, row, columns, self.seed) for i in range(size)] for row in range(rows)]
        self.columns = np.array([[column for column, _ in row] for row in places])
        self.negated = np.array([[negated for _, negated in row] for row in places])

    def insert(self, x: NDArray[Any]) -> NDArray[Any]:
        table = np.zeros(self.shape, x.dtype)
        for row, columns, negated in zip(table, self.columns, self.negated):
            np.add.at(row, columns, np.where(negated, -x, x))
        return table

    def query(self, table: NDArray[Any]) -> NDArray[Any]:
        read = np.take_along_axis(table, self.columns, axis=1)
        return np.median(np.where(self.negated, -read, read), axis=0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rows", "columns", "candidates", "options", "momentum"),
    [
        (3, 60, 4, {"momentum_masking": True}, 0.9),
        (4, 30, 2, {"density": 0.1}, 0.9),
        (1, 20, 3, {"density": 0.02}, 0.5),
        # Large enough to miss nothing, and with all elements as candidates.
        (5, 3000, 1000, {"always_sketch": True}, 0.9),
    ],
)
def test_sketched_sgd(
    tmp_path: Path, rows: int, columns: int, candidates: int, options: dict[str, Any], momentum: float
) -> None:
    method = sketched_sgd(**{"density": 0.05, **options}, rows=rows, columns=columns, candidates=candidates)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, {"lr": 0.1, "momentum": momentum})
    bounds = np.cumsum(SIZES)[:-1]
    reference = SketchedSGD(
        np.split(starting_weights(), bounds),
        [len(shape) < 2 for shape in SHAPES],
        WORLD_SIZE,
        options.get("density", 0.05),
        candidates,
        options.get("momentum_masking", False),
    )
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    for step in range(STEPS):
        sketch = Sketch(step, rows, columns, sum(SIZES[i] for i in SPARSE))
        gradients = [np.split(own[step], bounds) for own in all_gradients]
        reference.step(gradients, 0.1, momentum, sketch.insert, sketch.query, sketch.seed)
        for rank, trained in enumerate(ranks):
            velocity, residual = trained.memories[step]
            np.testing.assert_allclose(residual, reference.residuals[rank], rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(velocity, reference.velocities[rank], rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(trained.weights[step], np.concatenate(reference.weights), rtol=1e-5, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("density", "block_size", "sketch_ratio", "rows"),
    [(0.1, 256, None, 1), (0.1, 3, None, 1), (0.2, 4, 0.5, 1), (0.1, 256, 0.6, 3), (1.0, 5, 0.5, 2)],
)
def test_s2_reducer(tmp_path: Path, density: float, block_size: int, sketch_ratio: float | None, rows: int) -> None:
    method = s2_reducer(density, block_size, sketch_ratio, rows)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, {"lr": 0.1})
    reference = S2Reducer(WORLD_SIZE, SHAPES, density, block_size)
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    sparse = np.concatenate([np.full(size, i in SPARSE) for i, size in enumerate(SIZES)])
    for step in range(STEPS):
        own = [gradients[step].astype(np.float64) for gradients in all_gradients]

        def sketch(size: int, step: int = step) -> Sketch:
            return Sketch(step, rows, max(1, int(np.ceil((sketch_ratio or 0) * size / rows))), size)

        if sketch_ratio is None:
            expected = reference.step(own)
        else:
            expected = reference.step(
                own, lambda x: sketch(len(x)).insert(x), lambda table, size: sketch(size).query(table)
            )
        for rank, trained in enumerate(ranks):
            np.testing.assert_allclose(trained.seen[step], expected, rtol=1e-4, atol=3e-4)
            (residual,) = trained.memories[step]
            np.testing.assert_allclose(residual, reference.residuals[rank][sparse], rtol=1e-5, atol=2e-5)
