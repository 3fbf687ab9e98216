"""The small parts, each by itself: layout, rounds, schedules, what memories hold."""

import math

import pytest
import torch

from lightning_sparsecomm.compensation import Contribution
from lightning_sparsecomm.layout import MAX_SIZE, Layout, SparseVector, mean
from lightning_sparsecomm.memory import ErrorFeedback
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import DensityWarmup, Warmup

LAYOUT = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])


def test_layout() -> None:
    assert LAYOUT.size == 11
    vector = torch.arange(11.0)
    views = LAYOUT.views(vector)
    assert [tuple(view.shape) for view in views] == [(2, 3), (0, 4), (), (4,)]
    assert torch.equal(torch.cat([view.flatten() for view in views]), vector)
    views[3][0] = -1
    assert vector[7] == -1
    assert LAYOUT.counts(torch.tensor([0, 5, 6, 10])) == [2, 0, 1, 1]
    assert LAYOUT.counts(torch.tensor([], dtype=torch.int64)) == [0, 0, 0, 0]


def test_layouts_differ_where_names_shapes_or_order_do() -> None:
    same = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])
    assert same == LAYOUT
    assert same.fingerprint == LAYOUT.fingerprint
    for other in ([("a", (3, 2)), ("b", (4,))], [("b", (4,)), ("a", (2, 3))], [("a", (2, 3)), ("c", (4,))]):
        assert Layout(other).fingerprint != Layout([("a", (2, 3)), ("b", (4,))]).fingerprint
    with pytest.raises(ValueError, match="names must differ"):
        Layout([("a", (1,)), ("a", (2,))])
    with pytest.raises(ValueError, match="32-bit"):
        Layout([("a", (MAX_SIZE + 1,))])


@pytest.mark.parametrize("count", [1, 40, 400])
def test_mean_adds_in_order_sparse_or_dense(count: int) -> None:
    size = 500
    generator = torch.Generator().manual_seed(count)
    vectors, expected = [], torch.zeros(size)
    for _ in range(3):
        indices = torch.randperm(size, generator=generator)[:count].sort().values
        vectors.append(SparseVector(indices, torch.randn(count, generator=generator), size))
    for vector in vectors:
        expected += vector.dense()
    result = mean(vectors, torch.float32)
    assert isinstance(result, SparseVector) == (3 * count <= size // 8)
    dense = result.dense() if isinstance(result, SparseVector) else result
    assert torch.equal(dense, expected / 3)
    # A dense vector among them, and float64 throughout.
    mixed = mean([*vectors[:2], vectors[2].dense()], torch.float64)
    torch.testing.assert_close(mixed, expected.double() / 3)


def test_seeds_are_shared_or_each_ranks_own_and_new_in_each_round() -> None:
    rounds = [Round(LAYOUT, step, seed=seed, rank=rank) for step in range(20) for seed in range(3) for rank in range(4)]
    shared = {(round.step, round.seed): round.shared_seed() for round in rounds}
    assert all(round.shared_seed() == shared[round.step, round.seed] for round in rounds)
    seeds = [*shared.values(), *(round.rank_seed() for round in rounds)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, second = Round(LAYOUT, 5, rank=0), Round(LAYOUT, 5, rank=1)
    assert torch.equal(*(torch.rand(3, generator=r.shared_generator()) for r in (first, second)))
    assert not torch.equal(*(torch.rand(3, generator=r.rank_generator()) for r in (first, second)))


def test_inverse_time_warmup() -> None:
    schedule = DensityWarmup(density=0.01, steps=1000, shape="inverse_time")
    # R_t = R^max(1, T/t) with R = 0.99, T = 1000, at t = 1, 500, 1000, 5000.
    for step, ratio in ((0, 1000.0), (499, 2.0), (999, 1.0), (4999, 1.0)):
        assert schedule.at(step, 0.0) == pytest.approx(1 - 0.99**ratio)
    densities = [schedule.at(step, 0.0) for step in range(1200)]
    assert densities == sorted(densities, reverse=True)
    assert all(0 < density <= 1 for density in densities)
    assert Round(LAYOUT, step=999).density(schedule) == pytest.approx(0.01)


def test_exponential_warmup() -> None:
    # p^((e+1)/(E+1)) with p = 0.001 and E = 4 epochs, whatever the step.
    epochs = DensityWarmup(0.001, epochs=4)
    expected = [0.001 ** (stage / 5) for stage in (1, 1, 2, 3, 4, 5, 5)]
    assert [epochs.at(7, epoch) for epoch in (0, 0.99, 1, 2.5, 3, 4, 9)] == pytest.approx(expected)
    # Counted in steps, four stages of equal length.
    steps = DensityWarmup(0.001, steps=1000)
    assert [steps.at(step, 99.0) for step in (0, 249, 250, 500, 750, 1000, 5000)] == pytest.approx(expected)
    listed = DensityWarmup(0.001, steps=10, shape=[0.5, 0.1])
    assert [listed.at(step, 0.0) for step in (0, 4, 5, 9, 10)] == [0.5, 0.5, 0.1, 0.1, 0.001]


def test_a_warmup_from_outside_works_on_any_density() -> None:
    early, late = Round(LAYOUT, step=0, warmup=Warmup(steps=100)), Round(LAYOUT, step=100, warmup=Warmup(steps=100))
    for density in (0.01, DensityWarmup(0.01, steps=1)):
        assert late.density(density) == pytest.approx(0.01)
    assert early.density(0.01) == pytest.approx(0.01**0.2)
    # In the place of the method's own warm-up.
    middle = Round(LAYOUT, step=30, warmup=Warmup(steps=100))
    assert middle.density(DensityWarmup(0.01, steps=1000)) == pytest.approx(0.01**0.4)
    longer = Round(LAYOUT, step=30, warmup=Warmup(steps=20))
    assert longer.density(DensityWarmup(0.01, steps=100)) == pytest.approx(0.01)
    assert Warmup(steps=100).unfinished(101, 1) is None
    assert Warmup(steps=100).unfinished(100, 1) == "100 steps of warm-up in a run of 100"
    assert Warmup(epochs=4).unfinished(1e9, 3) == "4 epochs of warm-up in a run of 3"


def _ones(layout: Layout) -> Contribution:
    return Contribution(layout.views(torch.ones(layout.size)))


def test_error_feedback_keeps_what_was_not_sent_when_the_layout_grows() -> None:
    small, large = Layout([("b", (4,))]), LAYOUT
    memory = ErrorFeedback()
    memory.bind(small, torch.float32, torch.device("cpu"))
    memory.compensate(_ones(small), Round(small))
    memory.update(SparseVector(torch.tensor([1, 2]), torch.tensor([1.0, 0.25]), 4))
    assert memory.state_dict()["b"].tolist() == [1, 0, 0.75, 1]
    memory.bind(large, torch.float64, torch.device("cpu"))
    compensated = memory.compensate(_ones(large), Round(large))
    assert compensated.flat is not None
    assert compensated.flat.tolist() == [1] * 7 + [2, 1, 1.75, 2]
    assert memory.norm() == pytest.approx(math.sqrt(7 + 4 + 1 + 1.75**2 + 4))


@pytest.mark.parametrize("bound_first", [True, False])
def test_a_memory_takes_over_its_state(bound_first: bool) -> None:
    memory, other = ErrorFeedback(decay=0.5), ErrorFeedback(decay=0.5)
    for each in (memory, other) if bound_first else (memory,):
        each.bind(LAYOUT, torch.float32, torch.device("cpu"))
    memory.compensate(_ones(LAYOUT), Round(LAYOUT))
    other.load_state_dict({name: tensor.clone() for name, tensor in memory.state_dict().items()})
    other.bind(LAYOUT, torch.float32, torch.device("cpu"))
    results = [each.compensate(_ones(LAYOUT), Round(LAYOUT)).flat for each in (memory, other)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].tolist() == results[1].tolist() == [1.5] * 11


def test_a_state_of_another_shape_is_refused() -> None:
    memory = ErrorFeedback()
    memory.load_state_dict({"b": torch.zeros(5)})
    with pytest.raises(ValueError, match=r"'b' has shape \(5,\), but the parameter has \(4,\)"):
        memory.bind(LAYOUT, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("decay", [0, -1, 1.5])
def test_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be in \(0, 1\]"):
        ErrorFeedback(decay)
