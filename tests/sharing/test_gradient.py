"""One optimizer's gradients through a channel, and back to `.grad`; here of one rank."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Gather, NonFiniteGradientError, SketchedTopK
from lightning_sparsecomm.sharing import GradientSync, Turn
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.sharing.gradients import note_sparse_gradient

TURN = Turn("gradients", step=0)


def sparse(*memories: Any, **options: Any) -> GradientSync:
    return GradientSync(Channel(Gather(SparseCodec(TopK(0.25))), memories), **options)


def started(sync: GradientSync, wire: Wire, **options: Any) -> tuple[nn.Module, SGD, GradientShare]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = SGD(module.parameters(), lr=0.1, **options)
    share = sync.start(optimizer, list(module.named_parameters()), wire)
    module(torch.ones(1, 3)).sum().backward()
    return module, optimizer, share


def gradient(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def turn(share: GradientShare) -> None:
    share.prepare(TURN)
    share.exchange()
    share.commit()


def test_what_was_shared_is_in_grad_and_the_rest_waits(wire: Wire) -> None:
    module, _, share = started(sparse(ErrorFeedback()), wire)
    own = gradient(module)
    assert share.due(TURN)
    assert not share.due(Turn("weights", 0))
    assert not share.due(Turn("end", 0))
    share.prepare(TURN)
    share.exchange()
    # Nothing is written before all shares have exchanged.
    assert torch.equal(gradient(module), own)
    share.commit()
    shared = gradient(module)
    assert shared.count_nonzero() == round(own.numel() / 4)
    assert share.residual_norm() == pytest.approx(float((own - shared).norm()), rel=1e-6)
    ledger = wire.ledger
    assert (ledger.elements, ledger.sent_elements) == (own.numel(), shared.count_nonzero())
    assert ledger.ddp_bytes == 4 * own.numel()
    assert ledger.exchange_seconds > 0


def test_after_abort_everything_is_as_before(wire: Wire) -> None:
    module, _, share = started(sparse(ErrorFeedback()), wire)
    own = gradient(module)
    share.abort()
    share.prepare(TURN)
    share.exchange()
    share.abort()
    assert torch.equal(gradient(module), own)
    assert share.residual_norm() == pytest.approx(0, abs=1e-6)
    assert wire.ledger.elements == 0
    turn(share)
    assert not torch.equal(gradient(module), own)


def test_a_gradient_that_is_not_finite_is_not_written(wire: Wire) -> None:
    module, _, share = started(sparse(ErrorFeedback()), wire)
    next(module.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    share.prepare(TURN)
    with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
        share.exchange()
    share.abort()
    assert share.residual_norm() == pytest.approx(0, abs=1e-6)


def test_it_overlaps_where_its_exchange_does(wire: Wire) -> None:
    assert not started(sparse(), wire)[2].overlaps
    assert started(GradientSync(Channel(DenseAllReduce())), wire)[2].overlaps


@pytest.mark.parametrize("kind", ["residual", "velocity"])
def test_it_grows_and_keeps_what_it_holds(wire: Wire, kind: str) -> None:
    module, optimizer, _ = started(sparse(), wire, momentum=0.9)
    named = list(module.named_parameters())
    share = sparse(MomentumCorrection(mask=False), ErrorFeedback()).start(optimizer, named[2:], wire)
    turn(share)
    memory = next(memory for memory in share.channel.memories if kind in memory.held)
    before = {name: held.clone() for name, held in memory.held[kind].state_dict().items()}
    assert list(before) == ["1.weight", "1.bias"]
    share.extend(named)
    # Room is made with the next turn, which the scaler may skip.
    share.prepare(TURN)
    share.abort()
    after = memory.held[kind].state_dict()
    assert after.keys() == {name for name, _ in named}
    for name, held in before.items():
        torch.testing.assert_close(after[name], held)


def test_the_optimizers_momentum_is_masked_where_something_was_shared(wire: Wire) -> None:
    module, optimizer, share = started(sparse(mask_momentum=True), wire, momentum=0.9)
    optimizer.step()
    turn(share)
    for parameter in module.parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert parameter.grad is not None
        assert not buffer[parameter.grad != 0].any()
    held = [optimizer.state[p]["momentum_buffer"].count_nonzero() for p in module.parameters()]
    assert sum(held) == gradient(module).numel() - round(gradient(module).numel() / 4)


def test_what_it_holds_is_saved_under_its_own_name(wire: Wire) -> None:
    _, optimizer, share = started(sparse(ErrorFeedback()), wire)
    turn(share)
    saved = share.state_dict()
    assert list(saved) == ["GradientSync.ErrorFeedback", "GradientSync.ErrorFeedback.unit"]
    other = share.sync.start(optimizer, share.parameters, wire)
    copied = {kind: {name: part.clone() for name, part in parts.items()} for kind, parts in saved.items()}
    other.load_state_dict(copied)
    assert copied == {"GradientSync.ErrorFeedback": {}, "GradientSync.ErrorFeedback.unit": {}}
    other.prepare(TURN)
    other.abort()
    assert other.residual_norm() == pytest.approx(share.residual_norm(), rel=1e-5)


def test_sparse_gradients_stay_sparse(wire: Wire) -> None:
    table = nn.Embedding(6, 2, sparse=True)
    note_sparse_gradient(table.weight)
    share = GradientSync(Channel(BlockReduce()), sparse=True).start(
        SGD(table.parameters(), lr=0.1), [("weight", table.weight)], wire
    )
    table(torch.tensor([1, 4])).sum().backward()
    turn(share)
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.coalesce().indices().tolist() == [[1, 4]]
    # Two rows: of each the index, and two values.
    assert wire.ledger.ddp_gathered_bytes == 2 * 8 + 4 * 4
    assert wire.ledger.ddp_bytes == 0


def test_it_joins_what_another_sync_does_instead_of_the_optimizer() -> None:
    clip, momentum = ClipLocalNorm(1.0), Momentum()
    sync = GradientSync(Channel(DenseAllReduce(), [ErrorFeedback()]))
    joined = sync.joining(clip, momentum)
    assert isinstance(joined, GradientSync)
    assert [type(memory) for memory in joined.channel.memories] == [ClipLocalNorm, Momentum, ErrorFeedback]
    assert [type(memory) for memory in sync.channel.memories] == [ErrorFeedback]
    for other in (
        GradientSync(Channel(BlockReduce()), sparse=True),
        GradientSync(Channel(DenseAllReduce()), local="sum"),
        GradientSync(Channel(DenseAllReduce()), mask_momentum=True),
    ):
        with pytest.raises(ValueError, match="an optimizer of their own"):
            other.joining(clip, None)


def test_optimizers_that_it_is_not_defined_for() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert sparse(ErrorFeedback()).objection(Adam(parameters)) is None
    for sync, optimizer, text in (
        (sparse(), LBFGS(parameters), r"methods.dense\(\)"),
        (sparse(MomentumCorrection()), Adam(parameters), "torch.optim.SGD"),
    ):
        objection = sync.objection(optimizer)
        assert objection is not None
        assert re.search(text, objection)


def test_an_exchange_that_cannot_take_the_layout_is_refused() -> None:
    sync = GradientSync(Channel(SketchedTopK(k=3)))
    sync.check([("a", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ValueError, match="k must be at most the 2 elements"):
        sync.check([("a", nn.Parameter(torch.zeros(2)))])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: GradientSync(Channel(DenseAllReduce()), local="error"),  # type: ignore[arg-type]
            ValueError,
            "local must be one of none, sum, partial; got 'error'. The paper's 'error' is 'partial'",
        ),
        (
            lambda: GradientSync(Channel(DenseAllReduce()), sparse=True),
            ValueError,
            "sparse=True needs a channel without",
        ),
        (lambda: GradientSync(Channel(BlockReduce()), sparse=True, local="sum"), ValueError, "and local='none'; got"),
        (
            lambda: GradientSync(Channel(BlockReduce(), [ErrorFeedback()]), sparse=True),
            ValueError,
            "sparse=True needs a channel without memories",
        ),
        (lambda: GradientSync(Channel(DenseAllReduce()), mask_momentum=1), TypeError, "mask_momentum must be True or"),  # type: ignore[arg-type]
    ],
)
def test_refuses(make: Callable[[], GradientSync], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()
