"""Settings of an optimizer, taken over from another replica."""

import json

import torch
from torch.optim import SGD, AdamW

from lightning_sparsecomm.elastic.settings import follow_settings, settings_of


def test_numbers_and_pairs_are_taken_over_and_all_else_is_left() -> None:
    def made(rate: float, betas: tuple[float, float]) -> AdamW:
        groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(2)], "weight_decay": rate}]
        return AdamW(groups, lr=rate, betas=betas, amsgrad=rate > 0.1)

    ours, theirs = made(0.1, (0.9, 0.99)), made(0.2, (0.8, 0.95))
    follow_settings(ours, json.loads(json.dumps(settings_of(theirs))))
    for own, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for name in ("lr", "betas", "weight_decay", "eps"):
            assert own[name] == other[name]
        assert own["amsgrad"] is False


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = SGD([torch.zeros(1)], lr=rate)
    follow_settings(optimizer, settings_of(SGD([torch.zeros(1)], lr=0.25, momentum=0.75)))
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25
    assert optimizer.param_groups[0]["momentum"] == 0.75
