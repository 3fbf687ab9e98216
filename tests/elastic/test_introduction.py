"""What a replica offers: the samples behind its step."""

import math

import torch
from torch.optim import SGD

from lightning_sparsecomm.elastic.introduction import offer_of
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing import Turn


def test_a_gradient_is_offered_with_its_samples_and_one_of_old_weights_with_none() -> None:
    tracked, turn = TrackedOptimizer(SGD([torch.zeros(1)], lr=0.1), 0), Turn("gradients", 3)
    assert offer_of(tracked, turn, [0], math.inf).samples is None
    for samples in (8, 3):
        tracked.samples.add(samples)
    fresh, stale = offer_of(tracked, turn, [0], math.inf), offer_of(tracked, turn, [0], math.inf, stale=True)
    assert (fresh.trained, fresh.samples) == (1, 11)
    assert (stale.trained, stale.samples) == (0, 0)
    tracked.samples.add(math.nan)
    assert offer_of(tracked, turn, [0], math.inf).samples is None


def test_the_last_offer_is_that_of_the_runs_last_step_however_long_it_is_likely_to_be() -> None:
    """A run that may end sooner is likely to be shorter, for densities."""
    tracked = TrackedOptimizer(SGD([torch.zeros(1)], lr=0.1), 0)
    turns = [Turn("weights", step, length=5000) for step in (98, 99, 4999, 5000)]
    assert [offer_of(tracked, turn, [], 100).last for turn in turns[:2]] == [False, True]
    assert [offer_of(tracked, turn, [], math.inf).last for turn in turns[2:]] == [False, False]
