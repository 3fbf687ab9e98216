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
from lightning_sparsecomm.planning import MeasuredLink, chooser, outlook
from lightning_sparsecomm.planning.chooser import AutoChooser
from lightning_sparsecomm.planning.outlook import Outlook
from lightning_sparsecomm.planning.probe import measure_link
from lightning_sparsecomm.planning.record import Record
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
    def __init__(self, adam: bool = False, unused: bool = False, sometimes: bool = False) -> None:
        super().__init__()
        self.adam = adam
        self.unused = torch.nn.Linear(3, 3) if unused or sometimes else None
        self.sometimes = sometimes
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        outputs = self.layers(x)
        if self.sometimes and not self.trainer.strategy.engine.registry.in_buckets:
            outputs = self.unused(outputs)  # type: ignore[misc]
        return torch.nn.functional.cross_entropy(outputs, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Resumable(DataLoader[Any]):
    """Goes on behind the batches that had been delivered before a save."""

    done = first = 0

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.done = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["done"] % BATCHES


def data(rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4 * BATCHES, 6, generator=generator)
    return Resumable(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4)


class Stop(pl.Callback):
    """Ends a run sooner than its Trainer was told."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.steps


def pretend(times: Times, later: Times | None = None, after: int = 10**9) -> None:
    """Steps seem to take these times with each method, and later others; the network too.

    It is near, however busy this machine is.
    """
    points = [(8.0, 0.001), (1e6, 0.25)]
    near = MeasuredLink(2, {"all_reduce": points, "all_gather": points})
    outlook.measure_link = lambda *_: near  # type: ignore[assignment, misc]

    def now(engine: Any) -> Times:
        steps = max(tracked.steps for tracked in engine.registry.optimizers)
        return later if later is not None and steps > after else times

    def end(self: StepTimes) -> bool:
        engine = self._engine
        name, known = engine.chooser.record.current, now(engine)
        waited = known["wait"] if name == "sparsecomm" else known[name] - known["compute"]
        return self.enter(known[name], known["compute"], 0.0, waited)

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
    """A fit; returns weights, the chooser's record, and what was said. `saves` checkpoints so often."""
    if times is not None:
        pretend(*times)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    torch.manual_seed(1)
    torch.set_num_threads(1)
    finds = {"find_unused_parameters": True} if options.get("sometimes") else {}
    model = Network(adam, unused, options.pop("sometimes", False))
    strategy = "ddp" if method == "ddp" else SparseCommStrategy(method, **finds)  # type: ignore[arg-type]
    saves = options.pop("saves", None)
    callbacks: list[pl.Callback] = [Stop(options.pop("stops", 10**9))]
    if saves is not None:
        callbacks.append(ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=saves))
    trainer = pl.Trainer(
        devices=2,
        plugins=[TorchElasticEnvironment()],
        strategy=strategy,
        max_epochs=options.pop("epochs", 3),
        callbacks=callbacks,
        enable_checkpointing=saves is not None,
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
        # ddp, the faster of the two, is tried a second time.
        assert switches(record) == [(7, "ddp-bf16"), (14, "ddp"), (21, "ddp")]
        assert record.settled
        assert record.tried_again == ["ddp"]
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


@pytest.mark.parametrize(
    ("ddp", "steps"), [(40.0, 1), pytest.param(40.0 / 9, 4, marks=pytest.mark.slow)], ids=["long", "short"]
)
def test_a_first_step_of_ddp_that_is_long_and_far_behind_is_its_last(
    tmp_path: Path, ddp: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the probe knew no rate, as over a high-latency link: so the run began with ddp all the same."""
    far = {"ddp": ddp, "ddp-bf16": ddp / 2, "sparsecomm": ddp / 13, "compute": 0.1, "wait": 0.06}
    monkeypatch.setattr(chooser, "_without_doubt", lambda nets: None)
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (far,)):
        assert switches(record) == [(steps, "sparsecomm"), (steps + 7, "sparsecomm")]
        assert record.measured == {"ddp": ddp, "sparsecomm": ddp / 13}


def test_a_first_step_that_was_not_expected_to_be_long_is_not_the_last() -> None:
    """A rank may have waited for another one's first batch."""
    known = {"ddp": 6.5, "ddp-bf16": 3.5, "sparsecomm": 0.5}
    assert Record().is_far_behind(7.0, known, first=True)
    assert not Record().is_far_behind(7.0, known | {"ddp": 0.6}, first=True)
    assert not Record(current="sparsecomm").is_far_behind(9.0, known, first=True)
    assert not Record(measured={"ddp": 0.5}).is_far_behind(7.0, known, first=True)
    assert Record().is_far_behind(0.8, known, first=False)


@pytest.mark.slow
def test_a_first_step_that_is_long_by_computing_is_not_the_last(tmp_path: Path) -> None:
    """Such as one that compiles the model."""
    slow = {"ddp": 40.0, "ddp-bf16": 39.9, "sparsecomm": 39.0, "compute": 38.5, "wait": 0.1}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (slow,)):
        assert switches(record)[0][0] == 7


@pytest.mark.parametrize(("ddp", "chosen"), [(0.36, ["sparsecomm"] * 2), (0.3, ["ddp"])])
def test_what_was_not_far_behind_after_all_is_tried_again(tmp_path: Path, ddp: float, chosen: list[str]) -> None:
    """sparsecomm was predicted too fast, and is tried again itself where it is the fastest all the same."""
    later = BEHIND | {"ddp": ddp, "sparsecomm": 0.34}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (BEHIND, later, 5)):
        rest = [(18 + 7 * number, name) for number, name in enumerate(chosen)]
        assert switches(record) == [(4, "sparsecomm"), (11, "ddp"), *rest]
        assert record.measured == {"ddp": ddp, "sparsecomm": 0.34}
        assert record.cut_short == []


def test_short_steps_are_tried_longer(tmp_path: Path) -> None:
    short = {name: each / 10 for name, each in FAST.items()}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto(), (short,)):
        assert switches(record) == [(22, "ddp-bf16"), (43, "ddp"), (65, "ddp")]


def _fit_with_a_hiccup(rank: int, folder: str) -> Any:
    """The first step of sparsecomm that counts is slow, on one rank."""
    pretend(BEHIND)
    end = StepTimes.end

    def slow_once(self: StepTimes) -> bool:
        new = end(self)
        chooser = self._engine.chooser
        assert isinstance(chooser, AutoChooser)
        if rank == 1 and self.counted == 1 and chooser.record.current == "sparsecomm":
            self._steps[0] = (0.9, 0.1, 0.0)
        return new

    StepTimes.end = slow_once  # type: ignore[method-assign]
    return train(rank, folder, methods.auto(), None)


def test_one_slow_step_ends_no_trial(tmp_path: Path) -> None:
    for _, record, _ in run_ranks(tmp_path, 2, _fit_with_a_hiccup, str(tmp_path)):
        assert switches(record) == [(4, "sparsecomm"), (11, "sparsecomm")]
        assert record.measured == {"ddp": 0.4, "sparsecomm": 0.2}


def far(rank: int, folder: str, learns: bool) -> Any:
    """Only 64 bytes could be measured over a high-latency link: as many as are sent in one round trip."""
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


def test_of_two_that_are_near_the_faster_is_tried_twice(tmp_path: Path) -> None:
    """Its second time counts: the first was short, as after steps that had sent more."""
    near = {"ddp": 0.7, "ddp-bf16": 0.42, "sparsecomm": 0.44, "compute": 0.2, "wait": 0.1}
    for _, record, _ in run_ranks(
        tmp_path, 2, train, str(tmp_path), methods.auto(), (near, near | {"ddp-bf16": 0.5}, 18)
    ):
        assert switches(record) == [
            (4, "ddp-bf16"),
            (11, "sparsecomm"),
            (18, "ddp-bf16"),
            (25, "sparsecomm"),
            (32, "sparsecomm"),
        ]
        assert record.measured == {"ddp": 0.7, "ddp-bf16": 0.5, "sparsecomm": 0.44}
        assert record.tried_again == ["ddp-bf16", "sparsecomm"]


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


def test_it_returns_to_ddp_where_a_layer_is_used_in_some_steps_only(tmp_path: Path) -> None:
    """While DDP's reducer is idle it still notes what is used, which says nothing of the first step that it reduces."""

    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (SLOW, FAST, 30), sometimes=True)

    (weights, record, _), (others, _, _) = run_ranks(tmp_path, 2, fit)
    np.testing.assert_array_equal(weights, others)
    assert record.current == "ddp"


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
@pytest.mark.parametrize("epoch", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_resumed_run_goes_on_with_its_choice_to_the_bit(tmp_path: Path, epoch: int) -> None:
    record = _resumed(tmp_path, methods.auto(), SLOW, 30, f"epoch={epoch}-step={30 * (epoch + 1)}.ckpt")
    # It was not measured anew.
    assert switches(record) == [(0, "sparsecomm"), (7, "sparsecomm")]


def _resumed(tmp_path: Path, method: Method, times: Times, every: int, name: str, **options: Any) -> Any:
    """The record of a run that is resumed from one of its checkpoints, after a check that it ends as the whole one."""
    saves = tmp_path / "saves"

    def fit(rank: int, resume: str | None) -> Any:
        folder = str(saves if resume is None else tmp_path / "later")
        return train(rank, folder, method, (times,), resume, saves=every, **options)

    whole = run_ranks(tmp_path, 2, fit, None)
    assert (saves / name).exists()
    again = run_ranks(tmp_path, 2, fit, str(saves / name))
    for (expected, _, _), (found, _, _) in zip(whole, again):
        np.testing.assert_array_equal(found, expected)
    return again[0][1]


def test_in_a_long_run_sparsecomm_makes_local_steps(tmp_path: Path) -> None:
    """It then exchanges once in two steps, and means of two count: of three such, after the first."""

    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (SLOW,), epochs=80, stops=20)

    (weights, record, said), (others, other, _) = run_ranks(tmp_path, 2, fit)
    np.testing.assert_array_equal(weights, others)
    assert switches(record) == switches(other) == [(0, "sparsecomm"), (8, "sparsecomm")]
    assert record.followed == (2400, 2)
    assert said[1].startswith(
        "sparsecomm: step 8: chose sparsecomm, which exchanges once in 2 steps. A step takes: sparsecomm 200 ms"
    )


@pytest.mark.parametrize("adam", [pytest.param(False, marks=pytest.mark.slow), True])
def test_when_the_network_recovers_it_returns_from_local_steps(tmp_path: Path, adam: bool) -> None:
    """What each rank has trained since the last exchange is delivered: replicas are equal."""

    def fit(rank: int) -> Any:
        return train(rank, str(tmp_path), methods.auto(), (SLOW, FAST, 61), adam=adam, epochs=20, stops=130)

    found = run_ranks(tmp_path, 2, fit)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for _, record, _ in found:
        assert record.current == "ddp"
        *_, (noticed, _), (_, first), (chosen, last) = switches(record)
        assert 61 < noticed < chosen < 111
        assert (first, last) == ("ddp", "ddp")
        assert record.tried_again == ["ddp"]


@pytest.mark.parametrize(("every", "tried"), [(16, True), (30, False)])
def test_a_trial_that_would_not_end_is_not_begun(tmp_path: Path, every: int, tried: bool) -> None:
    """It takes four times `every` steps, and the run has 90."""
    candidate = methods.dgc(0.05, warmup_steps=0, every=every)
    times = {"ddp": 0.4, repr(candidate): 0.39, "compute": 0.1, "wait": 0.06}
    for _, record, _ in run_ranks(tmp_path, 2, train, str(tmp_path), methods.auto("exact", [candidate]), (times,)):
        assert record.settled
        assert (repr(candidate) in record.measured) is tried


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_local_steps_are_resumed_to_the_bit_between_two_exchanges(tmp_path: Path) -> None:
    candidate = methods.dgc(0.05, warmup_steps=0, every=2)
    times = {"ddp": 1.0, repr(candidate): 0.2, "compute": 0.1, "wait": 0.06}
    record = _resumed(tmp_path, methods.auto("exact", [candidate]), times, 40, "epoch=1-step=40.ckpt")
    assert switches(record) == [(0, repr(candidate)), (8, repr(candidate))]


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


def _watch_means(rank: int, every: int) -> list[int]:
    watch = DriftWatch(Wire())
    watch.begin(1.0)
    slow = [1.0] * 40 + [2.0] * 40
    means = [sum(slow[step : step + every]) / every for step in range(0, len(slow), every)]
    return [every * number for number, each in enumerate(means, 1) if watch.drifted(each, each / 10, steps=every)]


@pytest.mark.parametrize("every", [2, 4])
def test_a_drift_of_means_over_several_steps_is_seen_as_soon(tmp_path: Path, every: int) -> None:
    found = run_ranks(tmp_path, 2, _watch_means, every)
    assert found[0] == found[1]
    assert 40 < found[0][0] <= 40 + 24


@pytest.mark.parametrize(("every", "counted"), [(1, [2, 9, 1, 1]), (2, [5.5, 1]), (4, [3.25])])
def test_where_exchanges_are_seldom_means_count(wire: Wire, every: int, counted: list[float]) -> None:
    """Of as many steps as there are from one to the next; first steps count for none."""
    engine = Engine(methods.dgc(0.1, every=every), wire)
    module = torch.nn.Linear(3, 3)
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), 0.1, 0.9))
    times = StepTimes(engine)
    times.restart()
    steps = [1, 1, 2, 9, 1, 1] if every < 4 else [5, 5, 5, 5, 2, 9, 1, 1]
    new = [times.enter(float(seconds), seconds / 2, 0.0, seconds / 4) for seconds in steps]
    assert new == [step % every == 0 for step in range(1, len(steps) + 1)]
    assert [seconds for seconds, _, _ in times._steps] == counted
    assert times.last == counted[-1]
    assert times.waited == counted[-1] / 4
    engine.close()


def test_what_is_waited_for_between_steps_is_not_a_step_s(wire: Wire) -> None:
    """As a validation waits, before which ranks average what other code has changed."""
    engine = Engine(methods.dgc(0.1), wire)
    times, clock = StepTimes(engine), wire.ledger.clock.seconds
    for between, within in ((0.0, 2.0), (7.0, 3.0)):
        clock["wait"] += between
        times.begin()
        clock["wait"] += within
        assert times.end()
        assert times.waited == within
    engine.close()


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
