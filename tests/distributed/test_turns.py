"""A turn: all shares of an optimizer exchange together, or everything stays as it was, state of exchanges included."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis.layout import Vector
from lightning_sparsecomm.basis.parts import Part, parts_in
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import AdamMoments, Channel, ErrorFeedback, Memory, MomentumCorrection
from lightning_sparsecomm.channel.memory import NamedVector
from lightning_sparsecomm.codecs import PayloadError, SparseCodec, TopK
from lightning_sparsecomm.exchange import (
    DenseAllReduce,
    Exchange,
    Exchanged,
    Gather,
    NonFiniteGradientError,
    PlainExchange,
)
from lightning_sparsecomm.methods import RECIPES, dgc, gradient_dropping, s2_reducer, sbc, split, streaming_diloco
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method
from tests import laws
from tests.distributed.launch import run_ranks

NAMES = ("first", "second", "third")


class Three(nn.Module):
    """A parameter for each of three syncs. In float64, round-off does not change which elements are sent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for name, shape in zip(NAMES, ((6, 5), (4, 3), (7,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))


class Run:
    """One rank's training of a module by a method. Each rank draws gradients of its own."""

    def __init__(self, method: Method, momentum: float = 0.9, module: Callable[[], nn.Module] = Three) -> None:
        self.module = module()
        self.engine = Engine(method, Wire())
        self.engine.registry.add_module(self.module)
        self.engine.registry.check()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=momentum)
        self.engine.register(self.optimizer)

    def draw(self, seed: int, nonfinite: str | None = None) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + self.engine.wire.rank)
        for name, parameter in self.module.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if name == nonfinite:
                parameter.grad.view(-1)[2] = float("inf")

    def step(self) -> None:
        with self.engine.stepping(self.optimizer):
            self.engine.synchronize(self.optimizer)
            self.optimizer.step()

    def held(self) -> list[Any]:
        """What all shares hold."""
        return copy.deepcopy([share.state_dict() for share in self._shares()])

    def exchanges(self, kind: type[Exchange]) -> list[Any]:
        return list(parts_in([share.channel for share in self._shares()], kind))  # type: ignore[attr-defined]

    def _shares(self) -> list[Any]:
        return list(self.engine.registry.optimizers[0].shares.values())


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-14) -> None:
    """Two nested states are equal, to round-off."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(ours[name], theirs[name], tolerance)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs):
            assert_same(*pair, tolerance)
    else:
        assert ours == theirs


# Exchanges for these tests


class Predicting(PlainExchange):
    """Has state from round to round: sends, in bfloat16, how far a vector is from what was shared last."""

    def __init__(self) -> None:
        self.prediction: Tensor | None = None
        self._next: Tensor | None = None

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        expected = torch.zeros_like(x.values) if self.prediction is None else self.prediction
        error = (x.values - expected).bfloat16().to(x.values.dtype)
        shared = expected + wire.all_reduce_(error / wire.world_size)
        self._next = shared.clone()
        return shared, expected + error

    def commit(self) -> None:
        self.prediction, self._next = self._next, None

    def abort(self) -> None:
        self._next = None

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.prediction is None else {"prediction": self.prediction}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.prediction = state.get("prediction")


class PredictingEarly(Exchange):
    """The same for an exchange that starts to communicate in `prepare`: predicts half of what was shared last."""

    def __init__(self) -> None:
        self.inner = DenseAllReduce()
        self.prediction: Tensor | None = None
        self._next: Tensor | None = None

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self.inner.prepare(self._of(x), context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = self.inner.exchange(self._of(x), context, wire)
        shared = exchanged.shared if self.prediction is None else exchanged.shared + self.prediction / 2
        self._next = shared.clone()
        return exchanged._replace(shared=shared, sent=x.values)

    def _of(self, x: Vector) -> Vector:
        return x if self.prediction is None else x._replace(values=x.values - self.prediction / 2)

    def commit(self) -> None:
        self.inner.commit()
        self.prediction, self._next = self._next, None

    def abort(self) -> None:
        self.inner.abort()
        self._next = None

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self.prediction is None else {"prediction": self.prediction}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.prediction = state.get("prediction")


class Breaking(Exchange):
    """Raises an error when told to: while it prepares, or after it has communicated."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.error: BaseException | None = None
        self.while_preparing = False

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        if self.error is not None and self.while_preparing:
            raise self.error
        self.inner.prepare(x, context, wire)

    @property
    def overlaps(self) -> bool:
        return self.inner.overlaps

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = self.inner.exchange(x, context, wire)
        if self.error is not None:
            raise self.error
        return exchanged

    def commit(self) -> None:
        self.inner.commit()

    def abort(self) -> None:
        self.inner.abort()

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


class Noting(Exchange):
    """Notes what happens to it and to its memory, in a list that all of these share."""

    events: ClassVar[list[str]] = []

    def __init__(self, name: str, inner: Exchange) -> None:
        self.name = name
        self.inner = inner
        self.error: BaseException | None = None

    @property
    def overlaps(self) -> bool:
        return self.inner.overlaps

    def prepare(self, x: Vector, context: Round, wire: Wire) -> None:
        self.events.append(f"prepare {self.name}")
        self.inner.prepare(x, context, wire)

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        self.events.append(f"exchange {self.name}")
        exchanged = self.inner.exchange(x, context, wire)
        if self.error is not None:
            raise self.error
        return exchanged

    def commit(self) -> None:
        self.events.append(f"commit {self.name}")
        self.inner.commit()

    def abort(self) -> None:
        self.events.append(f"abort {self.name}")
        self.inner.abort()


class NotingMemory(Memory):
    """Notes when it takes in and when it forgets."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def prepare(self, contribution: Any, context: Round) -> Any:
        Noting.events.append(f"take in {self.name}")
        return contribution

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        Noting.events.append(f"forget {self.name}")
        return exchanged

    def abort(self, contribution: Any, context: Round) -> None:
        Noting.events.append(f"undo {self.name}")


def gather() -> Gather:
    return Gather(SparseCodec(TopK(0.3)))


# The order of a turn


def _noting(make: Callable[..., Any]) -> Method:
    inner = {"first": gather, "second": DenseAllReduce, "third": gather}
    return Method(
        [make(Channel(Noting(name, inner[name]()), [NotingMemory(name)]), parameters=[name]) for name in NAMES]
    )


def _events_of_a_turn(rank: int) -> None:
    # The second share overlaps: it prepares first and exchanges last.
    preparing, exchanging = ("second", "first", "third"), ("first", "third", "second")
    for make in (GradientSync, DeltaSync):
        run = Run(_noting(make), momentum=0.0)
        prepared = [f"{event} {name}" for name in preparing for event in ("take in", "prepare")]
        committed = [f"{event} {name}" for name in NAMES for event in ("commit", "forget")]
        for seed in range(2):
            run.draw(seed)
            Noting.events.clear()
            run.step()
            assert Noting.events == [*prepared, *(f"exchange {name}" for name in exchanging), *committed]

        for failing in NAMES:
            run.draw(9)
            (exchange,) = (each for each in run.exchanges(Noting) if each.name == failing)
            exchange.error = PayloadError("corrupt")
            Noting.events.clear()
            with pytest.raises(PayloadError, match="corrupt"):
                run.step()
            exchange.error = None
            reached = exchanging[: exchanging.index(failing) + 1]
            aborted = [f"{event} {name}" for name in reversed(NAMES) for event in ("abort", "undo")]
            assert Noting.events == [*prepared, *(f"exchange {name}" for name in reached), *aborted]
        run.engine.close()


def test_all_shares_prepare_then_all_exchange_then_all_commit(tmp_path: Path) -> None:
    """After an error none commits, and all abort."""
    run_ranks(tmp_path, 2, _events_of_a_turn)


class Looking(Gather):
    """Looks at the gradients of a module while it exchanges."""

    module: ClassVar[nn.Module]
    own: ClassVar[list[Tensor]]
    looks: ClassVar[int] = 0

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        for parameter, own in zip(Looking.module.parameters(), Looking.own, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, own)
        Looking.looks += 1
        return exchanged


def _look(rank: int) -> None:
    codec = SparseCodec(TopK(0.3))
    run = Run(Method([GradientSync(Channel(Looking(codec)), parameters=[name]) for name in NAMES]))
    Looking.module = run.module
    run.draw(0)
    Looking.own = [parameter.grad.clone() for parameter in run.module.parameters() if parameter.grad is not None]
    run.step()
    assert Looking.looks == len(NAMES)
    for parameter, own in zip(run.module.parameters(), Looking.own, strict=True):
        assert parameter.grad is not None and not torch.equal(parameter.grad, own)
    run.engine.close()


def test_no_gradient_is_written_before_all_have_exchanged(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, _look)


# A turn that fails


def _stateful(make: Callable[..., Any], early: bool, breaks: str) -> Method:
    """Three shares, of which the second has an exchange with state, and one can break."""
    memories = [ErrorFeedback()] if make is DeltaSync else [MomentumCorrection(mask=False), ErrorFeedback()]
    exchanges: dict[str, Exchange] = {
        "first": gather(),
        "second": PredictingEarly() if early else Predicting(),
        "third": DenseAllReduce("bfloat16"),
    }
    exchanges[breaks] = Breaking(exchanges[breaks])
    return Method([make(Channel(exchanges[name], copy.deepcopy(memories)), parameters=[name]) for name in NAMES])


def _fail(run: Run, failure: str, breaks: str) -> bool:
    """Takes a step in which one share fails; whether it failed on this rank."""
    rank = run.engine.wire.rank
    run.draw(50, nonfinite=breaks if (failure, rank) == ("not finite on rank 1", 1) else None)
    if failure == "not finite on rank 1":
        with pytest.raises(NonFiniteGradientError, match=f"rank 1 has a .* not finite, for parameter '{breaks}'"):
            run.step()
        return True
    if failure == "an error on rank 1" and rank == 0:
        run.step()
        return False
    (exchange,) = run.exchanges(Breaking)
    exchange.error = KeyboardInterrupt() if failure == "an interrupt" else PayloadError("corrupt")
    exchange.while_preparing = failure == "an error while preparing"
    with pytest.raises(type(exchange.error)):
        run.step()
    exchange.error = None
    return True


def _fails_and_goes_on(make: Callable[..., Any], early: bool, breaks: str, failure: str) -> None:
    """Two trainings in lockstep, of which one fails once."""
    failing, fine = (Run(_stateful(make, early, breaks), 0.0 if make is DeltaSync else 0.9) for _ in range(2))
    for seed in range(2):
        for run in (failing, fine):
            run.draw(seed)
            run.step()
    before = failing.held()
    weights = [parameter.detach().clone() for parameter in failing.module.parameters()]
    # Without something to lose, nothing would be shown.
    for name in ("prediction of second", *NAMES):
        assert any(name in tensors and tensors[name].any() for share in before for tensors in share.values()), name

    failed = _fail(failing, failure, breaks)
    moved = [not torch.equal(p, weight) for p, weight in zip(failing.module.parameters(), weights, strict=True)]
    if failed:
        assert_same(failing.held(), before)
        assert not any(moved)
    else:
        assert all(moved)
    if failure != "an error on rank 1":
        for seed in (3, 4):
            for run in (failing, fine):
                run.draw(seed)
                run.step()
        assert_same(failing.held(), fine.held(), 1e-11)
        for ours, theirs in zip(failing.module.parameters(), fine.module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for run in (failing, fine):
        run.engine.close()


FAILURES = ("not finite on rank 1", "an error", "an error while preparing", "an interrupt", "an error on rank 1")


def _all_fail_and_go_on(rank: int, make: Callable[..., Any]) -> None:
    for early, breaks, failure in itertools.product((False, True), NAMES, FAILURES):
        # A rank may fail alone only after its last collective: the others would wait for it, or take it for another.
        if failure != "an error on rank 1" or breaks == "third":
            _fails_and_goes_on(make, early, breaks, failure)


@pytest.mark.parametrize("make", [GradientSync, DeltaSync])
def test_a_turn_that_fails_leaves_everything_as_before(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Memories of shares that have exchanged, state of exchanges, and weights; afterwards training goes on."""
    run_ranks(tmp_path, 2, _all_fail_and_go_on, make, timeout=110)


def _refused(rank: int) -> None:
    module = Three()
    engine = Engine(Method([DeltaSync(Channel(DenseAllReduce()))]), Wire())
    engine.registry.add_module(module)
    first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.synchronize(first)
    for _ in range(2):
        with pytest.raises(ValueError, match="parameter 'first' belongs to two optimizers"):
            engine.synchronize(second)
    engine.close()


def test_an_optimizer_that_was_refused_is_refused_again(tmp_path: Path) -> None:
    """Whoever catches the error does not go on without an exchange."""
    run_ranks(tmp_path, 1, _refused)


# A frozen sync


def frozen(value: object) -> Any:
    """A snapshot of nested parts, to be compared with another one."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, laws.bits(value.detach())
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (Part, NamedVector)) or dataclasses.is_dataclass(value):
        return type(value), id(value), frozen(vars(value))
    return repr(value)


FROZEN: dict[str, Callable[[], Method]] = {
    # These runs train by SGD.
    **{name: recipe for name, recipe in RECIPES.items() if not any(parts_in(recipe(), AdamMoments))},
    "dgc": lambda: dgc(0.3, warmup_steps=0, clip=0.5),
    "sbc": lambda: sbc(0.3, every=2),
    "sbc, ahead": lambda: sbc(0.3, every=2, residual_in_weights=True),
    # All parameters are one layer.
    "streaming_diloco": lambda: streaming_diloco(every=2, fragments=1, delay=1),
    "dgc, ahead": lambda: dgc(0.3, warmup_steps=0, residual_in_weights=True),
    "local mode": lambda: gradient_dropping(0.3, local="partial", average_every=3, momentum_masking=True),
    "split": lambda: split(["first"], s2_reducer(), dgc(0.3, warmup_steps=0)),
    "with state": lambda: _stateful(GradientSync, True, "third"),
}


def _train_twice(rank: int) -> None:
    """Two trainings with one method, step by step in turns, and the same two with a method each."""
    for name, make in FROZEN.items():
        shared = make()
        before = frozen(shared)
        runs = [Run(shared), Run(shared), Run(make()), Run(make())]
        for seed in range(6):
            for index, run in enumerate(runs):
                run.draw(10 * seed + index % 2)
                run.step()
        for run in runs:
            run.engine.settle()
        assert frozen(shared) == before, name
        for ours, theirs in zip(runs[:2], runs[2:], strict=True):
            assert any(not torch.equal(a, b) for a, b in zip(ours.module.parameters(), Three().parameters()))
            for a, b in zip(ours.module.parameters(), theirs.module.parameters(), strict=True):
                assert laws.bits(a.detach()) == laws.bits(b.detach()), name
            assert_same(ours.held(), theirs.held(), 0.0)
        for run in runs:
            run.engine.close()


@pytest.mark.slow
def test_trainings_leave_a_method_as_it_is(tmp_path: Path) -> None:
    """So one method serves several trainings, even at the same time."""
    run_ranks(tmp_path, 2, _train_twice, timeout=110)
