"""The contents of checkpoints: told apart, each rank's own entries, and the mean of several ranks' states."""

import copy
from typing import Any

import pytest
import torch

from lightning_sparsecomm.run.contents import fingerprint_of, mean_with, own_entries, with_entries


def test_a_fingerprint_sees_weights_numbers_and_texts() -> None:
    checkpoint = {
        "state_dict": {"w": torch.randn(500, 3), "e": torch.empty(0)},
        "epoch": 3,
        "loops": [1.5, ("a", None)],
    }
    assert fingerprint_of(checkpoint) == fingerprint_of({**checkpoint})
    changed: list[dict[str, Any]] = [
        {**checkpoint, "epoch": 4},
        {**checkpoint, "loops": [1.5, ("b", None)]},
        {**checkpoint, "loops": [1.5, "a", None]},
        {**checkpoint, "state_dict": {"w": checkpoint["state_dict"]["w"] + 1e-3, "e": torch.empty(0)}},  # type: ignore[index]
        {**checkpoint, "state_dict": {"w": checkpoint["state_dict"]["w"].double(), "e": torch.empty(0)}},  # type: ignore[index]
        {key: value for key, value in checkpoint.items() if key != "epoch"},
    ]
    assert len({fingerprint_of(each) for each in (checkpoint, *changed)}) == 1 + len(changed)


def test_a_ranks_own_entries_take_the_place_of_rank_0s() -> None:
    handed = {"w": torch.ones(2)}
    averages = {"current": {"w": torch.zeros(2)}}
    checkpoint = {
        "state_dict": handed,
        "loops": {"w": torch.ones(2)},
        "callbacks": {"EMA": averages, "Timer": {"seconds": 3.0, "scalar": torch.tensor(1.0)}},
        "ema": [torch.zeros(2)],
        "epoch": 3,
    }
    entries = own_entries(checkpoint, handed)
    assert entries == {"ema": checkpoint["ema"], "callbacks": {"EMA": averages}}
    # A callback has put other weights in the place of those that were handed over.
    assert own_entries({**checkpoint, "state_dict": {"w": torch.zeros(2)}}, handed).keys() == {*entries, "state_dict"}
    read_back: dict[str, Any] = {"state_dict": {}, "epoch": 3, "callbacks": {"EMA": {}, "Timer": {"seconds": 1.0}}}
    with_entries(read_back, entries)
    assert read_back["callbacks"] == {"EMA": averages, "Timer": {"seconds": 1.0}}
    assert read_back["ema"] is entries["ema"]
    assert read_back["state_dict"] == {}


def test_the_mean_of_states_of_several_ranks() -> None:
    states = [
        {
            "held": {"a": torch.tensor([1.0, 2]), "b": torch.tensor(3.0)},
            "steps": 5,
            "members": ["a"],
            "n": torch.tensor(1),
        },
        {"held": {"a": torch.tensor([3.0, 4])}, "steps": 5, "members": ["a", "c"], "n": torch.tensor(9)},
        {
            "held": {"a": torch.tensor([5.0, 9]), "c": torch.tensor(6.0)},
            "steps": 5,
            "members": ["d"],
            "n": torch.tensor(9),
        },
    ]
    mean: Any = states[0]
    for count, state in enumerate(states[1:], start=2):
        mean = mean_with(mean, state, count)
    assert mean["held"]["a"].tolist() == [3, 5]
    # What some rank lacks counts as zero there.
    assert mean["held"]["b"].item() == pytest.approx(1)
    assert mean["held"]["c"].item() == pytest.approx(2)
    assert (mean["steps"], mean["members"], mean["n"].item()) == (5, ["a", "c", "d"], 1)
    streams = mean_with([{"x": torch.tensor(1.0)}], [{"x": torch.tensor(3.0)}], 2)
    assert streams == [{"x": torch.tensor(2.0)}]


def test_a_state_that_is_none_counts_as_zero() -> None:
    state = {"held": {"x": torch.tensor(4.0), "step": 3}, "streams": [{"y": torch.tensor([8.0])}]}
    none = {"held": None, "streams": None}
    for states in ([state, none], [none, state]):
        mean = copy.deepcopy(states[0])
        mean = mean_with(mean, copy.deepcopy(states[1]), 2)
        assert mean == {"held": {"x": 2.0, "step": 3}, "streams": [{"y": 4.0}]}
