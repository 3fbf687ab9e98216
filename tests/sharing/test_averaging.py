"""Means of tensors over ranks, in chunks; here of one rank, on a wire that counts."""

import re
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.sharing import Averaging, averaging
from lightning_sparsecomm.sharing.averaging import average_


def handed(wire: Wire) -> list[tuple[int, int]]:
    return [(traffic.calls, traffic.handed_bytes) for traffic in wire.ledger.rows.get(PARAMETERS, {}).values()]


def test_floating_point_tensors_are_averaged_and_others_left(wire: Wire) -> None:
    wire.world_size = 2  # One addend, divided by two: what a rank of zeros would leave.
    weights, narrow, wide = (
        torch.ones(3),
        torch.full((2,), 4.0, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
    )
    count, empty = torch.tensor(7), torch.ones(0)
    turned = torch.ones(2, 3).t()
    average_([weights, count, narrow, empty, wide, turned], wire)
    assert weights.tolist() == [0.5] * 3
    assert narrow.tolist() == [2.0] * 2
    assert narrow.dtype == torch.bfloat16
    assert wide.tolist() == [0.5] * 2
    assert turned.tolist() == [[0.5, 0.5]] * 3
    assert count == 7
    # Three, two and six elements in float32, and two in float64.
    assert handed(wire) == [(2, 4 * 11 + 8 * 2)]


def test_a_large_model_is_averaged_in_chunks(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "_CHUNK", 4)
    wire.world_size = 2
    tensors = [torch.ones(size) for size in (3, 1, 2, 9, 1)]
    average_(tensors, wire)
    assert all(tensor.tolist() == [0.5] * tensor.numel() for tensor in tensors)
    # Tensors are not cut: 3 + 1, then 2, then 9 by itself, then 1.
    assert handed(wire) == [(4, 4 * 16)]


def test_nothing_to_average_takes_no_collective(wire: Wire) -> None:
    average_([torch.tensor(1), torch.ones(0)], wire)
    assert handed(wire) == []


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "1"])
def test_every_must_be_a_number_of_steps(every: Any) -> None:
    with pytest.raises(
        ValueError,
        match=rf"every.* must be a whole number of optimizer steps, at least 1; got {re.escape(repr(every))}\.",
    ):
        Averaging(every)


@pytest.mark.parametrize("switch", ["buffers", "optimizer_state"])
def test_switches(switch: str) -> None:
    with pytest.raises(TypeError, match=f"{switch} must be True or False; got 'no'"):
        Averaging(5, **{switch: "no"})  # type: ignore[arg-type]
