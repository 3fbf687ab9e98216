"""Rounds: their seeds, and the density under a warm-up that overrides the method's own."""

import pytest
import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import DensityWarmup, Warmup

LAYOUT = Layout([("a", (2, 3)), ("empty", (0, 4)), ("scalar", ()), ("b", (4,))])


def test_seeds_are_shared_or_each_ranks_own_and_new_in_each_round() -> None:
    rounds = [Round(LAYOUT, step, seed=seed, rank=rank) for step in range(20) for seed in range(3) for rank in range(4)]
    shared = {(context.step, context.seed): context.shared_seed() for context in rounds}
    assert all(context.shared_seed() == shared[context.step, context.seed] for context in rounds)
    seeds = [*shared.values(), *(context.rank_seed() for context in rounds)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    first, second = Round(LAYOUT, 5, rank=0), Round(LAYOUT, 5, rank=1)
    assert torch.equal(*(torch.rand(3, generator=r.shared_generator()) for r in (first, second)))
    assert not torch.equal(*(torch.rand(3, generator=r.rank_generator()) for r in (first, second)))


def test_a_warmup_from_outside_works_on_any_density() -> None:
    early, late = Round(LAYOUT, step=0, warmup=Warmup(steps=100)), Round(LAYOUT, step=100, warmup=Warmup(steps=100))
    for density in (0.01, DensityWarmup(0.01, steps=1)):
        assert late.density(density) == pytest.approx(0.01)
    assert early.density(0.01) == pytest.approx(0.01**0.2)
    # Instead of the method's own warm-up.
    middle = Round(LAYOUT, step=30, warmup=Warmup(steps=100))
    assert middle.density(DensityWarmup(0.01, steps=1000)) == pytest.approx(0.01**0.4)
    longer = Round(LAYOUT, step=30, warmup=Warmup(steps=20))
    assert longer.density(DensityWarmup(0.01, steps=100)) == pytest.approx(0.01)
