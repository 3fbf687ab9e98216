"""The references of the sketching methods, against examples by hand, their laws, and torch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.reference.s2_reducer import S2Reducer, blocks_of
from tests.reference.sketched_sgd import SketchedSGD, true_top_k

Vector = np.ndarray
SHAPES = [(30, 7), (30,), (5, 3, 2)]
SIZES = [210, 30, 30]
DENSE = [False, True, False]
RANKS = 3


def without_collisions(x: Vector) -> Vector:
    """A sketch without collisions: inserts and queries exactly."""
    return x


def gradients(generator: np.random.Generator) -> list[list[Vector]]:
    return [[generator.standard_normal(size) for size in SIZES] for _ in range(RANKS)]


def sketched_sgd(density: float, candidates: int, mask: bool = True) -> SketchedSGD:
    start = [np.random.default_rng(9).standard_normal(size) for size in SIZES]
    return SketchedSGD(start, DENSE, RANKS, density, candidates, mask)


def test_sketched_sgd_by_hand() -> None:
    start = [np.zeros(4), np.zeros(1)]
    reference = SketchedSGD(start, [False, True], ranks=2, density=0.25, candidates=2)
    first = [[np.array([4.0, 1.0, 0.0, 3.0]), np.array([2.0])], [np.array([-4.0, 1.0, 0.0, 2.0]), np.array([4.0])]]
    # The sums are 0, 2, 0, 5. The sketch overrates the third, so the last two are the candidates.
    error = np.array([0, 0, 9, 0])
    kept = reference.step(first, lr=1.0, momentum=0.5, insert=without_collisions, query=lambda table: table + error)
    assert kept == [3]
    np.testing.assert_array_equal(reference.weights[0], [0, 0, 0, -2.5])
    np.testing.assert_array_equal(reference.weights[1], [-3])
    for memories in (reference.residuals, reference.velocities):
        np.testing.assert_array_equal(memories, [[4, 1, 0, 0], [-4, 1, 0, 0]])
    nothing = [[np.zeros(4), np.zeros(1)] for _ in range(2)]
    # u halves and is added to v: 1.5 on both ranks at the second element. Where ranks cancel out, nothing is sent.
    assert reference.step(nothing, lr=1.0, momentum=0.5, insert=without_collisions, query=without_collisions) == [1]
    np.testing.assert_array_equal(reference.weights[0], [0, -1.5, 0, -2.5])
    np.testing.assert_array_equal(reference.weights[1], [-4.5])
    np.testing.assert_array_equal(reference.residuals, [[6, 0, 0, 0], [-6, 0, 0, 0]])
    np.testing.assert_array_equal(reference.velocities, [[2, 0, 0, 0], [-2, 0, 0, 0]])


@pytest.mark.parametrize("candidates", [1, 4])
def test_sketched_sgd_without_collisions_is_true_top_k(candidates: int) -> None:
    generator = np.random.default_rng(0)
    reference = sketched_sgd(0.05, candidates)
    for _ in range(10):
        step = gradients(generator)
        velocities = [
            0.9 * u + np.concatenate([own[0], own[2]]) for u, own in zip(reference.velocities, step, strict=True)
        ]
        expected = true_top_k([v + u for v, u in zip(reference.residuals, velocities)], k=12)
        assert reference.step(step, 0.1, 0.9, without_collisions, without_collisions) == expected
        assert len(expected) == 12
        for u, v in zip(reference.velocities, reference.residuals):
            assert not u[expected].any() and not v[expected].any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sketched_sgd_of_everything_is_torchs(momentum: float) -> None:
    generator = np.random.default_rng(0)
    reference = sketched_sgd(1.0, 1, mask=False)
    theirs = [torch.nn.Parameter(torch.tensor(weight)) for weight in reference.weights]
    optimizer = torch.optim.SGD(theirs, 0.1, momentum=momentum)
    for _ in range(6):
        step = gradients(generator)
        reference.step(step, 0.1, momentum, without_collisions, without_collisions)
        for t, parameter in enumerate(theirs):
            parameter.grad = torch.tensor(np.mean([own[t] for own in step], axis=0))
        optimizer.step()
        for ours, parameter in zip(reference.weights, theirs, strict=True):
            np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_sketched_sgd_loses_nothing_whatever_the_sketch_says() -> None:
    generator = np.random.default_rng(0)
    reference = sketched_sgd(0.05, 2)
    start = [weight.copy() for weight in reference.weights]
    total = [np.zeros(size) for size in SIZES]
    for _ in range(10):
        step = gradients(generator)
        for t in range(len(SIZES)):
            total[t] += np.mean([own[t] for own in step], axis=0)
        reference.step(step, 0.1, 0.0, without_collisions, lambda table: generator.standard_normal(len(table)))
    waiting = np.split(np.mean(reference.residuals, axis=0), [SIZES[0]])
    for t, rest in zip(range(len(SIZES)), (waiting[0], 0, waiting[1])):
        np.testing.assert_allclose((start[t] - reference.weights[t]) / 0.1 + rest, total[t], atol=1e-12)


def test_blocks_by_hand() -> None:
    blocks = [(block.start, block.stop) for block in blocks_of((2, 5), 2)]
    assert blocks == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]
    assert blocks_of((3, 4, 2), 64) == [slice(0, 8), slice(8, 16), slice(16, 24)]


def test_s2_reducer_by_hand() -> None:
    # Four blocks of two elements, of which each rank sends one; and a tensor of one dimension.
    reference = S2Reducer(ranks=2, shapes=[(4, 2), (1,)], block_density=0.25, block_size=2)
    first = [np.array([3.0, 4, 1, 1, 0, 0, 2, 2, 6]), np.array([0.0, 0, 1, 1, 0, 0, 5, 1, 2])]
    np.testing.assert_array_equal(reference.pack(first), [[3, 4, 0, 0], [0, 0, 5, 1]])
    assert reference.taken == [[0], [3]]
    assert reference.union == [0, 3]
    np.testing.assert_array_equal(reference.residuals, [[0, 0, 1, 1, 0, 0, 2, 2, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0]])
    # With the residuals, the first rank has two non-zero blocks of four. The second has one: few enough to send all.
    shared = reference.step([np.zeros(9), np.array([0.0, 0, 2, 0, 0, 0, 0, 0, 1])])
    np.testing.assert_array_equal(shared, [0, 0, 1.5, 0.5, 0, 0, 1, 1, 0.5])
    assert reference.taken == [[3], [1]]
    np.testing.assert_array_equal(reference.residuals, [[0, 0, 1, 1, 0, 0, 0, 0, 0], np.zeros(9)])


@pytest.mark.parametrize("density", [1.0, 0.001])
def test_s2_reducer_is_exact_where_all_blocks_are_taken(density: float) -> None:
    """All blocks of a dense gradient, or the non-zero rows of a sparse one."""
    generator = np.random.default_rng(0)
    reference = S2Reducer(RANKS, [(40, 6)], density, block_size=4)
    for _ in range(5):
        step = [generator.standard_normal((40, 6)) for _ in range(RANKS)]
        for own in step if density < 1 else []:
            own[generator.permutation(40)[: generator.integers(21, 41)]] = 0
        shared = reference.step([own.ravel() for own in step])
        np.testing.assert_allclose(shared, np.mean(step, axis=0).ravel(), atol=1e-12)
        assert not np.any(reference.residuals)


def count_sketch(size: int, columns: int, seed: int) -> tuple[Callable[[Vector], Vector], Callable[..., Vector]]:
    generator = np.random.default_rng(seed)
    buckets, signs = generator.integers(columns, size=size), generator.choice([-1.0, 1.0], size)

    def insert(x: Vector) -> Vector:
        table = np.zeros(columns)
        np.add.at(table, buckets[: len(x)], signs[: len(x)] * x)
        return table

    return insert, lambda table, n: signs[:n] * table[buckets[:n]]


def test_s2_reducer_feeds_back_what_was_not_taken_and_nothing_of_the_sketch() -> None:
    generator = np.random.default_rng(0)
    exact = S2Reducer(RANKS, SHAPES, block_density=0.1, block_size=4)
    sketched = S2Reducer(RANKS, SHAPES, block_density=0.1, block_size=4)
    whole = slice(210, 240)
    moved, shared = np.zeros(270), np.zeros(270)
    for seed in range(6):
        step = [np.concatenate(own) for own in gradients(generator)]
        moved += np.mean(step, axis=0)
        shared += exact.step(step)
        estimate = sketched.step(step, *count_sketch(270, 20, seed))
        assert sketched.union == exact.union
        np.testing.assert_array_equal(sketched.residuals, exact.residuals)
        np.testing.assert_array_equal(estimate[whole], np.mean(step, axis=0)[whole])
    # 60 blocks and 10 blocks.
    assert [len(taken) for taken in exact.taken] == [6 + 1] * RANKS
    np.testing.assert_allclose(shared + np.mean(exact.residuals, axis=0), moved, atol=1e-12)


def test_s2_reducer_is_right_on_average_over_hashes() -> None:
    step = [np.concatenate(own) for own in gradients(np.random.default_rng(0))]
    exact = S2Reducer(RANKS, SHAPES, block_density=0.1, block_size=4).step(step)
    estimates = []
    for seed in range(300):
        reference = S2Reducer(RANKS, SHAPES, block_density=0.1, block_size=4)
        estimates.append(reference.step(step, *count_sketch(270, 40, seed)))
    error = np.sqrt(np.mean(np.sum((np.array(estimates) - exact) ** 2, axis=1)))
    assert error > 0.5 * np.linalg.norm(exact)
    assert np.linalg.norm(np.mean(estimates, axis=0) - exact) < 1.5 * error / np.sqrt(300)
