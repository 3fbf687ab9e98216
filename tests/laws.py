"""The laws that every method must obey. Each checks what ranks ended with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector

Rank = dict[str, Any]


def bits(tensor: Tensor) -> bytes:
    # Viewed as bytes, since NumPy has no bfloat16.
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def replicas_are_equal(ranks: Sequence[Rank]) -> None:
    """After training, the ranks' parameters are bit-equal."""
    for rank in ranks[1:]:
        for name, tensor in ranks[0]["weights"].items():
            if "running_" in name or "num_batches" in name:
                continue  # Buffers are each rank's own after the last forward pass, as under ddp.
            assert bits(tensor) == bits(rank["weights"][name]), f"{name} differs between replicas"


def bit_equal(ours: Rank, theirs: Rank) -> None:
    """Two trainings end with the same bits, buffers included."""
    for name, tensor in theirs["weights"].items():
        assert bits(tensor) == bits(ours["weights"][name]), (
            f"{name} differs by {(tensor - ours['weights'][name]).abs().max():.2e}"
        )


def equal_to_round_off(ours: Rank, theirs: Rank, tolerance: float) -> None:
    """Two trainings end with the same weights up to float round-off."""
    for name, tensor in theirs["weights"].items():
        torch.testing.assert_close(
            ours["weights"][name], tensor, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def trained(before: dict[str, Tensor], after: Rank) -> None:
    """The weights have changed. That two trainings are equal proves nothing if neither trains."""
    assert any(not torch.equal(tensor, after["weights"][name]) for name, tensor in before.items())


def sent_plus_residual_is_compensated(rank: Rank, tolerance: float = 1e-5, memory: int = 0) -> None:
    """What a rank sent in all steps, plus its residual, is the sum of its OWN gradients that its optimizer consumed.

    The residual is in the memory at index `memory`. It counts as zero for parameters that it does not hold.
    """
    checked = 0
    for sync in rank["syncs"]:
        for stream in sync.values():
            layout: Layout = stream["layout"]
            total = torch.zeros(layout.size)
            for sent in stream["sent"]:
                total += sent.dense() if isinstance(sent, SparseVector) else sent
            for segment, part in zip(layout.segments, layout.views(total), strict=True):
                held = stream["state"][memory].get("residual", {}) if stream["state"] else {}
                residual = held.get(segment.name, torch.zeros(segment.shape))
                consumed = rank["consumed"].get(segment.name, torch.zeros(segment.shape))
                scale = max(1.0, float(consumed.abs().max()))
                torch.testing.assert_close(part + residual, consumed, rtol=0, atol=tolerance * scale)
                checked += 1
    assert checked, "nothing was recorded"


def shared_is_bit_equal(ranks: Sequence[Rank]) -> None:
    """In every step, the shared gradient has the same bits on all ranks."""
    for sync, others in zip(ranks[0]["syncs"], zip(*(rank["syncs"] for rank in ranks[1:])), strict=True):
        for key, stream in sync.items():
            assert stream["shared"], "nothing was recorded"
            for other in others:
                for ours, theirs in zip(stream["shared"], other[key]["shared"], strict=True):
                    if isinstance(ours, SparseVector):
                        assert torch.equal(ours.indices, theirs.indices)
                        assert bits(ours.values) == bits(theirs.values)
                    else:
                        assert bits(ours) == bits(theirs)
