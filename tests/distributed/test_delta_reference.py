"""On three ranks, each step of an exchange of weight changes equals a naive reference written from the papers."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_sparsecomm.basis.layout import SparseVector
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.methods import des_loc, diloco, federated_averaging, muloco, sbc, streaming_diloco
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.fragments import FragmentedShare
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.streamed import Mix
from tests.distributed.launch import run_ranks
from tests.distributed.recording import Recording, recorded
from tests.distributed.test_reference import SIZES, STEPS, WORLD_SIZE, Parameters, flat, gradients_of, starting_weights
from tests.reference.optimizers import SGD, Adam
from tests.reference.quantized import QuantizedReference
from tests.reference.sparse_binary_compression import SparseBinaryCompression

Vector = np.ndarray

# Large, so that the changes of Adam's first step differ. Otherwise rounding would decide which are sent.
EPSILON = 1.0


class Trained(NamedTuple):
    """What a rank holds after each step, and what its ledger says at the end."""

    weights: list[Vector]
    residuals: list[Vector | None]
    momentum: list[Vector]
    handed_bytes: int


def dtype_of(adam: bool) -> type:
    """float32 with SGD, whose few operations round alike. With Adam, rounding would decide what is sent."""
    return np.float64 if adam else np.float32


def _train(rank: int, method: Method, adam: bool, looks_every: int = 1, wide: bool = False) -> Trained:
    """Trains. `residuals` has None after steps in which nobody looks at them: who looks waits for what is in flight."""
    module = Parameters().to(torch.float64 if adam or wide else torch.float32)
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    engine.registry.check()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if adam:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, eps=EPSILON)
    trained = Trained([], [], [], 0)
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.to(parameter.dtype, copy=True).view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            np.testing.assert_array_equal(flat(p.grad for p in module.parameters()), gradient)
            optimizer.step()
        trained.weights.append(flat(p.detach() for p in module.parameters()))
        if len(trained.weights) % looks_every:
            trained.residuals.append(None)
        else:
            residual = _state(engine).get("DeltaSync.ErrorFeedback")
            trained.residuals.append(_whole(residual) if residual else np.zeros(sum(SIZES), dtype=np.float32))
        name = "exp_avg" if adam else "momentum_buffer"
        trained.momentum.append(flat(optimizer.state[p][name] for p in module.parameters()))
    engine.settle()
    trained.weights.append(flat(p.detach() for p in module.parameters()))
    engine.close()
    return trained._replace(handed_bytes=engine.wire.ledger.handed_bytes("weight updates"))


def _whole(parts: Mapping[str, torch.Tensor]) -> Vector:
    """Parts by parameter name as one vector. A fragment that has not been exchanged yet holds nothing."""
    held = [parts.get(f"parts.{number}", torch.zeros(size)) for number, size in enumerate(SIZES)]
    return flat(held)


def _share(engine: Engine) -> Share:
    ((share,),) = (tracked.shares.values() for tracked in engine.registry.optimizers)
    return share


def _state(engine: Engine) -> Saved:
    return _share(engine).state_dict()


def dense_exchange(reference: SparseBinaryCompression) -> Callable[[list[Vector]], list[Vector]]:
    """A round in which everything is sent: the reference for federated averaging."""

    def exchange(weights: list[Vector]) -> list[Vector]:
        changes = [own - reference.anchor for own in weights]
        mean = np.mean(changes, axis=0)
        outer = reference.outer
        reference.anchor = reference.anchor + mean if outer is None else outer.step(reference.anchor, -mean)
        return changes

    return exchange


def quantized_exchange(
    reference: SparseBinaryCompression, bits: int, block: int
) -> Callable[[list[Vector]], list[Vector]]:
    """A round in which everything is sent in a few bits, and what that loses is kept."""
    rounding = QuantizedReference(WORLD_SIZE, len(reference.anchor), bits, block)

    def exchange(weights: list[Vector]) -> list[Vector]:
        changes = [own.astype(np.float64) - reference.anchor for own in weights]
        held = [residual.copy() for residual in rounding.residuals]
        mean = rounding.step(changes)
        assert reference.outer is not None
        reference.anchor = reference.outer.step(reference.anchor, -mean)
        reference.residuals = [residual.copy() for residual in rounding.residuals]
        return [before + change - after for before, change, after in zip(held, changes, rounding.residuals)]

    return exchange


METHODS = {
    "sbc_1": (sbc(0.05, 1), 0.05, 1),
    "sbc_7": (sbc(0.05, 7), 0.05, 7),
    "sbc_one_of_each_tensor": (sbc(0.001, 3), 0.001, 3),
    "sbc_unmasked": (sbc(0.3, 4, momentum_masking=False), 0.3, 4),
    "sbc_scheduled": (sbc(0.05, Stages([1, 5, 12], steps=[0, 4, 20])), 0.05, None),
    "sbc_1_ahead": (sbc(0.05, 1, residual_in_weights=True), 0.05, 1),
    "sbc_4_ahead": (sbc(0.05, 4, residual_in_weights=True), 0.05, 4),
    "federated_averaging": (federated_averaging(6), None, 6),
    "diloco": (diloco(8), None, 8),
}
WITH_ADAM = ("sbc_1", "sbc_7", "sbc_4_ahead", "diloco")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "adam"),
    [
        *((name, False) for name in METHODS),
        *(pytest.param(name, True, marks=() if name in WITH_ADAM else pytest.mark.slow) for name in METHODS),
    ],
)
def test_step_by_step(tmp_path: Path, name: str, adam: bool) -> None:
    method, density, every = METHODS[name]
    outer = SGD(0.7, 0.9, nesterov=True) if isinstance(method, diloco) else None
    start = starting_weights().astype(dtype_of(adam))
    reference = SparseBinaryCompression(WORLD_SIZE, SIZES, density or 1.0, every or 1, start, outer=outer)
    exchange = reference.exchange if density is not None else dense_exchange(reference)
    ahead = method.syncs[0].residual_in_weights
    masking = method.syncs[0].mask_momentum
    optimizers: list[Any] = [Adam(0.01, eps=EPSILON) if adam else SGD(0.1, 0.9) for _ in range(WORLD_SIZE)]
    weights = [start.copy() for _ in range(WORLD_SIZE)]
    all_gradients = [[g.astype(start.dtype) for g in gradients_of(rank)] for rank in range(WORLD_SIZE)]
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, adam)
    since = exchanges = 0
    for step in range(STEPS + 1):
        last = step == STEPS
        if not last:
            gradients = [gradients[step] for gradients in all_gradients]
            weights = [o.step(own, gradient) for o, own, gradient in zip(optimizers, weights, gradients)]
            since += 1
        length = every or (1 if step < 4 else 5 if step < 20 else 12)
        if since >= length or (last and (since or ahead)):
            if ahead:
                # The reference adds what the weights have already.
                weights = [own - held for own, held in zip(weights, reference.residuals)]
            sents = exchange(weights)
            weights = [reference.anchor.copy() for _ in range(WORLD_SIZE)]
            if ahead and not last:
                weights = [own + held for own, held in zip(weights, reference.residuals)]
            since, exchanges = 0, exchanges + 1
            for optimizer, sent in zip(optimizers, sents):
                if masking:
                    optimizer.mask(sent)
        for rank, trained in enumerate(ranks):
            scale = float(np.abs(weights[rank]).max())
            np.testing.assert_allclose(trained.weights[step], weights[rank], rtol=2e-5, atol=2e-6 * scale)
            if not last:
                residual, held = reference.residuals[rank], trained.residuals[step]
                assert held is not None
                np.testing.assert_allclose(held, residual, rtol=2e-5, atol=2e-6 * scale)
                momentum = optimizers[rank].first if adam else optimizers[rank].buffer
                np.testing.assert_allclose(trained.momentum[step], momentum, rtol=2e-5, atol=2e-6 * scale)
            if since == 0 and (last or not ahead):
                assert trained.weights[step].tobytes() == ranks[0].weights[step].tobytes()
    if density is None:
        # One number for each element, one for each tensor (how many ranks have a gradient), and nothing between rounds.
        assert ranks[0].handed_bytes == exchanges * start.itemsize * (sum(SIZES) + len(SIZES))


class Fragment(NamedTuple):
    """Some of the tensors, exchanged by a reference of their own after every `every` steps, `offset` later."""

    places: Vector
    reference: SparseBinaryCompression
    exchange: Callable[[list[Vector]], list[Vector]]
    every: int
    offset: int

    def due(self, step: int) -> bool:
        return (step + 1 - self.offset) % self.every == 0


def strided(
    count: int, density: float | None, every: int, start: Vector, outer: SGD | None, bits: int | None
) -> list[Fragment]:
    """Tensor i in fragment i mod `count`; fragment p is exchanged p + 1 parts of `every` steps later."""
    tensors = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    fragments = []
    for number in range(count):
        places = np.concatenate(tensors[number::count])
        sizes = SIZES[number::count]
        moving = copy.deepcopy(outer)
        reference = SparseBinaryCompression(WORLD_SIZE, sizes, density or 1.0, every, start[places], outer=moving)
        exchange = reference.exchange if density is not None else dense_exchange(reference)
        if bits is not None:
            exchange = quantized_exchange(reference, bits, 128 if bits == 2 else 256)
        fragments.append(Fragment(places, reference, exchange, every, every * (number + 1) // count))
    return fragments


class Case(NamedTuple):
    """A method in fragments, or with a delay, and its settings."""

    method: Method
    density: float | None
    every: int
    count: int = 1
    delay: int = 0
    mix: Mix = "keep"
    outer_lr: float | None = None
    bits: int | None = None


FRAGMENTED = {
    "sbc": Case(sbc(0.05, 6, fragments=2), 0.05, 6, 2),
    "sbc_uneven": Case(sbc(0.05, 7, fragments=3), 0.05, 7, 3),
    "sbc_each_step_another": Case(sbc(0.05, 4, fragments=4), 0.05, 4, 4),
    "federated_averaging": Case(federated_averaging(6, fragments=2), None, 6, 2),
    "diloco": Case(diloco(8, fragments=4), None, 8, 4, outer_lr=0.7),
    "sbc_late": Case(sbc(0.05, 6, delay=1), 0.05, 6, 1, 1),
    "sbc_late_unmasked": Case(sbc(0.05, 6, delay=5, momentum_masking=False), 0.05, 6, 1, 5),
    "sbc_late_dropping": Case(sbc(0.05, 6, delay=3, mix=0), 0.05, 6, 1, 3, 0),
    "diloco_late": Case(diloco(8, delay=3), None, 8, 1, 3, outer_lr=0.7),
    "sbc_streamed": Case(sbc(0.05, 6, fragments=3, delay=2), 0.05, 6, 3, 2),
    "federated_averaging_streamed": Case(federated_averaging(7, fragments=2, delay=4), None, 7, 2, 4),
    "diloco_streamed_mixing": Case(diloco(8, fragments=4, delay=5, mix=0.5), None, 8, 4, 5, 0.5, 0.7),
    "streaming_diloco": Case(streaming_diloco(8, fragments=3), None, 8, 3, 5, 0.5, 0.4, 4),
    "streaming_diloco_8": Case(streaming_diloco(6, fragments=2, delay=0, bits=8), None, 6, 2, 0, 0, 0.4, 8),
    "muloco": Case(muloco(6), None, 6, outer_lr=0.7, bits=2),
    "muloco_streamed": Case(muloco(5, fragments=2, delay=2), None, 5, 2, 2, "keep", 0.7, 2),
}


class InFlight(NamedTuple):
    """What each rank had when an exchange began, and what it sent then; the step after which it is used."""

    began: list[Vector]
    sents: list[Vector]
    arrives: int


# The others are parts of these.
_SLOW = (
    "sbc_late",
    "sbc_late_dropping",
    "federated_averaging",
    "diloco",
    "diloco_late",
    "streaming_diloco_8",
    "muloco",
)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in FRAGMENTED]
)
def test_fragments_and_delays_step_by_step(tmp_path: Path, name: str) -> None:
    """Each fragment is a model of its own to its exchanges; the optimizer trains all of them.

    The reference exchanges at once; its anchor is used when the exchange arrives. Nothing reads it in between.
    """
    method, density, every, count, delay, mix, outer_lr, bits = FRAGMENTED[name]
    # In few bits, the wider dtype: else rounding would decide which multiple is the nearest.
    start = starting_weights().astype(np.float64 if bits is not None else np.float32)
    outer = SGD(outer_lr, 0.9, nesterov=True) if outer_lr is not None else None
    fragments = strided(count, density, every, start, outer, bits)
    optimizers = [SGD(0.1, 0.9) for _ in range(WORLD_SIZE)]
    weights = [start.copy() for _ in range(WORLD_SIZE)]
    all_gradients = [[gradient.astype(start.dtype) for gradient in gradients_of(rank)] for rank in range(WORLD_SIZE)]
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, False, 4, bits is not None)
    flights: dict[int, InFlight] = {}
    apart = [False] * count

    def exchanged(number: int) -> list[Vector]:
        places, _, exchange, _, _ = fragments[number]
        return exchange([own[places] for own in weights])

    def use(number: int, flight: InFlight) -> None:
        places, reference = fragments[number].places, fragments[number].reference
        for own, optimizer, began, sent in zip(weights, optimizers, flight.began, flight.sents, strict=True):
            own[places] = (
                reference.anchor + (own[places] - began)
                if mix == "keep"
                else mix * own[places] + (1 - mix) * reference.anchor
            )
            if method.syncs[0].mask_momentum:
                whole = np.zeros_like(own)
                whole[places] = sent
                optimizer.mask(whole)

    for step in range(STEPS + 1):
        last = step == STEPS
        if not last:
            moved = zip(optimizers, weights, all_gradients)
            weights = [optimizer.step(own, gradients[step]) for optimizer, own, gradients in moved]
            apart = [True] * count
        for number, fragment in enumerate(fragments):
            if number in flights and (last or flights[number].arrives == step):
                use(number, flights.pop(number))
            elif not last and fragment.due(step):
                began = [own[fragment.places].copy() for own in weights]
                flights[number] = InFlight(began, exchanged(number), step + delay)
                if not delay:
                    use(number, flights.pop(number))
                    apart[number] = False
            if last and apart[number]:
                use(number, InFlight([own[fragment.places].copy() for own in weights], exchanged(number), step))
                for own in weights:
                    own[fragment.places] = fragment.reference.anchor
        for rank, found in enumerate(ranks):
            scale = float(np.abs(weights[rank]).max())
            np.testing.assert_allclose(found.weights[step], weights[rank], rtol=2e-5, atol=2e-6 * scale)
            if last:
                assert found.weights[step].tobytes() == ranks[0].weights[step].tobytes()
                continue
            np.testing.assert_allclose(found.momentum[step], optimizers[rank].buffer, rtol=2e-5, atol=2e-6 * scale)
            if (held := found.residuals[step]) is None:
                continue
            residual = np.zeros_like(start)
            for places, reference, *_ in fragments:
                residual[places] = reference.residuals[rank]
            np.testing.assert_allclose(held, residual, rtol=2e-5, atol=2e-6 * scale)


@pytest.mark.few(2)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("adam", [True, False], ids=["adam", "momentum"])
def test_moments_are_averaged_less_often_than_weights(tmp_path: Path, adam: bool, delay: int) -> None:
    """DES-LOC: every 3 steps the weights, every 6 the first moment, every 12 the second; not after the last step.

    With a delay, ranks train on with moments of their own. Those that began as the mean take their place later.
    """
    method = des_loc(every=3, first_every=2, second_every=4, delay=delay)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, adam, 1, True)
    start = starting_weights().astype(np.float64)
    optimizers: list[Any] = [Adam(0.01, eps=EPSILON) if adam else SGD(0.1, 0.9) for _ in range(WORLD_SIZE)]
    first = "first" if adam else "buffer"
    weights = [start.copy() for _ in range(WORLD_SIZE)]
    all_gradients = [gradients_of(rank) for rank in range(WORLD_SIZE)]
    assert STEPS > 12

    # As the others would be, had the means been there at once; and what weights were then, and their mean.
    prompt: list[Any] = []
    began, mean = weights, start
    kinds: list[str] = []
    for step in range(STEPS):
        moved = zip(optimizers, weights, all_gradients)
        weights = [optimizer.step(own, gradients[step].astype(np.float64)) for optimizer, own, gradients in moved]
        for optimizer, gradients in zip(prompt, all_gradients):
            optimizer.step(start, gradients[step].astype(np.float64))
        if (step + 1) % 3 == 0:
            began, mean, prompt = weights, np.mean(weights, axis=0), copy.deepcopy(optimizers)
            kinds = [first] * ((step + 1) % 6 == 0) + ["second"] * ((step + 1) % 12 == 0 and adam)
            for kind in kinds:
                average = np.mean([getattr(optimizer, kind) for optimizer in optimizers], axis=0)
                for optimizer in prompt:
                    setattr(optimizer, kind, average.copy())
        if step >= delay and (step + 1 - delay) % 3 == 0 and step > 1:
            weights = [mean + (own - then) for own, then in zip(weights, began)]
            for optimizer, other in zip(optimizers, prompt):
                for kind in kinds:
                    setattr(optimizer, kind, getattr(other, kind).copy())
        for trained, own, optimizer in zip(ranks, weights, optimizers, strict=True):
            np.testing.assert_allclose(trained.weights[step], own, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(trained.momentum[step], getattr(optimizer, first), rtol=1e-10, atol=1e-12)
    n = sum(SIZES)
    assert STEPS % 3, "so that the last exchange is that of the end"
    # One number for each element, one for each tensor; moments have a row of their own.
    assert ranks[0].handed_bytes == (STEPS // 3 + 1) * 8 * (n + len(SIZES))


def _trained_sent_and_held(rank: int, method: Method, every_step: bool) -> tuple[Vector, Vector, Vector]:
    """What the optimizer of a rank has changed in a whole training, what the rank sent, and what it holds back."""
    module = Parameters()
    engine = Engine(recorded(method), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    trained = np.zeros(sum(SIZES))
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            before = flat(p.detach() for p in module.parameters()).astype(np.float64)
            optimizer.step()
            trained += flat(p.detach() for p in module.parameters()) - before
        if every_step:
            _state(engine)  # As a save would, it waits for what is in flight.
    engine.settle()
    share = _share(engine)
    sent = dict.fromkeys((f"parts.{number}" for number in range(len(SIZES))), 0.0)
    for unit in share.fragments if isinstance(share, FragmentedShare) else [share]:
        exchange = unit.channel.exchange
        assert isinstance(exchange, Recording)
        for each in exchange.sent:
            assert isinstance(each, SparseVector)
            for segment, part in zip(unit.layout.segments, unit.layout.flats(each.dense()), strict=True):
                sent[segment.name] = sent[segment.name] + part.double().numpy()
    held = _whole(_state(engine)["DeltaSync.ErrorFeedback"]).astype(np.float64)
    engine.close()
    return trained, np.concatenate([np.broadcast_to(part, size) for part, size in zip(sent.values(), SIZES)]), held


STREAMS = (1, 0), (1, 1), (1, 5), (2, 0), (3, 2), (4, 5)
"""Fragments and delays."""


def _all_trained_sent_and_held(rank: int) -> list[tuple[Vector, Vector, Vector]]:
    found = []
    for fragments, delay in STREAMS:
        method = sbc(0.02, every=6, fragments=fragments, delay=delay)
        found.append(_trained_sent_and_held(rank, method, every_step=delay == 5))
    return found


def test_in_fragments_and_late_all_that_has_changed_is_sent_or_held(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, WORLD_SIZE, _all_trained_sent_and_held):
        assert len(found) == len(STREAMS)
        for (trained, sent, held), streams in zip(found, STREAMS, strict=True):
            assert np.abs(sent).max() > 0 and np.abs(held).max() > 0
            tolerance = 1e-5 * np.abs(trained).max()
            np.testing.assert_allclose(sent + held, trained, rtol=1e-5, atol=tolerance, err_msg=str(streams))


def _sent_and_held(rank: int, method: Method) -> tuple[Vector, Vector, Vector]:
    """The sum of a rank's weight changes from anchor to anchor, what it sent, and what it holds back."""
    module = Parameters()
    engine = Engine(recorded(method), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    moved = np.zeros(sum(SIZES))
    start = flat(p.detach() for p in module.parameters()).astype(np.float64)
    for gradient in gradients_of(rank):
        for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
            parameter.grad = part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
            # The exchange takes place when this block ends.
            before = flat(p.detach() for p in module.parameters()).astype(np.float64)
        after = flat(p.detach() for p in module.parameters()).astype(np.float64)
        if not np.array_equal(before, after):
            moved += before - start
            start = after
    share = _share(engine)
    assert isinstance(share, DeltaShare)
    exchange = share.channel.exchange
    assert isinstance(exchange, Recording)
    sent = sum(each.dense().double().numpy() for each in exchange.sent if isinstance(each, SparseVector))
    held = flat(_state(engine)["DeltaSync.ErrorFeedback"].values()).astype(np.float64)
    engine.close()
    return moved, sent, held


@pytest.mark.parametrize("every", [1, 10])
def test_what_is_sent_and_what_is_held_is_all_that_has_changed(tmp_path: Path, every: int) -> None:
    """Theorem II.1 of the paper, after any number of rounds."""
    for moved, sent, held in run_ranks(tmp_path, WORLD_SIZE, _sent_and_held, sbc(0.02, every)):
        assert np.abs(sent).max() > 0 and np.abs(held).max() > 0
        np.testing.assert_allclose(sent + held, moved, rtol=1e-5, atol=1e-5 * np.abs(moved).max())
