"""methods.auto in a Trainer: what it chooses from given times, that all ranks switch together, and what it leaves."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.planning import MeasuredLink, outlook
from lightning_sparsecomm.planning.chooser import AutoChooser
from lightning_sparsecomm.planning.outlook import Outlook
from lightning_sparsecomm.planning.probe import measure_link
from lightning_sparsecomm.planning.watch import DriftWatch, StepTimes
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks

# Seconds of a step with each method, and what of it is computed.
Times = dict[str, float]

# In each of three epochs.
BATCHES = 30


class Network(pl.LightningModule):
    def __init__(self, adam: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.adam = adam
        self.unused = torch.nn.Linear(3, 3) if unused else None
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4 * BATCHES, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


def pretend(times: Times, later: Times | None = None, after: int = 10**9) -> None:
    """Steps seem to take these times with each method, and later others; the network too."""

    def now(engine: Any) -> Times:
        steps = max(tracked.steps for tracked in engine.registry.optimizers)
        return later if later is not None and steps > after else times

    def end(self: StepTimes) -> None:
        engine = self._engine
        name = engine.chooser.record.current
        self.last = now(engine)[name]
        self.waited = now(engine)["wait"] if name == "sparsecomm" else self.last - now(engine)["compute"]
        self._made += 1
        if self._made > 2:
            self._steps.append((self.last, now(engine)["compute"], 0.0))

    def predicted(self: Outlook, choices: Any, work: Any) -> Times:
        known = now(self._engine)
        return {name: known[name] - known["compute"] + work.seconds for name in choices}

    StepTimes.end = end  # type: ignore[method-assign]
    Outlook.predicted = predicted  # type: ignore[method-assign, assignment]


def train(
    rank: int,
    folder: str,
    method: Method | str,
    times: tuple[Any, ...] | None,
    resume: str | None = None,
    adam: bool = False,
    unused: bool = False,
    **options: Any,
) -> Any:
    """A fit; returns weights, the chooser's record, and what was said."""
    if times is not None:
        pretend(*times)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Network(adam, unused)
    strategy = "ddp" if method == "ddp" else SparseCommStrategy(method)  # type: ignore[arg-type]
    callbacks = (
        [ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True)] if options.pop("saves", False) else []
    )
    trainer = pl.Trainer(
        devices=2,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=3,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        use_distributed_sampler=False,
        default_root_dir=folder,
        **QUIET,
        **options,
    )
    trainer.fit(model, data(rank), ckpt_path=resume)
    record = getattr(trainer.strategy, "chooser", None)
    weights = np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])
    return weights, None if record is None else record.record, list(getattr(trainer.strategy, "announced", []))


FAST = {"ddp": 0.10, "ddp-bf16": 0.11, "sparsecomm": 0.16, "compute": 0.09, "wait": 0.01}
SLOW = {"ddp": 1.0, "ddp-bf16": 0.55, "sparsecomm": 0.2, "compute": 0.1, "wait": 0.06}
"""On a fast and on a slow network."""


def switches(record: Any) -> list[tuple[int, str]]:
    return [(each["step"], each["method"]) for each in record.history]


def test_on_a_fast_network_it_stays_with_ddp(tmp_path: Path) -> None:
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (FAST,)):
        # sparsecomm is too slow to be tried.
        assert switches(record) == [(7, "ddp-bf16"), (14, "ddp")]
        assert record.settled
        assert record.measured == {"ddp": 0.1, "ddp-bf16": 0.11}


def test_on_a_slow_network_it_does_not_begin_with_ddp(tmp_path: Path) -> None:
    (_, record, said), (_, other, _) = run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (SLOW,))
    assert switches(record) == [(0, "sparsecomm"), (7, "sparsecomm")]
    assert other == record
    assert said[0].startswith("sparsecomm: 2 ranks, SGD by dgc(")
    assert said[1].startswith(
        "sparsecomm: step 7: chose sparsecomm. A step takes: sparsecomm 200 ms (predicted 200 ms); predicted: ddp 1 s,"
        " ddp-bf16 550 ms. Link:"
    )


BEHIND = {"ddp": 0.4, "ddp-bf16": 0.3, "sparsecomm": 0.2, "compute": 0.1, "wait": 0.06}
"""ddp is far behind, but not so far that the run does not begin with it."""


def test_a_trial_that_is_far_behind_ends_after_two_steps_that_count(tmp_path: Path) -> None:
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (BEHIND,)):
        assert switches(record) == [(4, "sparsecomm"), (11, "sparsecomm")]
        assert record.measured == {"ddp": 0.4, "sparsecomm": 0.2}


@pytest.mark.parametrize(("ddp", "chosen"), [(0.36, "sparsecomm"), (0.3, "ddp")])
def test_what_was_not_far_behind_after_all_is_tried_again(tmp_path: Path, ddp: float, chosen: str) -> None:
    """sparsecomm was predicted too fast."""
    later = BEHIND | {"ddp": ddp, "sparsecomm": 0.34}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (BEHIND, later, 5)):
        assert switches(record) == [(4, "sparsecomm"), (11, "ddp"), (18, chosen)]
        assert record.measured == {"ddp": ddp, "sparsecomm": 0.34}
        assert record.cut_short == []


def test_short_steps_are_tried_longer(tmp_path: Path) -> None:
    short = {name: each / 10 for name, each in FAST.items()}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (short,)):
        assert switches(record) == [(22, "ddp-bf16"), (43, "ddp")]


def _fit_with_a_hiccup(rank: int, folder: str) -> Any:
    """The first step of sparsecomm that counts is slow, on one rank."""
    pretend(BEHIND)
    end = StepTimes.end

    def slow_once(self: StepTimes) -> None:
        end(self)
        chooser = self._engine.chooser
        assert isinstance(chooser, AutoChooser)
        if rank == 1 and self.counted == 1 and chooser.record.current == "sparsecomm":
            self._steps[0] = (0.9, 0.1, 0.0)

    StepTimes.end = slow_once  # type: ignore[method-assign]
    return train(rank, folder, methods.auto(), None)


def test_one_slow_step_ends_no_trial(tmp_path: Path) -> None:
    for _, record, _ in run_ranks(tmp_path, 2, _fit_with_a_hiccup, str(tmp_path)):
        assert switches(record) == [(4, "sparsecomm"), (11, "sparsecomm")]
        assert record.measured == {"ddp": 0.4, "sparsecomm": 0.2}


def far(rank: int, folder: str, learns: bool) -> Any:
    """Only 64 bytes could be measured over a long way: as many as were under way at once, in one round trip."""
    predicted = Outlook.predicted
    pretend({"ddp": 0.35, "ddp-bf16": 0.33, "sparsecomm": 0.2, "compute": 0.05, "wait": 0.1})
    Outlook.predicted = predicted  # type: ignore[method-assign]
    points = {"all_reduce": [(8.0, 0.15), (64.0, 0.3)], "all_gather": [(8.0, 0.075), (64.0, 0.15)]}
    outlook.measure_link = lambda *_: MeasuredLink(2, points)  # type: ignore[assignment, arg-type]
    if not learns:
        Outlook.learn_rate = lambda *_: False  # type: ignore[method-assign]
    return train(rank, folder, methods.auto(), None)[1]


def test_over_a_long_way_it_learns_the_rate_from_ddps_steps(tmp_path: Path) -> None:
    for record in run_ranks(tmp_path, 2, far, str(tmp_path), True):
        assert record.current != "ddp"
        # No prediction of ddp: the rate was not known.
        assert "ddp" not in record.predicted
    for record in run_ranks(tmp_path, 2, far, str(tmp_path), False):
        assert switches(record) == [(7, "ddp")]
        assert record.predicted["ddp"] > 1.5 * record.measured["ddp"]


def test_what_quality_forbids_is_not_tried(tmp_path: Path) -> None:
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(quality="rounded"), (SLOW,)):
        assert {name for _, name in switches(record)} == {"ddp-bf16"}


def test_a_candidate_of_ones_own(tmp_path: Path) -> None:
    method = methods.auto("exact", [methods.gradient_dropping(0.1)])
    name = "gradient_dropping(density=0.1)"
    times = {"ddp": 1.0, name: 0.9, "compute": 0.8, "wait": 0.05}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), method, (times,)):
        assert switches(record) == [(7, name), (14, name)]


@pytest.mark.parametrize("option", [{"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}])
def test_what_cannot_clip_as_the_trainer_does_is_left_out(tmp_path: Path, option: dict[str, Any]) -> None:
    """dgc clips by norm alone."""

    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (SLOW,), **option)

    for _, record, _ in run_ranks(tmp_path, 2, fit):
        assert "sparsecomm" not in record.measured | record.predicted


@pytest.mark.few(1)
@pytest.mark.parametrize("adam", [False, True])
def test_with_ddp_chosen_training_is_ddps_to_the_bit(tmp_path: Path, adam: bool) -> None:
    def fit(rank: int, method: Any, times: Any) -> Any:
        return train(rank, str(tmp_path), method, times, adam=adam)[0]

    ours = run_ranks(tmp_path, 2, fit, methods.auto("exact"), None)
    theirs = run_ranks(tmp_path, 2, fit, "ddp", None)
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[0], ours[1])


def test_when_the_network_slows_down_it_switches_within_fifty_steps(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (FAST, SLOW, 30))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for _, record, _ in found:
        *_, (noticed, _), (tried, first), (chosen, last) = switches(record)
        assert 30 < noticed <= tried < chosen <= 80
        assert first == last == "sparsecomm"
        assert found[0][1].history == record.history


def test_when_the_network_recovers_it_returns_to_ddp(tmp_path: Path) -> None:
    """What the residual held is delivered: replicas are equal, and so are the ranks' optimizers."""
    found = run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (SLOW, FAST, 30))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for _, record, _ in found:
        assert record.current == "ddp"
        assert record.settled


def test_it_does_not_return_to_ddp_where_that_would_wait_for_unused_parameters(tmp_path: Path) -> None:
    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (SLOW, FAST, 30), unused=True)

    (weights, record, said), (others, _, _) = run_ranks(tmp_path, 2, fit)
    np.testing.assert_array_equal(weights, others)
    assert record.current == "sparsecomm"
    assert (
        sum("With SparseCommStrategy(methods.auto(), find_unused_parameters=True) it is one" in line for line in said)
        == 1
    )


def test_ddps_buckets_say_what_unused_parameters_need(tmp_path: Path) -> None:
    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (FAST,), unused=True)

    with pytest.raises(AssertionError, match=r"SparseCommStrategy\(methods\.auto\(\), find_unused_parameters=True\)"):
        run_ranks(tmp_path, 2, fit)


def test_late_in_a_run_only_what_saves_much_is_tried(tmp_path: Path) -> None:
    """As after resuming with other ranks: of 60 steps, 15 are left."""
    slow = {"ddp": 0.1, "ddp-bf16": 0.1, "sparsecomm": 1.0, "compute": 0.05, "wait": 0.9}
    bit = {"ddp": 0.9, "ddp-bf16": 0.9, "sparsecomm": 1.0, "compute": 0.05, "wait": 0.9}
    for later, expected in ((slow, "ddp"), (bit, "sparsecomm")):

        def fit(rank: int, later: Times = later) -> Any:
            return train(rank, str(tmp_path), methods.auto(), (SLOW, later, 65))

        for _, record, _ in run_ranks(tmp_path, 2, fit):
            assert record.current == expected


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_resumed_run_goes_on_with_its_choice_to_the_bit(tmp_path: Path, epochs: int) -> None:
    saves = tmp_path / "saves"

    def fit(rank: int, resume: str | None) -> Any:
        return train(
            rank, str(saves if resume is None else tmp_path / "later"), methods.auto(), (SLOW,), resume, saves=True
        )

    whole = run_ranks(tmp_path, 2, fit, None)
    path = saves / f"epoch={epochs - 1}-step={30 * epochs}.ckpt"
    assert path.exists()
    for (expected, _, _), (found, record, _) in zip(whole, run_ranks(tmp_path, 2, fit, str(path))):
        np.testing.assert_array_equal(found, expected)
        assert record.current == "sparsecomm"
        # It was not measured anew.
        assert switches(record) == [(0, "sparsecomm"), (7, "sparsecomm")]


class TwoOptimizers(Network):
    """The optimizer that comes last steps first. Only rank 0 uses all weights."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clips = clips
        self.extra = torch.nn.Parameter(torch.zeros(3))
        self.never = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        second.zero_grad()
        outputs = self.layers(batch[0]) + (self.extra if self.global_rank == 0 else 0.0)
        self.manual_backward(torch.nn.functional.cross_entropy(outputs, batch[1]))
        if self.clips:
            self.clip_gradients(first, 0.1, "norm")
        second.step()
        first.step()

    def configure_optimizers(self) -> Any:
        first = [self.extra, self.never, *self.layers[0].parameters()]
        return [torch.optim.SGD(first, 0.1, 0.9), torch.optim.SGD(self.layers[2].parameters(), 0.1)]


def _two_optimizers(rank: int, folder: str, clips: bool) -> Any:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    switched: list[list[bool]] = []

    def decide(self: AutoChooser, tracked: Any) -> None:
        switched.append([each.shared for each in self._engine.registry.optimizers])
        self._use("ddp" if self.record.current == "sparsecomm" else "sparsecomm", "", tracked)

    AutoChooser._decide = decide  # type: ignore[method-assign]
    AutoChooser._is_hopeless = lambda self: False  # type: ignore[method-assign]
    model = TwoOptimizers(clips)
    strategy = SparseCommStrategy(methods.auto(), check_replicas_every=1, find_unused_parameters=True)
    options: dict[str, Any] = {"devices": 2, "max_epochs": 1, "enable_checkpointing": False, **QUIET}
    trainer = pl.Trainer(
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(model, data(rank))
    return [parameter.grad is None for parameter in (model.extra, model.never)], switched


@pytest.mark.few(1)
@pytest.mark.parametrize("clips", [False, True])
def test_what_waits_for_another_optimizers_step_is_shared(tmp_path: Path, clips: bool) -> None:
    """Else the comparison of replicas fails; what is clipped is used by the method that has shared it."""
    for gone, switched in run_ranks(tmp_path, 2, _two_optimizers, str(tmp_path), clips):
        assert gone == [False, True]
        assert switched == [[False, False]] * 4


def _fabric(rank: int) -> Any:
    pretend(SLOW)
    points = [(8.0, 0.001), (1e6, 0.25)]
    link = MeasuredLink(2, {"all_reduce": points, "all_gather": points})
    outlook.measure_link = lambda *_: link  # type: ignore[assignment, misc]
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    strategy = FabricStrategy(methods.auto())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    network = torch.nn.Linear(6, 3)
    module, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), 0.1))
    fabric.backward(module(torch.ones(2, 6)).sum())
    optimizer.step()
    return strategy.ledger.handed_bytes("gradients"), strategy.chooser.record


def test_in_fabric_the_first_step_is_exchanged_once(tmp_path: Path) -> None:
    """By then, its forward pass has told DDP's reducer to sum."""
    for handed, record in run_ranks(tmp_path, 2, _fabric):
        assert handed == 4 * 21
        assert switches(record) == [(1, "sparsecomm")]


def test_a_methods_number_does_not_depend_on_what_the_run_can_use(wire: Wire) -> None:
    engine = Engine(methods.auto(), wire)
    chooser = AutoChooser(engine, methods.auto().choices)
    del chooser.choices["ddp-bf16"]
    chooser.record.current = "sparsecomm"
    assert chooser.number == 2
    engine.close()


def test_a_static_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"static_graph must be False with methods\.auto"):
        run_ranks(tmp_path, 1, _static)


def _static(rank: int) -> None:
    strategy = SparseCommStrategy(methods.auto(), static_graph=True)
    trainer = pl.Trainer(strategy=strategy, devices=1, max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Network(), data(0))


@pytest.mark.slow
@pytest.mark.parametrize("times", [(FAST,), (SLOW,), (SLOW, FAST, 30)], ids=["fast", "slow", "recovering"])
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.5}], ids=str
)
def test_what_a_trainer_does_besides(tmp_path: Path, options: dict[str, Any], times: tuple[Any, ...]) -> None:
    """Replicas stay equal while the method switches."""

    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), times, **options)

    (weights, record, _), (others, _, _) = run_ranks(tmp_path, 2, fit)
    np.testing.assert_array_equal(weights, others)
    assert np.isfinite(weights).all()
    assert record.settled


def _links(rank: int) -> Any:
    link = measure_link(Wire(), 0.3)
    return link.points, link.latency, link.bandwidth


def test_all_ranks_measure_the_same_link(tmp_path: Path) -> None:
    (points, latency, bandwidth), *others = run_ranks(tmp_path, 3, _links)
    assert all(each == (points, latency, bandwidth) for each in others)
    for several in points.values():
        assert len(several) >= 2
        assert all(seconds > 0 for _, seconds in several)
        assert [size for size, _ in several] == sorted(size for size, _ in several)
    # With as many bytes on the link: 2(W-1)/W for each of a sum, W-1 for each of a gather.
    assert points["all_gather"][-1][0] == pytest.approx(points["all_reduce"][-1][0] * 2 / 3, rel=0.01)


def _watch(rank: int, seconds: list[list[float]]) -> list[int]:
    watch = DriftWatch(Wire())
    watch.begin(1.0)
    return [step for step, each in enumerate(seconds[rank], 1) if watch.drifted(each, each / 10)]


def test_a_drift_that_one_rank_sees_is_seen_by_all(tmp_path: Path) -> None:
    steady, slower = [1.0] * 60, [1.0] * 30 + [2.0] * 30
    found = run_ranks(tmp_path, 2, _watch, [steady, slower])
    assert found[0] == found[1]
    assert 30 < found[0][0] <= 42


def _watch_short(rank: int) -> list[int]:
    watch = DriftWatch(Wire())
    watch.begin(0.01)
    slow = [40 <= step < 47 for step in range(120)]
    return [step for step, each in enumerate(slow) if watch.drifted(0.03 if each else 0.01, 0.001)]


def test_seven_short_steps_are_no_drift(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _watch_short) == [[], []]


def test_a_few_slow_steps_are_no_drift(tmp_path: Path) -> None:
    seconds = [1.0, 1.1, 9.0, 1.0, 0.9] * 12
    assert run_ranks(tmp_path, 2, _watch, [seconds, seconds]) == [[], []]


def _alone(rank: int) -> Any:
    strategy = SparseCommStrategy(methods.auto())
    trainer = pl.Trainer(strategy=strategy, devices=1, max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Network(), data(0))
    assert trainer.strategy.chooser.link is None
    return trainer.strategy.chooser.record


def test_one_process_needs_no_choice(tmp_path: Path) -> None:
    (record,) = run_ranks(tmp_path, 1, _alone)
    assert record.current == "ddp"
    assert record.history == []


def test_a_measured_link_answers_for_its_own_ranks() -> None:
    assert MeasuredLink(2, {"all_reduce": [(8, 0.1), (80, 0.2)]}).seconds("all_reduce", 8, 2) == 0.1
