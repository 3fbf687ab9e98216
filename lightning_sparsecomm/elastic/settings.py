"""The settings of an optimizer, which must be equal on replicas that are to stay equal: rates, momentum, decay."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """For each group, its numbers and pairs of numbers, by name.

    >>> settings_of(torch.optim.Adam([torch.zeros(1)], lr=0.1))[0]["betas"]
    [0.9, 0.999]
    """
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_number(value)}
        for group in optimizer.param_groups
    ]


def follow_settings(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Takes over what `settings_of` has returned on another replica."""
    for group, values in zip(optimizer.param_groups, settings):
        for name, value in values.items():
            own = group.get(name)
            if isinstance(own, Tensor):
                own.fill_(value)
            elif _is_number(own):
                group[name] = tuple(value) if isinstance(own, tuple) else value


def _is_number(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_number, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor) else value
