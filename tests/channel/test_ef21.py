"""Estimates of gradients, and signs."""

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round, SparseVector, Wire
from lightning_sparsecomm.channel import (
    EF21,
    Channel,
    ErrorFeedback,
    Memory,
    Momentum,
    MomentumCorrection,
    MomentumRule,
    SharedSign,
    StepSettings,
)
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.sharing import GradientSync

LAYOUT = Layout([("weight", (4, 5)), ("bias", (3,))])
CONTEXT = Round(LAYOUT)


def dense(vector: SparseVector | torch.Tensor) -> torch.Tensor:
    return vector.dense() if isinstance(vector, SparseVector) else vector


def channel(*memories: Memory, density: float = 0.2) -> Channel:
    made = Channel(Gather(SparseCodec(TopK(density))), memories)
    made.bind(LAYOUT, torch.float32, torch.device("cpu"))
    return made


def gradients(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(segment.shape, generator=generator) for segment in LAYOUT.segments]


def test_a_gradient_that_stays_is_known_after_a_while(wire: Wire) -> None:
    """Nothing adds up: what is not sent is measured anew."""
    one, here = channel(EF21()), gradients(0)
    shared = [one.reduce(here, CONTEXT, wire).shared for _ in range(6)]
    whole = torch.cat([part.flatten() for part in here if part is not None])
    assert all(isinstance(each, torch.Tensor) for each in shared)
    assert int((shared[0] != 0).sum()) == 5  # type: ignore[arg-type]
    torch.testing.assert_close(shared[4], whole)
    torch.testing.assert_close(shared[5], whole)


def test_what_is_shared_is_not_the_memory_itself(wire: Wire) -> None:
    one = channel(EF21())
    shared = one.reduce(gradients(0), CONTEXT, wire).shared
    assert isinstance(shared, torch.Tensor)
    before = shared.clone()
    one.reduce(gradients(1), CONTEXT, wire)
    assert torch.equal(shared, before)


def test_estimates_stay_where_no_rank_has_a_gradient(wire: Wire) -> None:
    one = channel(EF21(), density=1.0)
    one.reduce(gradients(0), CONTEXT, wire)
    before = one.memories[0].held["mean"].parts[1].clone()
    for _ in range(2):
        exchanged = one.reduce([gradients(1)[0], None], CONTEXT, wire)
        assert exchanged.present == [True, False]
        assert torch.equal(one.memories[0].held["mean"].parts[1], before)
        assert torch.equal(one.memories[0].held["own"].parts[1], before)


def test_a_gradient_that_is_not_finite_changes_nothing(wire: Wire) -> None:
    one = channel(MomentumCorrection(), EF21())
    settings = StepSettings(momentum=[MomentumRule(0.9)] * 2)
    one.reduce(gradients(0), CONTEXT, wire, settings)
    before = [memory.held[name].flat.clone() for memory in one.memories for name in memory.held]
    bad = gradients(1)
    assert bad[0] is not None
    bad[0][1, 2] = torch.nan
    with pytest.raises(RuntimeError, match="rank 0 has a gradient that is not finite, for parameter 'weight'"):
        one.reduce(bad, CONTEXT, wire, settings)
    after = [memory.held[name].flat for memory in one.memories for name in memory.held]
    assert len(after) == 3
    for one_, other in zip(before, after):
        torch.testing.assert_close(one_, other)


@pytest.mark.parametrize(
    "memories",
    [
        [EF21(), ErrorFeedback()],
        [ErrorFeedback(), EF21()],
        [EF21(), EF21()],
        [EF21(), Momentum()],
        [EF21(), MomentumCorrection()],
    ],
    ids=repr,
)
def test_estimates_come_last_and_alone(memories: list[Memory]) -> None:
    with pytest.raises(ValueError, match=r"memories must (end with EF21|be in the order)"):
        Channel(DenseAllReduce(), memories)


@pytest.mark.parametrize("memories", [[EF21()], [SharedSign()]], ids=repr)
def test_what_is_no_mean_of_what_was_sent_takes_no_local_mode(memories: list[Memory]) -> None:
    sync = GradientSync(Channel(DenseAllReduce(), memories))
    assert sync.joining(None, Momentum()).channel.memories[-1] is memories[-1]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"local must be 'none' and mask_momentum False with .*EF21"):
        GradientSync(Channel(DenseAllReduce(), memories), local="partial")
    with pytest.raises(ValueError, match="delay=1 needs a channel with ErrorFeedback, without SharedSign"):
        GradientSync(Channel(DenseAllReduce(), memories), delay=1)


def test_signs_leave_residuals_alone(wire: Wire) -> None:
    signed, plain = channel(SharedSign(), ErrorFeedback()), channel(ErrorFeedback())
    for step in range(3):
        found, expected = (each.reduce(gradients(step), CONTEXT, wire) for each in (signed, plain))
        assert torch.equal(dense(found.shared), dense(expected.shared).sign())
        assert torch.equal(signed.residuals[0].held["residual"].flat, plain.residuals[0].held["residual"].flat)
