"""What ranks measure of their gradients: 1 where they agree, 1/W where they are noise."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.channel.coherence import SAMPLED, Coherence

CPU, RANKS, STEPS = torch.device("cpu"), 4, 40
LAYOUT = Layout([("a", (50, 7)), ("b", (3, 2))])


def total_of(gradients: Tensor, positions: Tensor) -> Tensor:
    """What ranks sum of their gradients of the first tensor, `[ranks, 350]`; the second one's are the same."""
    rows = [torch.stack([each.take(at % 350) for each in gradients]) for at in positions]
    return torch.stack([torch.cat([row.sum(0), row.square().sum()[None]]) for row in rows])


def measured(signal: float, noise: float) -> Coherence:
    coherence, generator = Coherence(), torch.Generator().manual_seed(0)
    for step in range(STEPS):
        common = signal * torch.randn(350, generator=generator)
        gradients = common + noise * torch.randn(RANKS, 350, generator=generator)
        total = total_of(gradients, coherence.positions(LAYOUT, step, CPU))
        coherence.take(["a", "b"], [True, False], total, RANKS, step)
    return coherence


@pytest.mark.parametrize(("signal", "noise", "expected"), [(1.0, 0.0, 1.0), (0.0, 1.0, 0.25), (1.0, 1.0, 0.625)])
def test_it_is_what_the_mean_over_ranks_keeps(signal: float, noise: float, expected: float) -> None:
    """(signal² + noise²/W) / (signal² + noise²), though the signal is another in each step."""
    assert measured(signal, noise).of("a", RANKS) == pytest.approx(expected, abs=0.1)


def test_it_is_1_before_anything_was_summed_and_where_nobody_has_a_gradient() -> None:
    coherence = measured(0.0, 1.0)
    assert coherence.of("b", RANKS) == Coherence().of("a", RANKS) == 1.0


@pytest.mark.parametrize(("ranks", "of_noise"), [(2, 1.0), (4, 1.0), (16, 0.5), (64, 0.25)])
def test_of_noise_a_rank_trains_ahead_by_no_more_than_with_4_ranks(ranks: int, of_noise: float) -> None:
    """A direction of noise is √W times as long as that of all ranks, and is cut to 2."""
    coherence = Coherence()
    assert coherence.ahead("a", ranks) == 1.0
    for sums, expected in (([1.0 / ranks, 1.0], of_noise), ([0.5, 1.0], 1.0), ([0.16, 1.0], max(0.8, of_noise))):
        coherence.load_state_dict({"a": torch.tensor(sums)})  # as versions before the third number saved them
        assert coherence.ahead("a", ranks) == pytest.approx(expected)
        assert coherence.ahead("b", ranks) == 1.0


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zeros_and_what_is_not_finite_change_nothing(value: float) -> None:
    coherence = measured(1.0, 1.0)
    before = coherence.of("a", RANKS)
    coherence.take(["a"], [True], torch.full((1, SAMPLED + 1), value), RANKS, STEPS)
    assert coherence.of("a", RANKS) == before


def test_positions_are_inside_and_differ_from_step_to_step() -> None:
    first, second = (Coherence().positions(LAYOUT, step, CPU) for step in (0, 1_000_000))
    for positions in (first, second):
        assert positions.min() >= 0
        assert (positions.amax(1) < torch.tensor([350, 6])).all()
        assert len(set(positions[0].tolist())) > 0.8 * SAMPLED
    assert not torch.equal(first, second)


def test_less_is_summed_of_small_tensors() -> None:
    layout = Layout([("large", (2000,)), ("middle", (20, 20)), ("small", (64,)), ("nothing", (0,))])
    counts = Coherence().summed(layout, CPU).sum(1) - 1
    assert counts.tolist() == [32, 12, 8, 8]


def steps_due(coherence: Coherence, steps: Iterable[int]) -> list[int]:
    """In which of these steps, which exchange, ranks sum elements."""
    due = []
    for step in steps:
        if coherence.is_due(step):
            due.append(step)
            coherence.take(["a"], [True], torch.ones(1, SAMPLED + 1), RANKS, step)
    return due


@pytest.mark.parametrize(
    ("exchanges", "due"),
    [
        (range(298, 320), [298, 299, 304, 312]),
        # Every second one, but for ends of epochs of 4 steps.
        (range(299, 330, 4), [299, 307, 315, 323]),
        # Steps are set back.
        ([312, 313, 305, 306], [312, 305]),
    ],
)
def test_after_the_first_steps_ranks_sum_in_the_first_exchange_of_eight_steps(
    exchanges: Iterable[int], due: list[int]
) -> None:
    assert steps_due(Coherence(), exchanges) == due


def test_it_is_saved() -> None:
    coherence, loaded = measured(1.0, 1.0), Coherence()
    assert steps_due(coherence, [400, 401]) == [400]
    loaded.load_state_dict(dict(coherence.state_dict()))
    assert loaded.of("a", RANKS) == coherence.of("a", RANKS)
    assert steps_due(loaded, [402, 403, 408]) == [408]
