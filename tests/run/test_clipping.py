"""Who clips what: each rank its own gradient before it is shared, or Lightning the shared one."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import Channel, ClipLocalNorm
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import default
from lightning_sparsecomm.run.announcement import announcement
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method
from tests.run.training import equal, gradients, ready


def clipping(max_norm: float | None = None) -> Method:
    return Method([GradientSync(Channel(DenseAllReduce(), [ClipLocalNorm(max_norm)]))])


@pytest.fixture
def local(wire: Wire) -> Iterator[Engine]:
    """An engine whose method clips each rank's own gradient, by the user's threshold."""
    made = Engine(clipping(), wire)
    yield made
    made.close()


def total_norm(module: torch.nn.Module) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients(module)]).norm())


def test_the_trainers_threshold_is_taken_over(local: Engine) -> None:
    module, optimizer, _ = ready(local)
    norm = total_norm(module)
    local.take_over_clipping(norm / 4)
    local.synchronize(optimizer)
    assert total_norm(module) == pytest.approx(norm / 4, rel=1e-5)
    assert local.register(optimizer).norm == pytest.approx(norm, rel=1e-5)
    # Lightning asks for the same once more.
    assert local.clip(optimizer, norm / 4, by_value=False)
    assert total_norm(module) == pytest.approx(norm / 4, rel=1e-5)


def test_a_clipping_call_shares_and_clips(local: Engine) -> None:
    module, optimizer, _ = ready(local)
    norm = total_norm(module)
    assert local.clips(optimizer)
    assert local.clip(optimizer, norm / 2, by_value=False)
    assert total_norm(module) == pytest.approx(norm / 2, rel=1e-5)
    with pytest.raises(ValueError, match=r"gradients were shared with gradient_clip_val=.* now to be clipped by 1e-06"):
        local.clip(optimizer, 1e-6, by_value=False)


def test_a_threshold_of_the_methods_own(wire: Wire) -> None:
    engine = Engine(clipping(1e-3), wire)
    module, optimizer, _ = ready(engine)
    with pytest.raises(ValueError, match=r"clip=0.001 of the method and 0.5 .*two thresholds for one clipping"):
        engine.take_over_clipping(0.5)
    with pytest.raises(ValueError, match="two thresholds for one clipping"):
        engine.clip(optimizer, 0.5, by_value=False)
    engine.take_over_clipping(1e-3)
    engine.synchronize(optimizer)
    assert total_norm(module) == pytest.approx(1e-3, rel=1e-5)
    engine.close()


def test_each_ranks_gradient_cannot_be_clipped_by_value(local: Engine) -> None:
    _, optimizer, _ = ready(local)
    local.registry.clips_by_value = True
    for call in (lambda: local.take_over_clipping(0.5), lambda: local.clip(optimizer, 0.5, True)):
        with pytest.raises(ValueError, match=r"gradient_clip_algorithm must be 'norm'.*got 'value'"):
            call()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("length", [300, 10_000, math.inf])
def test_by_default_what_is_clipped_by_value_is_the_mean_of_all(wire: Wire, kind: Any, length: float) -> None:
    engine, module = Engine(default(), wire), torch.nn.Linear(3, 4)
    engine.registry.clips_by_value = True
    engine.registry.add_module(module)
    tracked = engine.register(kind(module.parameters(), lr=0.1))
    engine.take_over_clipping(0.5)
    engine.expect(length)
    engine.follow_length()
    assert repr(tracked.method) == "quantized(few_rows=True)"
    assert tracked.takeover is None and not engine.clip(tracked.optimizer, 0.5, by_value=True)
    name = "dgc" if kind is torch.optim.SGD else "local_adam"
    _, line = announcement(engine.registry, length, 2)
    assert "'value' clips each element of the mean" in line and f"With 'norm', {name} is used" in line
    engine.close()


def test_a_threshold_must_be_a_number(local: Engine) -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_val must be a number.*got nan"):
        local.take_over_clipping(math.nan)


@pytest.mark.parametrize("by_value", [True, False])
def test_otherwise_the_gradient_is_only_shared(engine: Engine, by_value: Any) -> None:
    module, optimizer, shared = ready(engine)
    engine.registry.clips_by_value = by_value
    engine.take_over_clipping(1e-3)
    assert not engine.clips(optimizer)
    assert not engine.clip(optimizer, 1e-3, by_value)
    assert equal(gradients(module), shared)
    # Nobody needs a norm, so none is computed.
    assert math.isnan(engine.register(optimizer).norm)


def test_a_norm_over_shared_and_unshared_gradients_is_refused(wire: Wire) -> None:
    exchange = Channel(DenseAllReduce())
    engine = Engine(Method([GradientSync(exchange, ["0.*"]), DeltaSync(exchange, parameters=["1.*"])]), wire)
    _, optimizer, _ = ready(engine)
    with pytest.raises(ValueError, match="gradients cannot be clipped by norm where a method shares some"):
        engine.clip(optimizer, 0.5, by_value=False)
    assert not engine.clip(optimizer, 0.5, by_value=True)
    engine.close()
