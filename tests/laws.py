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


def estimates_are_what_was_sent(ranks: Sequence[Rank], tolerance: float = 1e-5) -> None:
    """A rank's estimate is the sum of all that it sent; the estimate that all have is the mean of the ranks' own.

    The law of residuals for methods that send changes: estimate + what is not sent = what is estimated. The estimates
    are in the last memory of each compressed sync.
    """
    checked = 0
    for syncs in zip(*(rank["syncs"] for rank in ranks), strict=True):
        for key, stream in syncs[0].items():
            if not stream["state"] or "own" not in stream["state"][-1]:
                continue
            layout: Layout = stream["layout"]
            states = [sync[key]["state"][-1] for sync in syncs]
            for sync, state in zip(syncs, states):
                total = torch.zeros(layout.size)
                for sent in sync[key]["sent"]:
                    total += sent.dense() if isinstance(sent, SparseVector) else sent
                for segment, part in zip(layout.segments, layout.views(total), strict=True):
                    scale = max(1.0, float(part.abs().max()))
                    own = state["own"].get(segment.name, torch.zeros(segment.shape))
                    torch.testing.assert_close(own, part, rtol=0, atol=tolerance * scale)
            for name, mean in states[0]["mean"].items():
                own = torch.stack([state["own"][name] for state in states]).mean(0)
                torch.testing.assert_close(mean, own, rtol=0, atol=tolerance * max(1.0, float(own.abs().max())))
                assert all(bits(state["mean"][name]) == bits(mean) for state in states)
                checked += int(bool(own.any()))
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
