"""Gradients exchanged every few steps, step by step against the paper's method, on three ranks."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import dgc, diloco, federated_averaging, gradient_dropping, local_adam
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.test_reference import (
    SHAPES,
    SIZES,
    STEPS,
    WORLD_SIZE,
    Parameters,
    flat,
    gradients_of,
    starting_weights,
)
from tests.distributed.test_resume import differences, outside_launcher, train
from tests.reference.local_adam import LocalAdam
from tests.reference.local_steps import LocalSteps

BOUNDS = np.cumsum(SIZES)[:-1]
DENSE = [len(shape) < 2 for shape in SHAPES]
RATES = [0.02 + 0.08 * (1 + np.cos(np.pi * step / STEPS)) / 2 for step in range(STEPS)]
DENSITY = 0.05
# Large, or all directions of the first step would be alike, and any of them be sent.
EPSILON = 0.3

Vectors = list[np.ndarray]


def _step(engine: Engine, optimizer: torch.optim.Optimizer, gradient: np.ndarray) -> None:
    """An optimizer step with a gradient of this rank's."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight, part in zip(weights, torch.from_numpy(gradient).split(SIZES)):
        weight.grad = part.clone().view(weight.shape)
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()


def _train(rank: int, method: Any, kind: Any, options: dict[str, Any]) -> list[Vectors]:
    """After each step: this rank's weights, and the shared ones; at last those that training ends with."""
    module = Parameters()
    for parameter, part in zip(module.parameters(), torch.from_numpy(starting_weights()).split(SIZES)):
        parameter.data.copy_(part.view(parameter.shape))
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    engine.registry.check()
    optimizer = kind(module.parameters(), lr=0.1, **options)
    trained = []
    for gradient, rate in zip(gradients_of(rank), RATES):
        optimizer.param_groups[0]["lr"] = rate
        _step(engine, optimizer, gradient)
        own = flat(parameter.detach() for parameter in module.parameters())
        engine.replicas.view_shared()
        shared = flat(parameter.detach() for parameter in module.parameters())
        engine.replicas.view_own()
        assert own.tobytes() == flat(parameter.detach() for parameter in module.parameters()).tobytes()
        trained.append([own, shared])
    engine.settle()
    trained.append([flat(parameter.detach() for parameter in module.parameters())])
    engine.close()
    return trained


def _velocities(options: dict[str, Any]) -> list[list[list[np.ndarray]]]:
    """SGD's, by step, rank and tensor."""
    momentum, nesterov = options.get("momentum", 0.0), options.get("nesterov", False)
    gain = 1 - options.get("dampening", 0.0)
    held = [np.zeros(sum(SIZES)) for _ in range(WORLD_SIZE)]
    found = []
    for step in range(STEPS):
        along = []
        for rank in range(WORLD_SIZE):
            gradient = gradients_of(rank)[step].astype(np.float64)
            held[rank] = momentum * held[rank] + (gain if step else 1.0) * gradient
            along.append(np.split(gradient + momentum * held[rank] if nesterov else held[rank].copy(), BOUNDS))
        found.append(along)
    return found


def _directions(every: int) -> list[list[list[np.ndarray]]]:
    """Adam's: ranks compare their gradients in the steps in which they exchange."""
    adam = LocalAdam(np.split(starting_weights(), BOUNDS), [False] * len(SIZES), WORLD_SIZE, None, 0, every)
    found = []
    for step in range(STEPS):
        gradients = [np.split(gradients_of(rank)[step], BOUNDS) for rank in range(WORLD_SIZE)]
        before = [[part.copy() for part in own] for own in adam.directions]
        adam.step(gradients, 1.0, 1.0, (0.9, 0.999), EPSILON, 0.0, True)
        # The reference adds them up.
        found.append([[now - then for now, then in zip(*own)] for own in zip(adam.directions, before)])
    return found


def _check(ranks: list[list[Vectors]], directions: list[list[list[np.ndarray]]], every: int, ahead: bool) -> None:
    reference = LocalSteps(np.split(starting_weights(), BOUNDS), DENSE, WORLD_SIZE, DENSITY, every, ahead)
    all_sent = starting_weights().astype(np.float64)
    for step, rate in enumerate(RATES):
        reference.step(directions[step], rate)
        all_sent -= rate * np.mean([np.concatenate(along) for along in directions[step]], axis=0)
        if ahead:
            # The law that is the reason for it: in the mean, ranks are where they would be if all had been sent.
            np.testing.assert_allclose(np.mean([each[step][0] for each in ranks], axis=0), all_sent, rtol=0, atol=3e-4)
        # What is validated and saved: what ranks have shared, and nothing that one has trained since.
        expected = np.concatenate(reference.shared)
        for rank, trained in enumerate(ranks):
            own, shared = trained[step]
            assert shared.tobytes() == ranks[0][step][1].tobytes()
            np.testing.assert_allclose(shared, expected, rtol=1e-5, atol=3e-4)
            np.testing.assert_allclose(own, np.concatenate(reference.weights[rank]), rtol=1e-5, atol=3e-4)
            assert (own.tobytes() == shared.tobytes()) is (step % every == 0 and not ahead)
    for trained in ranks:
        np.testing.assert_allclose(trained[-1][0], np.concatenate(reference.finish()), rtol=1e-5, atol=3e-4)
        assert trained[-1][0].tobytes() == ranks[0][-1][0].tobytes()


@pytest.mark.parametrize(
    ("every", "options", "sgd"),
    [
        (3, {}, {"momentum": 0.9}),
        pytest.param(2, {"exchange": "gather"}, {"momentum": 0.9, "nesterov": True}, marks=pytest.mark.slow),
        (1, {"residual_in_weights": True}, {"momentum": 0.9}),
        pytest.param(3, {"residual_in_weights": True}, {"momentum": 0.9, "nesterov": True}, marks=pytest.mark.slow),
        pytest.param(4, {}, {"momentum": 0.0}, marks=pytest.mark.slow),
        pytest.param(5, {}, {"momentum": 0.9, "dampening": 0.4}, marks=pytest.mark.slow),
    ],
)
def test_sgd_step_by_step(tmp_path: Path, every: int, options: dict[str, Any], sgd: dict[str, Any]) -> None:
    method = dgc(DENSITY, warmup_steps=0, every=every, **options)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, torch.optim.SGD, sgd)
    _check(ranks, _velocities(sgd), every, options.get("residual_in_weights", False))


@pytest.mark.parametrize(
    ("every", "ahead"), [(2, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, False), (4, False)))]
)
def test_adam_step_by_step(tmp_path: Path, every: int, ahead: bool) -> None:
    method = local_adam(DENSITY, every=every, residual_in_weights=ahead)
    options = {"weight_decay": 0.0, "eps": EPSILON}
    ranks = run_ranks(tmp_path, WORLD_SIZE, _train, method, torch.optim.AdamW, options)
    _check(ranks, _directions(every), every, ahead)


def _among_six(rank: int) -> tuple[list[float], float, np.ndarray]:
    """Trains by noise: the parts of its directions that count, how far it is ahead, and the weights at the end."""
    module = Parameters()
    engine = Engine(local_adam(0.2, every=2), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.0, eps=EPSILON)
    generator = np.random.default_rng(rank)
    for _ in range(8):
        _step(engine, optimizer, generator.standard_normal(sum(SIZES)).astype(np.float32))
    parts = [part for share in engine.registry.optimizers[0].shares.values() for part in share._ahead()]
    own = flat(parameter.detach() for parameter in module.parameters())
    engine.replicas.view_shared()
    ahead = float(np.abs(own - flat(parameter.detach() for parameter in module.parameters())).max())
    engine.replicas.view_own()
    engine.settle()
    ends = flat(parameter.detach() for parameter in module.parameters())
    engine.close()
    return parts, ahead, ends


def test_more_than_four_ranks_are_ahead_by_equal_parts_of_their_noise(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 6, _among_six)
    parts, _, ends = ranks[0]
    # √(4/6) of pure noise, for a tensor of which enough is sampled.
    assert min(parts) == pytest.approx((4 / 6) ** 0.5, abs=0.01)
    for each in ranks:
        assert each[0] == parts
        assert each[1] > 0
        assert each[2].tobytes() == ends.tobytes()


def _with_gaps(rank: int, method: Any, gaps: str, length: int) -> tuple[list[bytes], np.ndarray]:
    """The shared weights after each step, and those that training ends with; a tensor lacks some gradients."""
    module = Parameters()
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shared = []
    for step, gradient in zip(range(length), gradients_of(rank)):
        for index, (parameter, part) in enumerate(zip(module.parameters(), torch.from_numpy(gradient).split(SIZES))):
            lacks = index == 2 and (step % 3 == 0 if gaps == "in exchanges" else rank == 1 and step % 3 != 0)
            parameter.grad = None if lacks else part.clone().view(parameter.shape)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        engine.replicas.view_shared()
        shared.append(flat(parameter.detach() for parameter in module.parameters()).tobytes())
        engine.replicas.view_own()
    engine.settle()
    engine.close()
    return shared, flat(parameter.detach() for parameter in module.parameters())


@pytest.mark.parametrize("gaps", ["in exchanges", "on a rank"])
def test_gradients_that_are_missing(tmp_path: Path, gaps: str) -> None:
    """What ranks share stays equal, whoever has a gradient when; and momentum goes on where one rank has none."""
    length = 10
    method = dgc(0.3, warmup_steps=0, every=3)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _with_gaps, method, gaps, length)
    assert ranks[0][0] == ranks[1][0] == ranks[2][0]
    if gaps == "on a rank":
        weights, velocity = np.zeros(sum(SIZES)), np.zeros(sum(SIZES))
        for step in range(length):
            gradients = np.array([gradients_of(rank)[step] for rank in range(WORLD_SIZE)], np.float64)
            if step % 3:
                gradients[1, SIZES[0] + SIZES[1] : sum(SIZES[:3])] = 0
            velocity = 0.9 * velocity + gradients.mean(0)
            weights -= 0.1 * velocity
        for _, end in ranks:
            np.testing.assert_allclose(end, weights, rtol=1e-4, atol=1e-3)


def _with_sets(rank: int, method: Any, who: list[int], again: bool) -> tuple[list[bytes], np.ndarray]:
    """Code beside the optimizer sets the second tensor, on some ranks; else as `_with_gaps`."""
    module = Parameters()
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    second, shared = list(module.parameters())[1], []
    for step, gradient in zip(range(10), gradients_of(rank)):
        _step(engine, optimizer, gradient)
        if rank in who and (step == 1 or again):
            with torch.no_grad():
                second.copy_(torch.full_like(second, 0.25))
        engine.replicas.view_shared()
        shared.append(flat(parameter.detach() for parameter in module.parameters()).tobytes())
        engine.replicas.view_own()
    engine.settle()
    engine.close()
    return shared, flat(parameter.detach() for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:other code than the optimizer has changed")
@pytest.mark.parametrize("who", [[0, 1, 2], pytest.param([1], marks=pytest.mark.slow)])
def test_weights_that_are_set_amid_local_steps(tmp_path: Path, who: list[int]) -> None:
    """The shared weights move by the mean of what ranks have set, at once for who looks at them."""
    method = dgc(1.0, warmup_steps=0, every=3)
    ranks = run_ranks(tmp_path, WORLD_SIZE, _with_sets, method, who, False)
    assert ranks[0][0] == ranks[1][0] == ranks[2][0]
    # All is sent in steps 0, 3, 6 and 9. So each rank's own weights are those of its own velocities since.
    weights = np.zeros((WORLD_SIZE, sum(SIZES)))
    velocities, second = np.zeros_like(weights), slice(SIZES[0], SIZES[0] + SIZES[1])
    shared, change, waiting = np.zeros(sum(SIZES)), np.zeros(sum(SIZES)), np.zeros_like(weights)
    for step in range(10):
        for rank in range(WORLD_SIZE):
            velocities[rank] = 0.9 * velocities[rank] + gradients_of(rank)[step]
        waiting += 0.1 * velocities
        if step % 3 == 0:
            shared = shared + change - waiting.mean(0)
            change, waiting = np.zeros(sum(SIZES)), np.zeros_like(weights)
        if step == 1:
            for rank in who:
                change[second] += (0.25 - (shared - waiting[rank])[second]) / WORLD_SIZE
        seen = np.frombuffer(ranks[0][0][step], np.float32)
        np.testing.assert_allclose(seen, shared + change, rtol=1e-4, atol=1e-3)
    for _, end in ranks:
        np.testing.assert_allclose(end, shared, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:other code than the optimizer has changed")
@pytest.mark.parametrize(
    "method",
    [
        dgc(0.3, warmup_steps=0, every=3),
        pytest.param(dgc(0.3, exchange="gather", every=3), marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_set_in_each_step_are_those_that_all_share(tmp_path: Path, method: Any) -> None:
    """From the third exchange on, ranks exchange in each step, and each finds the weights as all have set them."""
    ranks = run_ranks(tmp_path, WORLD_SIZE, _with_sets, method, [0, 1, 2], True)
    assert ranks[0][0] == ranks[1][0] == ranks[2][0]
    after = np.frombuffer(ranks[0][0][9], np.float32)[SIZES[0] : SIZES[0] + SIZES[1]]
    np.testing.assert_array_equal(after, np.float32(0.25))


def _set_every(rank: int, every: int) -> tuple[list[bytes], bool]:
    """The shared weights after each step, and whether this rank is at last ahead of the tensor that was set."""
    module = Parameters()
    engine = Engine(dgc(0.3, warmup_steps=0, residual_in_weights=True), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    first, shared, ahead = next(module.parameters()), [], False
    for step in range(40):
        _step(engine, optimizer, gradients_of(rank)[step % 10])
        if step % every == 0:
            with torch.no_grad():
                first.fill_(0.25)
        own = first.detach().clone()
        engine.replicas.view_shared()
        shared.append(flat(parameter.detach() for parameter in module.parameters()).tobytes())
        ahead = not torch.equal(own, first)
        engine.replicas.view_own()
    engine.close()
    return shared, ahead


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:other code than the optimizer has changed")
@pytest.mark.parametrize(("every", "ahead"), [(9, True), (4, False), (1, False)])
def test_ranks_stay_ahead_where_weights_are_seldom_set(tmp_path: Path, every: int, ahead: bool) -> None:
    """Once in nine exchanges is seldom, however often it happens; what is set more often ends that."""
    ranks = run_ranks(tmp_path, WORLD_SIZE, _set_every, every)
    assert ranks[0][0] == ranks[1][0] == ranks[2][0]
    assert [each[1] for each in ranks] == [ahead] * WORLD_SIZE


class WithTarget(Parameters):
    """Has a parameter that no optimizer trains, and that follows a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.followed = [next(self.parameters())]
        self.target = torch.nn.Parameter(self.followed[0].detach().clone(), requires_grad=False)

    def follow(self) -> None:
        self.target.lerp_(self.followed[0].detach(), 0.5)


def _with_target(rank: int, stop: int, length: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The target after each step, of a run that is saved and resumed after `stop` steps; and in the end."""
    targets: list[np.ndarray] = []
    saved: Any = None
    for first, end in ((0, stop), (stop, length)):
        module = WithTarget()
        engine = Engine(dgc(0.3, warmup_steps=0, every=3), Wire())
        engine.registry.add_module(module)
        optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
        engine.register(optimizer)
        engine.begin()
        if saved is not None:
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            engine.restart()
            assert engine.state.load_state_dict(saved[2], as_many_ranks=True) == []
        for step in range(first, end):
            _step(engine, optimizer, gradients_of(rank)[step])
            module.follow()
            targets.append(module.target.detach().numpy().copy())
        # Of a checkpoint, all ranks load the model of rank 0.
        engine.replicas.view_shared()
        weights = engine.wire.all_gather(torch.cat([each.detach().flatten() for each in module.parameters()]))[0]
        engine.replicas.view_own()
        of_rank_0 = weights.split([each.numel() for each in module.parameters()])
        model = {name: part.view(each.shape) for (name, each), part in zip(module.named_parameters(), of_rank_0)}
        saved = copy.deepcopy((model, optimizer.state_dict(), engine.state.state_dict()))
        if end == length:
            engine.settle()
        engine.close()
    return targets, module.target.detach().numpy()


def test_what_follows_a_rank_s_own_weights_is_saved_and_averaged_in_the_end(tmp_path: Path) -> None:
    whole = run_ranks(tmp_path, WORLD_SIZE, _with_target, 0, 8)
    resumed = run_ranks(tmp_path, WORLD_SIZE, _with_target, 5, 8)
    for one, other in zip(whole, resumed):
        assert [each.tobytes() for each in one[0]] == [each.tobytes() for each in other[0]]
        assert one[1].tobytes() == other[1].tobytes() == whole[0][1].tobytes()
    # Between exchanges, they differ.
    assert whole[0][0][-1].tobytes() != whole[1][0][-1].tobytes()
    np.testing.assert_allclose(whole[0][1], np.mean([each[0][-1] for each in whole], axis=0), rtol=1e-5, atol=1e-6)


class Compare(pl.Callback):
    """Notes where ranks have equal weights: after each step, and at the end of each epoch.

    Args:
        last: The step after which it stops training; None for all.
    """

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.after_steps: list[bool] = []
        self.after_epochs: list[bool] = []
        # This rank's weights after an epoch's last step, and when the next epoch starts.
        self.borders: list[tuple[list[float], list[float]]] = []
        self._own: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.after_steps.append(_alike(pl_module))
        self._own = _flat(pl_module).tolist()
        trainer.should_stop = trainer.should_stop or len(self.after_steps) == self.last

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after_epochs.append(_alike(pl_module))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.borders.append((self._own, _flat(pl_module).tolist()))


def _flat(module: pl.LightningModule) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def _alike(module: pl.LightningModule) -> bool:
    all_ranks = Wire().all_gather(_flat(module))
    return all(torch.equal(each, all_ranks[0]) for each in all_ranks)


def _fit(rank: int, folder: Path, batches: int, method: Any) -> tuple[list[bool], list[bool], Sequence[str]]:
    outside_launcher(rank, 2)
    compare = Compare()
    trainer, _ = train(folder, 2, method, 2, callbacks=(compare,), limit_train_batches=batches)
    strategy = trainer.strategy
    assert isinstance(strategy, SparseCommStrategy)
    return compare.after_steps, compare.after_epochs, strategy.announced


def _often(steps: float, ranks: int) -> Any:
    return dgc(0.02, warmup_steps=0, every=ranks if steps >= 10 else 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("batches", "after_steps"),
    # Step 5 ends the first epoch: an odd one, after which ranks would be apart.
    [(6, [True, False, True, False, True, True]), (4, [True] * 6)],
)
def test_a_run_follows_its_length_and_ends_epochs_with_weights_that_all_share(
    tmp_path: Path, batches: int, after_steps: list[bool]
) -> None:
    ranks = run_ranks(tmp_path, 2, _fit, tmp_path, batches, _often(0, 2).following(_often))
    for steps, epochs, _ in ranks:
        assert steps[:6] == after_steps
        assert epochs == [True, True]
    (line,) = ranks[0][2]
    assert ("every=2" in line) is (batches == 6)


def _fit_until(rank: int, folder: Path, method: Any, last: int | None) -> tuple[list[bool], list[bool], list[Any]]:
    outside_launcher(rank, 2)
    compare = Compare(last)
    train(folder, 2, method, 2, callbacks=(compare,), limit_train_batches=5)
    return compare.after_steps, compare.after_epochs, compare.borders


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [dgc(0.02, warmup_steps=0, every=2), diloco(every=4)])
def test_an_epoch_that_is_stopped_early_ends_with_weights_that_all_share(tmp_path: Path, method: Any) -> None:
    for after_steps, after_epochs, _ in run_ranks(tmp_path, 2, _fit_until, tmp_path, method, 2):
        assert not after_steps[-1]
        assert after_epochs == [True]


def test_the_next_epoch_begins_with_a_rank_s_own_weights(tmp_path: Path) -> None:
    for after_steps, after_epochs, borders in run_ranks(tmp_path, 2, _fit_until, tmp_path, diloco(every=4), None):
        assert not after_steps[4]
        assert after_epochs == [True, True]
        before, after = borders[1]
        assert before == after


class StepsAtTheEnd(pl.LightningModule):
    """An optimizer step in a hook at the end of each epoch, as of a last accumulated batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self._step(batch[0])

    def on_train_epoch_end(self) -> None:
        self._step(torch.full((4, 6), float(self.global_rank)))

    def _step(self, x: torch.Tensor) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(x).square().mean())
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, 0.9)


def _fit_with_steps_at_the_end(rank: int, method: Any) -> list[float]:
    outside_launcher(rank, 2)
    module = StepsAtTheEnd()
    data = torch.randn(20, 6, generator=torch.Generator().manual_seed(rank))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4)
    options: Any = {**QUIET, "devices": 2, "max_epochs": 3, "enable_checkpointing": False}
    strategy = SparseCommStrategy(method, check_replicas_every=1)
    trainer = pl.Trainer(**options, strategy=strategy)
    trainer.fit(module, loader)
    return _flat(module).tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [diloco(every=4), federated_averaging(every=3), dgc(0.5, warmup_steps=0, every=2)])
def test_a_hook_at_the_end_of_an_epoch_may_step(tmp_path: Path, method: Any) -> None:
    first, second = run_ranks(tmp_path, 2, _fit_with_steps_at_the_end, method)
    assert first == second


def _mixed() -> Method:
    """Some weights have a shared value, and others would have to be averaged."""
    whole, local = diloco(every=4), gradient_dropping(0.1, local="sum", average_every=100)
    syncs = [whole.syncs[0].limited(["body.*"]), local.syncs[0].limited(outside=["body.*"])]
    return Method(syncs, averaging=local.averaging)


def _fit_mixed(rank: int, folder: Path) -> tuple[list[bool], list[str]]:
    outside_launcher(rank, 2)
    compare, options = Compare(), {"limit_train_batches": 5}
    _, whole = train(folder, 2, _mixed(), 2, callbacks=(compare,), **options)
    _, resumed = train(folder / "resumed", 2, _mixed(), 2, resume=folder / "epoch=0.ckpt", **options)
    return compare.after_epochs, differences(whole.seen, resumed.seen)


def test_a_checkpoint_has_the_average_of_what_has_no_other_shared_value(tmp_path: Path) -> None:
    """The module holds each rank's own weights at an epoch's end then."""
    for after_epochs, different in run_ranks(tmp_path, 2, _fit_mixed, tmp_path):
        assert after_epochs == [False, False]
        assert different == []
