"""A failed exchange leaves memories as they were, and training continues as if the step had never been tried."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.basis.layout import Layout, SparseVector, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import (
    Channel,
    ClipLocalNorm,
    Contribution,
    ErrorFeedback,
    Memory,
    Momentum,
    MomentumCorrection,
    MomentumRule,
    StepSettings,
)
from lightning_sparsecomm.codecs import Float32, Golomb, PayloadError, SparseCodec, TopBlocks, TopK
from lightning_sparsecomm.exchange import (
    BlockReduce,
    DenseAllReduce,
    Exchange,
    Exchanged,
    Gather,
    NonFiniteGradientError,
    PowerSGD,
    QuantizedAllReduce,
    SketchedTopK,
    Sparse,
    TernarySum,
)
from lightning_sparsecomm.kernels import Reference, Update, kernels_for
from lightning_sparsecomm.methods import dgc, gradient_dropping, s2_reducer, sbc, split
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Classifier, Scenario, fit

LAYOUT = Layout([("table", (40, 6)), ("kernel", (4, 3, 2, 2)), ("empty", (0, 3)), ("bias", (5,))])


class Doubling(Memory):
    """A user's own memory, with storage of its own: adds twice what it is given to a vector, and passes that on."""

    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.whole = torch.zeros(layout.size, dtype=dtype, device=device)

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        views = context.layout.views(self.whole)
        for view, part in zip(views, contribution.parts):
            if part is not None:
                view.add_(part, alpha=2)
        return Contribution([None if part is None else view for view, part in zip(views, contribution.parts)])

    def abort(self, contribution: Contribution, context: Round) -> None:
        for view, part in zip(context.layout.views(self.whole), contribution.parts):
            if part is not None:
                view.sub_(part, alpha=2)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"doubled": {"whole": self.whole}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.whole.copy_(state["doubled"]["whole"])


CHAINS: dict[str, Callable[[], list[Memory]]] = {
    "none": list,
    "residual": lambda: [ErrorFeedback()],
    "decay": lambda: [ErrorFeedback(0.7)],
    "clip": lambda: [ClipLocalNorm(0.3), ErrorFeedback()],
    "momentum": lambda: [MomentumCorrection(), ErrorFeedback()],
    "whole": lambda: [ClipLocalNorm(0.3), MomentumCorrection(mask=False), ErrorFeedback(0.9)],
    "velocity alone": lambda: [ClipLocalNorm(0.3), MomentumCorrection()],
    "momentum of the mean": lambda: [ClipLocalNorm(0.3), Momentum()],
    "two residuals": lambda: [ErrorFeedback(0.9), ErrorFeedback(0.8)],
    "own": lambda: [Doubling(), ErrorFeedback()],
}
EXCHANGES: dict[str, Callable[[], Exchange]] = {
    "gather": lambda: Gather(SparseCodec(TopK(0.1))),
    "gather of any length": lambda: Gather(SparseCodec(TopK(0.1), Float32(), Golomb())),
    "regions": lambda: Sparse(SparseCodec(TopK(0.1), Float32(), Golomb()), ways=["regions"]),
    "dense": DenseAllReduce,
    "sketch": lambda: SketchedTopK(0.05, columns=300, always_sketch=True),
    "sketch of most": lambda: SketchedTopK(0.3),
    "blocks": lambda: BlockReduce(TopBlocks(0.2, 6)),
    "quantized": lambda: QuantizedAllReduce(8, 16),
    "power sgd": lambda: PowerSGD(2),
    "ternary": TernarySum,
}
RULES = {
    "plain": MomentumRule(0.9),
    "dampened": MomentumRule(0.5, dampening=0.3, begun=True),
    "nesterov": MomentumRule(0.9, nesterov=True),
}


def gradients(seed: int, dtype: torch.dtype, nan: bool = False) -> list[Tensor | None]:
    """Gradients of a step. Some steps have none for the first parameter, and one gradient is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    table, kernel, empty, bias = (torch.randn(s.shape, generator=generator, dtype=dtype) for s in LAYOUT.segments)
    if nan:
        kernel[1, 2, 0, 1] = float("nan")
    kernel = kernel.contiguous(memory_format=torch.channels_last)
    return [table if seed % 3 else None, kernel, empty, bias]


def norm(parts: Sequence[Tensor | None]) -> float:
    return float(sum(float(part.square().sum()) for part in parts if part is not None)) ** 0.5


def state(channel: Channel) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in part.items()} for part in channel.state_dict().values()]


def assert_states(ours: Any, theirs: Any, tolerance: float) -> None:
    assert [part.keys() for part in ours] == [part.keys() for part in theirs]
    for mine, other in zip(ours, theirs):
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance)


def _fails_and_goes_on(rank: int, chain: str, name: str, rule: MomentumRule, dtype: torch.dtype) -> None:
    """Two channels in lockstep. One of them fails before each step."""
    wire, tolerance = Wire(), 4e-6 if dtype == torch.float32 else 1e-14
    failing, fine = (Channel(EXCHANGES[name](), CHAINS[chain]()) for _ in range(2))
    for channel in (failing, fine):
        channel.bind(LAYOUT, dtype, torch.device("cpu"))
    for step in range(3):
        context, rules = Round(LAYOUT, step, rank=rank, world_size=3), [rule] * len(LAYOUT.segments)
        bad, before = (step + 1) % 3, state(failing)
        parts = gradients(100 + 10 * step + rank, dtype, nan=rank == bad)
        with pytest.raises(NonFiniteGradientError) as raised:
            failing.reduce(parts, context, wire, StepSettings(rules, norm(parts)))
        text = f"rank {bad} has a gradient that is not finite, for parameter 'kernel' in step {step}."
        assert str(raised.value).startswith(text), (name, raised.value)
        assert_states(state(failing), before, tolerance)

        parts = gradients(10 * step + rank, dtype)
        settings = StepSettings(rules, norm(parts))
        ours, theirs = (channel.reduce(parts, context, wire, settings).shared for channel in (failing, fine))
        # In float64, round-off does not change which elements are the largest.
        if dtype == torch.float64:
            assert type(ours) is type(theirs)
            whole = [each.dense() if isinstance(each, SparseVector) else each for each in (ours, theirs)]
            torch.testing.assert_close(*whole, rtol=1e-12, atol=1e-12)
            assert_states(state(failing), state(fine), 1e-12)


# Sketches and blocks have their own kernels, which take long to compile for float64.
QUICK = [*((chain, "gather") for chain in CHAINS), ("momentum", "dense")]


def _all_fail_and_go_on(rank: int, cases: list[tuple[str, str]]) -> None:
    rules = itertools.cycle(RULES.values())
    for chain, name in cases:
        _fails_and_goes_on(rank, chain, name, next(rules), torch.float64)
    for chain in ("residual", "whole"):
        _fails_and_goes_on(rank, chain, "gather", next(rules), torch.float32)


ALL = pytest.param(list(itertools.product(CHAINS, EXCHANGES)), marks=pytest.mark.slow)


@pytest.mark.parametrize("cases", [QUICK, ALL], ids=["some", "all"])
def test_memories_are_as_before_on_all_ranks(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    run_ranks(tmp_path, 3, _all_fail_and_go_on, cases)


class Failing(DenseAllReduce):
    """Raises an error after it has communicated."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        if self.error is not None:
            raise self.error
        return exchanged


def _alone(rank: int) -> None:
    wire, cpu = Wire(), torch.device("cpu")
    for error in (PayloadError("corrupt"), KeyboardInterrupt(), RuntimeError("a peer is gone")):
        for dtype in (torch.float32, torch.bfloat16):
            memories = [MomentumCorrection(), ErrorFeedback(0.9)]
            channel = Channel(exchange := Failing(error), memories)
            channel.bind(LAYOUT, torch.float32, cpu)
            for step in range(3):
                context, settings = Round(LAYOUT, step), StepSettings([RULES["nesterov"]] * len(LAYOUT.segments))
                before = state(channel)
                with pytest.raises(type(error)):
                    channel.reduce(gradients(step, dtype), context, wire, settings)
                assert_states(state(channel), before, 4e-6)
                exchange.error = None
                channel.reduce(gradients(step + 1, dtype), context, wire, settings)
                exchange.error = error


def _explodes(rank: int) -> None:
    """Elements may be so large that an update by them could not be undone, with or without an infinity beside them."""
    wire, cpu = Wire(), torch.device("cpu")
    for rule in RULES.values():
        settings = StepSettings([rule] * len(LAYOUT.segments))
        for large in (1e3, 1e6, 1e20, 3e38):
            channel, never = (Channel(DenseAllReduce(), [MomentumCorrection(), ErrorFeedback(0.9)]) for _ in range(2))
            for each in (channel, never):
                each.bind(LAYOUT, torch.float32, cpu)
                for step in (1, 2):
                    each.reduce(gradients(step, torch.float32), Round(LAYOUT, step), wire, settings)
            before = state(channel)
            parts = gradients(4, torch.float32)
            table, kernel, _, bias = parts
            assert table is not None and kernel is not None and bias is not None
            table[3] = -large
            bias[1] = large
            kernel[1, 2, 0, 1] = float("inf")
            with pytest.raises(NonFiniteGradientError):
                channel.reduce(parts, Round(LAYOUT, 3), wire, settings)
            # Values up to 65,536 are taken in before the infinity is found. Undoing them leaves a few rounding
            # errors, which the division by the momentum enlarges.
            assert_states(state(channel), before, 0.05)
            # If it is finite, it is taken in as if nothing had checked it.
            kernel[1, 2, 0, 1] = 0.5
            shared = [
                each.reduce(parts, Round(LAYOUT, 4), wire, settings._replace(gradient_norm=norm)).shared
                for each, norm in ((channel, float("nan")), (never, 1.0))
            ]
            torch.testing.assert_close(*shared, rtol=1e-4, atol=0.05)


def test_an_exploding_gradient_wipes_nothing_out(tmp_path: Path) -> None:
    run_ranks(tmp_path, 1, _explodes)


class Own(ErrorFeedback):
    """A user's own memory. It takes in gradients by itself, so they must be checked before."""

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        residual = self.held["residual"]
        for view, part in zip(residual.parts, contribution.parts):
            if part is not None:
                view.add_(part)
        return Contribution(residual.parts, flat=residual.flat)


def _owns(rank: int) -> None:
    channel = Channel(DenseAllReduce(), [Own()])
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    with pytest.raises(NonFiniteGradientError):
        channel.reduce(gradients(1, torch.float32, nan=True), Round(LAYOUT, 0), Wire())
    assert not any(tensor.any() for part in state(channel) for tensor in part.values())


def test_a_memory_derived_from_one_that_checks_need_not_check(tmp_path: Path) -> None:
    run_ranks(tmp_path, 1, _owns)


def test_whatever_the_exchange_raises(tmp_path: Path) -> None:
    run_ranks(tmp_path, 1, _alone)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupt_in_the_midst_of_taking_in(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A signal that arrives while a kernel runs is raised when the kernel returns."""
    memories: list[Memory] = [MomentumCorrection(), ErrorFeedback(0.9)]
    channel = Channel(Gather(SparseCodec(TopK(0.1, "tensor"))), memories)
    channel.bind(LAYOUT, torch.float64, torch.device("cpu"))
    context, settings = Round(LAYOUT), StepSettings([RULES["plain"]] * len(LAYOUT.segments))
    contribution = Contribution(gradients(1, torch.float64), settings)
    for memory in memories:
        contribution = memory.prepare(contribution, context)
    sent = SparseVector(torch.arange(9), torch.ones(9, dtype=torch.float64), LAYOUT.size)
    for memory in memories:
        memory.commit(Exchanged(sent, sent, contribution.present), context)
    before, kernels, calls = state(channel), type(kernels_for(torch.device("cpu"), torch.float64)), itertools.count()
    update_ = kernels.update_

    def interrupted(self: Reference, update: Update, *args: Any) -> Any:
        found = update_(self, update, *args)
        if next(calls) == after:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(kernels, "update_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.reduce(gradients(2, torch.float64), context, None, settings)  # type: ignore[arg-type]
    assert next(calls) > after
    assert_states(state(channel), before, 1e-14)


# Several syncs of one optimizer


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(30, 4, sparse=sparse)
        self.dense = nn.Linear(4, 6)
        self.double()


def _set_gradients(module: Words, rank: int, seed: int, bad: str | None) -> None:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name == "table.weight" and module.table.sparse:
            rows = torch.randperm(30, generator=generator)[None, :5]
            values = torch.sparse_coo_tensor(rows, values[:5], parameter.shape, check_invariants=False).coalesce()
        if name == bad:
            (values.values() if values.is_sparse else values).view(-1)[3] = float("inf")
        parameter.grad = values


MADE: dict[str, tuple[Callable[[], Method], float, bool]] = {
    "dgc": (lambda: dgc(0.2, warmup_steps=0, clip=0.5), 0.9, False),
    "three syncs": (lambda: split(["table.*"], s2_reducer(), gradient_dropping(0.2, exclude=["*.bias"])), 0.0, True),
    "local mode": (lambda: split(["table.*"], s2_reducer(), gradient_dropping(0.2, local="partial")), 0.0, True),
    "weight changes": (lambda: sbc(0.2, every=1, exclude=["*.bias"]), 0.0, True),
}
"""Method, momentum, and whether the embedding's gradient is sparse."""


def _memories(engine: Engine) -> list[Any]:
    return [share.state_dict() for share in engine.registry.optimizers[0].shares.values()]


def _two_trainings(rank: int, name: str) -> None:
    """Two trainings in lockstep. One of them fails before each step, each time in another sync."""
    make, momentum, sparse = MADE[name]
    runs = []
    for module in (Words(sparse), Words(sparse)):
        engine = Engine(make(), Wire())
        engine.registry.add_module(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
        engine.register(optimizer)
        runs.append((module, engine, optimizer))

    def step(run: Any) -> None:
        _, engine, optimizer = run
        with engine.stepping(optimizer):
            engine.closure(optimizer, lambda: None)()
            optimizer.step()

    module, engine, _ = runs[0]
    for number, bad in enumerate(("dense.bias", "dense.weight", "table.weight", "dense.bias", "dense.weight")):
        before = copy.deepcopy(_memories(engine))
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        _set_gradients(module, rank, 100 + number, bad if rank == 1 else None)
        given = [parameter.grad.clone() for parameter in module.parameters()]
        with pytest.raises(NonFiniteGradientError, match=rf"rank 1 has a .*, for parameter '{bad}' in step {number}\."):
            step(runs[0])
        after = _memories(engine)
        # Shares are made in the first step, with empty memories.
        assert len(before) == len(after) * (number > 0)
        for ours, theirs in zip(after, before):
            assert_states(list(ours.values()), list(theirs.values()), 1e-14)
        for part in after if not before else ():
            held = {kind: tensors for kind, tensors in part.items() if "ErrorFeedback" in kind or "Momentum" in kind}
            assert all(float(tensor.abs().max()) < 1e-14 for tensors in held.values() for tensor in tensors.values())
        for parameter, gradient, weight in zip(module.parameters(), given, weights, strict=True):
            assert parameter.grad is not None
            same = [each.to_dense() for each in (parameter.grad, gradient)]
            torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(parameter, weight)
        for run in runs:
            _set_gradients(run[0], rank, number, None)
            step(run)
        for ours, theirs in zip(*(run[0].parameters() for run in runs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert any(tensor.any() for parts in _memories(engine) for part in parts.values() for tensor in part.values())
    for _, engine, _ in runs:
        engine.close()


def _all_methods(rank: int) -> None:
    for name in MADE:
        _two_trainings(rank, name)


@pytest.mark.slow
def test_a_step_is_shared_by_all_syncs_or_by_none(tmp_path: Path) -> None:
    """A sync that has already exchanged undoes that: no gradient is written, and no memory forgets."""
    run_ranks(tmp_path, 2, _all_methods)


class GoesOn(Classifier):
    """Manual optimization that misses one batch: its gradient is not finite on rank 1, or the model skips it."""

    automatic_optimization = False

    def __init__(self, poisoned: bool) -> None:
        super().__init__()
        self.poisoned = poisoned
        self.caught: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 4 and not self.poisoned:
            return
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss * float("nan") if batch_idx == 4 and self.global_rank == 1 else loss)
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            self.caught.append(str(error))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)

    def on_train_end(self) -> None:
        assert len(self.caught) == self.poisoned
        assert all(text.startswith("rank 1 has a gradient that is not finite") for text in self.caught)


def test_training_may_go_on_after_it(tmp_path: Path) -> None:
    """Under a Trainer, in float64, where round-off does not change which elements are sent."""
    method = dgc(0.1, warmup_steps=0, clip=0.5)
    runs = []
    for poisoned in (True, False):
        scenario = Scenario(lambda poisoned=poisoned: GoesOn(poisoned), {"precision": "64-true"}, steps=9)
        runs.append(fit(tmp_path / str(poisoned), scenario, 2, method))
        laws.replicas_are_equal(runs[-1])
        laws.trained(GoesOn(poisoned).double().state_dict(), runs[-1][0])
    laws.equal_to_round_off(runs[0][0], runs[1][0], 1e-12)
