"""The recipes ef21 and demo: their parts, and what they refuse."""

import pytest
import torch
from torch import nn

from lightning_sparsecomm.channel import (
    EF21,
    ClipLocalNorm,
    ErrorFeedback,
    LocalAdam,
    Momentum,
    MomentumCorrection,
    SharedSign,
)
from lightning_sparsecomm.exchange import GatherContributions, Transformed
from lightning_sparsecomm.methods import demo, ef21
from lightning_sparsecomm.sharing import GradientSync


def kinds(sync: object) -> list[type]:
    assert isinstance(sync, GradientSync)
    return [type(memory) for memory in sync.channel.memories]


def test_ef21_has_momentum_before_the_estimate() -> None:
    method = ef21()
    assert kinds(method.syncs[0])[1:] == [MomentumCorrection, EF21]
    assert kinds(method.syncs[1])[1:] == [Momentum]
    assert method.fallback is not None
    assert kinds(method.fallback.syncs[0])[1:] == [LocalAdam, EF21]
    plain = ef21(momentum_correction=False)
    assert kinds(plain.syncs[0]) == [ClipLocalNorm, EF21]
    assert plain.fallback is None


def test_ef21_is_for_any_optimizer() -> None:
    method = ef21()
    optimizer = torch.optim.RMSprop(nn.Linear(2, 2).parameters())
    assert "takes over momentum" in str(method.syncs[0].objection(optimizer))
    assert method.fallback is not None
    assert "local moments replace" in str(method.fallback.syncs[0].objection(optimizer))
    assert method.fallback.fallback is not None
    assert method.fallback.fallback.syncs[0].objection(optimizer) is None
    assert repr(method) == "ef21(density=0.01)"
    assert repr(method.with_fallback(demo())) == "ef21(density=0.01).with_fallback(demo())"


def test_ef21_clips_before_the_estimate() -> None:
    with pytest.raises(ValueError, match="clip must be a positive number"):
        ef21(clip=-1.0)


def test_demo_is_a_residual_of_cosines_and_a_sign() -> None:
    sync = demo().syncs[0]
    assert isinstance(sync, GradientSync)
    assert kinds(sync) == [SharedSign, ErrorFeedback]
    # What waits is in units of gradients, and would not fit steps by signs.
    assert not sync.finish
    exact = demo(sign=False, of_senders=True).syncs[0]
    assert isinstance(exact, GradientSync)
    assert kinds(exact) == [ErrorFeedback]
    assert exact.finish
    assert isinstance(exact.channel.exchange, Transformed)
    assert isinstance(exact.channel.exchange.inner, GatherContributions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "k must be a whole number, at least 1"),
        ({"k": 5, "side": 2}, "k must be at most side², .*; got 5. Use k=4"),
        ({"decay": 1.5}, r"decay must be in \(0, 1\]"),
        ({"sign": 1}, "sign must be True or False"),
        ({"values": "int3"}, "values must be one of"),
    ],
)
def test_demo_refuses(options: dict[str, object], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        demo(**options)  # type: ignore[arg-type]
