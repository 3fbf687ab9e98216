"""A Trainer whose ranks exchange weight changes every few steps validates and saves one model, at no extra cost."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_sparsecomm import Channel, CompressionMonitor, DeltaSync, ErrorFeedback, NonFiniteGradientError
from lightning_sparsecomm.basis.schedules import Exponential, Stages
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import MomentumCorrection
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.frontends.stopping import ASKS
from lightning_sparsecomm.methods import dgc, diloco, federated_averaging, gradient_dropping, sbc, sparse_loco
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import (
    FEATURES,
    SCENARIOS,
    Adversarial,
    Classifier,
    Scenario,
    Shown,
    fit,
    without_momentum,
)
from tests.distributed.test_local_modes import Measured

METHODS: dict[str, Callable[[], Method]] = {
    "sbc": lambda: sbc(0.05, every=4),
    "sbc, ahead": lambda: sbc(0.05, every=4, residual_in_weights=True),
    "federated_averaging": lambda: federated_averaging(every=4),
    "diloco": lambda: diloco(every=4),
    "sparse_loco": lambda: sparse_loco(every=4, density=0.125, chunk=64),
}


class Notes(pl.Callback):
    """Writes what a rank has after fit to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        notes = {name: getattr(pl_module, name, None) for name in ("trained", "validated", "last")}
        notes |= {"weights": pl_module.state_dict(), "ledger": getattr(strategy, "ledger", None)}
        torch.save(notes, self.folder / f"notes-{trainer.global_rank}.pt")


def trained(folder: Path, scenario: Scenario, method: Method | None, *callbacks: pl.Callback, **options: Any) -> Any:
    options = {"limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    fit(folder, scenario, 2, method, (Notes(folder), *callbacks), **options)
    return [torch.load(folder / f"notes-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_measuring_and_saving_never_change_training(tmp_path: Path, name: str) -> None:
    method, scenario = METHODS[name](), Scenario(Measured, steps=10)
    plain = trained(tmp_path / "plain", scenario, method)
    often = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 2, "enable_checkpointing": True}
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    watched = trained(tmp_path / "watched", scenario, method, saver, **often)
    for ours, theirs in zip(watched, plain, strict=True):
        assert ours["trained"] == theirs["trained"]
        laws.bit_equal(ours, theirs)
        # Validating and saving send nothing.
        for row in ("weight updates", "parameters", "DDP buffers"):
            assert ours["ledger"].handed_bytes(row) == theirs["ledger"].handed_bytes(row)
    # Ranks are equal after every fourth step, unless residuals differ, and the last. All validate the same model, and
    # end with it.
    ahead = name == "sbc, ahead"
    together = [(i % 4 == 3 and not ahead) or i == 9 for i in range(10)]
    assert [a == b for a, b in zip(plain[0]["trained"], plain[1]["trained"])] == together
    laws.bit_equal(plain[0], plain[1])
    assert watched[0]["validated"] == watched[1]["validated"]
    assert len(set(watched[0]["validated"])) == 4
    assert len(watched[0]["validated"]) == 1 + 10

    # A checkpoint holds what all ranks had after the last exchange.
    start = Measured().total()
    after = [start] * 3 + [plain[0]["trained"][3]] * 4 + [plain[0]["trained"][7]] * 2 + [plain[0]["trained"][9]]
    if ahead:
        # What it has validated is what is shared.
        exchanged = sorted(set(watched[0]["validated"]), key=watched[0]["validated"].index)
        after = [start] * 3 + [exchanged[1]] * 4 + [exchanged[2]] * 2 + [exchanged[3]]
    assert len(list((tmp_path / "saved").glob("*.ckpt"))) == 10
    for path in (tmp_path / "saved").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=False)
        state, step = checkpoint["state_dict"], checkpoint["global_step"]
        assert float(sum(state[name].double().sum() for name, _ in Measured().named_parameters())) == after[step - 1]


def test_nothing_is_sent_between_exchanges(tmp_path: Path) -> None:
    scenario = Scenario(lambda: Classifier(batch_norm=True), steps=11)
    for ranks in (
        trained(tmp_path / "buffers", scenario, federated_averaging(every=4)),
        trained(tmp_path / "none", scenario, federated_averaging(every=4, buffers="own")),
    ):
        ledger = ranks[0]["ledger"]
        parameters = list(Classifier(batch_norm=True).parameters())
        elements = sum(parameter.numel() for parameter in parameters)
        # Two exchanges during training, and one for the last three steps.
        assert ledger.handed_bytes("weight updates") == 3 * 4 * (elements + len(parameters))
        assert ledger.ddp_bytes == 11 * 4 * elements
        assert "gradients" not in ledger.rows and "DDP buffers" not in ledger.rows
        assert "DDP unused-parameter map" not in ledger.rows
        # From 2.5.3 on, Lightning says before each batch whether rank 0 was told to stop; here rank 0 seldom does.
        if hasattr(_TrainingEpochLoop, ASKS):
            assert 1 <= ledger.rows["Lightning, metrics"]["broadcast"].calls < 11
        assert ledger.density() == pytest.approx(3 / 11)
    laws.replicas_are_equal(ranks)
    # At the end ranks ask whether anyone has changed weights: four bytes for each tensor. And with each exchange
    # whether anyone has set one: a bit for each parameter, and a checksum.
    tensors = len(parameters) + 2
    assert ledger.handed_bytes("parameters") == 4 * tensors + 3 * (4 + math.ceil(len(parameters) / 8))


def test_buffers_are_broadcast_if_asked_for(tmp_path: Path) -> None:
    ranks = trained(tmp_path, Scenario(Measured, steps=5), federated_averaging(every=2, buffers="broadcast"))
    assert ranks[0]["ledger"].rows["DDP buffers"]["broadcast"].calls == 5
    # The command line passes all of ddp's options, also those left at their defaults.
    scenario = Scenario(Measured, strategy={"broadcast_buffers": True}, steps=5)
    ranks = trained(tmp_path, scenario, federated_averaging(every=2))
    assert "DDP buffers" not in ranks[0]["ledger"].rows


# The other scenarios differ only in what DDP's reducer does, which is idle here.
QUICK = ("accumulation", "adversarial", "unused_on_one_rank")
NOT_CLIPPED = [name for name in SCENARIOS if "clip" not in name and name != "several_backwards"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NOT_CLIPPED]
)
def test_every_step_without_momentum_is_ddp(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    ddp = trained(tmp_path / "ddp", scenario, None, model=without_momentum(scenario))
    ours = trained(tmp_path / "ours", scenario, federated_averaging(every=1), model=without_momentum(scenario))
    laws.replicas_are_equal(ours)
    # Running statistics come from each rank's own batches, and are averaged.
    weights = {name: value for name, value in ddp[0]["weights"].items() if "running" not in name and "num" not in name}
    laws.equal_to_round_off(ours[0], {"weights": weights}, scenario.tolerance)


class Same(Classifier):
    """Trains on the same batches on all ranks."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        random = torch.Generator().manual_seed(batch_idx)
        x = torch.randn(8, FEATURES, generator=random)
        return cross_entropy(self(x), torch.randint(5, (8,), generator=random))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.Adam, lr=0.01),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    ],
)
def test_ranks_that_do_the_same_train_as_one(tmp_path: Path, make: Any) -> None:
    """Every exchange averages equal weights. LBFGS shows that steps are counted, and not evaluations."""
    scenario = Scenario(lambda: Same(make), steps=7)
    alone = fit(tmp_path / "alone", scenario, 1)
    for every in (1, 3):
        ranks = trained(tmp_path / f"{every}", scenario, federated_averaging(every))
        laws.equal_to_round_off(ranks[0], alone[0], 2e-6)
        parameters = list(Classifier().parameters())
        exchanged = 4 * (sum(parameter.numel() for parameter in parameters) + len(parameters))
        assert ranks[0]["ledger"].handed_bytes("weight updates") == math.ceil(7 / every) * exchanged


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["accumulation", "clip_norm", "clip_value", "several_backwards", "bf16_mixed"])
def test_optimizer_steps_are_counted_whatever_they_are_made_of(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    ranks = trained(tmp_path, scenario, sbc(0.1, every=6))
    laws.trained(scenario.model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    assert ranks[0]["ledger"].rows["weight updates"]["all_gather"].calls == 2 * math.ceil(20 / 6)


def test_two_optimizers_exchange_each_by_its_own_steps(tmp_path: Path) -> None:
    for toggle in (False, True):
        scenario = Scenario(lambda toggle=toggle: Adversarial(toggle), steps=20)
        ranks = trained(tmp_path / str(toggle), scenario, federated_averaging(every=3))
        laws.replicas_are_equal(ranks)
        # Each optimizer makes ten steps: three exchanges, and one for the last step.
        assert ranks[0]["ledger"].rows["weight updates"]["all_reduce"].calls == 2 * 4


def _in_bfloat16(rank: int) -> list[list[float]]:
    """Rank 0 moves the first weight by a unit in the last place in each step, and the second weight in step 0 only."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    engine = Engine(federated_averaging(every=1), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    seen = []
    for step in range(6):
        module.weight.grad = torch.tensor([-(2**-7) * (1 - rank), -(2**-7) * (1 - rank) * (step == 0)]).bfloat16()
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        seen.append(module.weight.tolist())
    engine.close()
    return seen


def test_narrow_weights_have_a_wide_anchor(tmp_path: Path) -> None:
    """The mean of the moves, half a unit in the last place, is not lost. A rounding error of a weight that nobody moves
    is not sent as a change."""
    first, second = run_ranks(tmp_path, 2, _in_bfloat16)
    assert first == second
    half = 2**-8
    # Ties round to even: half a unit above 1 gives 1, and one and a half give two.
    expected = [1 + half * places for places in (0, 2, 4, 4, 4, 6)]
    assert [weight for weight, _ in first] == expected
    assert [weight for _, weight in first] == [1.0] * 6


class LastHook(Classifier):
    """Notes the weights that its `on_train_end` sees."""

    def on_train_end(self) -> None:
        self.last = {name: tensor.clone() for name, tensor in self.state_dict().items()}


def test_the_last_hooks_of_training_see_the_model_that_stays(tmp_path: Path) -> None:
    for method in (federated_averaging(every=4), gradient_dropping(0.05, local="partial")):
        for notes in trained(tmp_path, Scenario(LastHook, steps=6), method):
            laws.bit_equal({"weights": notes["last"]}, notes)


class Unfreezes(Classifier):
    """Its side branch trains from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.side.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.side.requires_grad_(self.global_step >= 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_parameters_may_begin_to_train_later(tmp_path: Path, name: str) -> None:
    ranks = trained(tmp_path, Scenario(Unfreezes, steps=9), METHODS[name]())
    laws.replicas_are_equal(ranks)
    side = Unfreezes().state_dict()["side.weight"]
    assert not torch.equal(ranks[0]["weights"]["side.weight"], side)


def test_every_may_follow_a_schedule(tmp_path: Path) -> None:
    for every, calls in ((Stages([1, 3, 5], steps=[0, 4, 10]), 4 + 2 + 2), (Exponential(1, 8, steps=10), 6)):
        ranks = trained(tmp_path, Scenario(Classifier, steps=20), federated_averaging(every=every))
        laws.replicas_are_equal(ranks)
        assert ranks[0]["ledger"].rows["weight updates"]["all_reduce"].calls == calls


def test_the_monitor_counts_from_exchange_to_exchange(tmp_path: Path) -> None:
    """Over steps in which nothing was sent the ratio would be infinite, and over the others too small."""
    logger = pl.loggers.CSVLogger(tmp_path, version="run")
    options = {"logger": logger, "log_every_n_steps": 2}
    trained(tmp_path, Scenario(Classifier, steps=12), federated_averaging(every=4), CompressionMonitor(), **options)
    import csv

    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        ratios = [
            float(row["sparsecomm/compression_ratio"]) for row in csv.DictReader(file) if row["sparsecomm/density"]
        ]
    parameters = list(Classifier().parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    # Four bytes and a bit for each parameter, in units of four bytes.
    flags = (4 + math.ceil(len(parameters) / 8)) / 4
    # The logger gets the last value again until there is a new one.
    assert len(ratios) >= 3
    assert ratios == pytest.approx([4 * elements / (elements + len(parameters) + flags)] * len(ratios))


class Words(pl.LightningModule):
    """An embedding with sparse gradients, and an optimizer that takes no others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 4, sparse=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.words(batch[1]) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.1)


def test_gradients_may_be_sparse(tmp_path: Path) -> None:
    ranks = trained(tmp_path, Scenario(Words, steps=5), sbc(0.2, every=2))
    laws.trained(Words().state_dict(), ranks[0])
    laws.bit_equal(ranks[0], ranks[1])


class Tied(pl.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]


def lost(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def none(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([], lr=0.1)


def test_refused_at_setup(tmp_path: Path) -> None:
    for outer, text in (
        (none, "outer must make an optimizer of the 8 parameters .* raised ValueError: optimizer got an empty"),
        (functools.partial(torch.optim.SGD, lr=-1), "outer must make .* raised ValueError: Invalid learning rate: -1"),
        (lost, "outer must make an optimizer of the parameters that it is given; SGD lacks 8 of 8"),
        (list, "outer must make a torch optimizer"),
    ):
        sync = DeltaSync(Channel(DenseAllReduce()), outer=outer)
        with pytest.raises(Exception, match=text) as caught:
            fit(tmp_path, Scenario(NeverTrained, steps=1), 2, Method([sync]))
        assert "trained a step" not in str(caught.value)


class NeverTrained(Classifier):
    def on_train_start(self) -> None:
        raise AssertionError("trained a step")


def test_refused_in_training(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"parameter 'layer\.weight' belongs to two optimizers"):
        trained(tmp_path, Scenario(Tied, steps=4), Method([DeltaSync(Channel(DenseAllReduce()))]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sbc(every=0), "every must be a whole number of optimizer steps, at least 1; got 0"),
        (lambda: federated_averaging(every=2.5), "got 2.5"),
        (lambda: diloco(outer_lr=0), "outer_lr must be a positive number; got 0"),
        (lambda: diloco(outer_momentum=1.0), "outer_momentum must be in"),
        (lambda: diloco(outer_momentum="a"), "outer_momentum must be in"),
        (lambda: sbc(density=0), "density must be in"),
        (lambda: federated_averaging(buffers="none"), "buffers must be one of average, own, broadcast; got 'none'"),
        (lambda: sparse_loco(density=0), "density must be in"),
        (lambda: sparse_loco(decay=0), "decay must be in"),
        (lambda: sparse_loco(decay="0.9"), "decay must be in .*got '0.9'"),
        (lambda: sparse_loco(decay=True), "decay must be in .*got True"),
        (lambda: sbc(exclude=None), "exclude must be a list of patterns of parameter names; got None"),
        (lambda: sbc(exclude=[1]), r"exclude must be a list of patterns of parameter names; got \[1\]"),
        (lambda: DeltaSync(None), "channel must be a Channel of an exchange and memories; got None"),
        (lambda: DeltaSync(DenseAllReduce()), "channel must be a Channel"),
        (
            lambda: DeltaSync(Channel(DenseAllReduce()), outer=torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
            "outer must",
        ),
        (
            lambda: DeltaSync(dgc_channel()),
            "channel must be without MomentumCorrection, .*: weight changes hold momentum",
        ),
    ],
)
def test_refused_at_construction(make: Callable[[], Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def dgc_channel() -> Channel:
    return Channel(DenseAllReduce(), [MomentumCorrection(), ErrorFeedback()])


def test_a_process_alone_and_a_run_without_an_exchange_are_warned_of(tmp_path: Path, capfd: Any) -> None:
    scenario = Scenario(Classifier, steps=3)
    fit(tmp_path, scenario, 1, sbc(every=4), (Shown(),))
    printed = capfd.readouterr().err
    assert "one process: nothing crosses a network, so the method saves nothing." in printed
    assert printed.count("every=4 is more than the run's 3 optimizer steps") == 1
    fit(tmp_path, scenario, 2, sbc(every=3), (Shown(),))
    printed = capfd.readouterr().err
    assert "one process" not in printed and "every=" not in printed
    # Of a schedule, its least value counts. A learning rate finder's trial is not a run.
    fit(tmp_path, scenario, 2, sbc(every=Stages([9, 4], steps=[0, 2])), (Shown(),))
    assert capfd.readouterr().err.count("every=4 is more than the run's 3 optimizer steps") == 1
    finder = pl.callbacks.LearningRateFinder(num_training_steps=3, update_attr=False)
    model = Classifier()
    model.learning_rate = 0.1
    options = {"model": model, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    fit(tmp_path, Scenario(Classifier, steps=6), 2, sbc(every=Stages([9, 1], steps=[0, 5])), (Shown(),))
    fit(tmp_path, Scenario(Classifier, steps=5), 2, sbc(every=5), (Shown(), finder), **options)
    assert "every=" not in capfd.readouterr().err


class Seen(pl.Callback):
    """Notes the weights that would be validated after the first batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        seen = {"steps": strategy.engine.registry.optimizers[0].steps, "state": strategy.lightning_module_state_dict()}
        if batch_idx == 0:
            torch.save(seen | {"residual": strategy.engine.residual_norm()}, self.folder / "seen.pt")


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [sbc(0.05, every=3), gradient_dropping(0.05), dgc(0.05, warmup_steps=0)])
def test_what_a_learning_rate_finder_has_tried_is_forgotten(tmp_path: Path, method: Method) -> None:
    finder = pl.callbacks.LearningRateFinder(num_training_steps=7, update_attr=False)
    model = Classifier()
    model.learning_rate = 0.1
    trained(tmp_path, Scenario(Classifier, steps=3), method, finder, Seen(tmp_path), model=model)
    seen = torch.load(tmp_path / "seen.pt")
    assert seen["steps"] == 1
    if isinstance(method, sbc):
        laws.bit_equal({"weights": seen["state"]}, {"weights": Classifier().state_dict()})
        assert seen["residual"] == 0


class Beside(Classifier):
    """Holds what no optimizer trains: a constant, a mean that replaces its buffer, and a slow copy of a layer."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.register_buffer("constant", torch.rand(300), persistent=False)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.teacher = nn.Linear(16, 5).requires_grad_(False)
        self.seen: list[list[Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, quick in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                slow.lerp_(quick, 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        names = ("mean", "teacher.weight", "body.1.running_mean", "constant")
        self.seen.append([{**self.state_dict(), "constant": self.constant}[name].clone() for name in names])

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(2, FEATURES), batch_size=1)  # type: ignore[arg-type]


class SeenBeside(Notes):
    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        notes = {"seen": pl_module.seen, "constant": pl_module.constant, "weights": pl_module.state_dict()}
        notes["parameters_bytes"] = trainer.strategy.ledger.handed_bytes("parameters")
        torch.save(notes, self.folder / f"beside-{trainer.global_rank}.pt")


def test_what_no_optimizer_trains_is_shared_too(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    trained(tmp_path, Scenario(Beside, steps=8), federated_averaging(every=3), SeenBeside(tmp_path), **options)
    first, second = (torch.load(tmp_path / f"beside-{rank}.pt") for rank in range(2))
    laws.bit_equal(first, second)
    # Also between exchanges. Only a parameter that is not known to change yet may differ before the first.
    for step, (ours, theirs) in enumerate(zip(first["seen"], second["seen"], strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b) or (index == 1 and step < 2), (step, index)
    assert torch.equal(first["constant"], Beside().constant)
    # Four exchanges, one of them at the end: which tensors have changed, and the mean of those.
    model = Beside()
    beside = [b for b in (*model.buffers(), *model.teacher.parameters()) if b.is_floating_point()]
    changed = sum(tensor.numel() for tensor in beside) - 300
    asked = 4 * (len(beside) + sum(1 for p in model.parameters() if p.requires_grad))
    moved_again = changed - sum(p.numel() for p in model.teacher.parameters())
    assert first["parameters_bytes"] <= 4 * 4 * (changed + len(beside)) + asked
    assert first["parameters_bytes"] >= 3 * 4 * (moved_again + len(beside)) + asked


class Slow(pl.Callback):
    """Changes the weights at the end, as callbacks do that average a rank's weights over time."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight.add_(float(trainer.global_rank + 1))


@pytest.mark.parametrize("method", [federated_averaging(every=3), gradient_dropping(0.05, local="partial")])
def test_one_model_stays_whatever_callbacks_put_in_its_place(tmp_path: Path, method: Method) -> None:
    ranks = trained(tmp_path, Scenario(LastHook, steps=6), method, Slow())
    laws.replicas_are_equal(ranks)
    moved = ranks[0]["weights"]["head.weight"] - ranks[0]["last"]["head.weight"]
    # The module's own hook runs after the callback, which adds 1 on rank 0 and 2 on rank 1. Their mean is 1.5.
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5))


def _one_is_nan(rank: int) -> tuple[str, bool, list[float]]:
    module = nn.Linear(6, 4)
    nn.init.constant_(module.weight, 0.5)
    nn.init.constant_(module.bias, 0.25)
    engine = Engine(sbc(0.5, every=1, exclude=["bias"]), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.weight.grad, module.bias.grad = torch.ones(4, 6), torch.full((4,), float("nan") if rank else 1.0)
    try:
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    except NonFiniteGradientError as error:
        return str(error), bool(module.bias.isnan().any()), module.weight.detach().flatten().tolist()
    finally:
        engine.close()
    return "", True, []


def test_an_error_leaves_the_last_model_that_all_shared(tmp_path: Path) -> None:
    """Also where only the last of several syncs fails: no anchor moves."""
    ranks = run_ranks(tmp_path, 2, _one_is_nan)
    for text, has_nan, _ in ranks:
        assert text.startswith("rank 1 has a weight update that is not finite, for parameter 'bias' in step 0.")
        assert not has_nan
    assert ranks[0][2] == ranks[1][2] == [0.5] * 24


def test_schedules_must_stay_within_their_bounds() -> None:
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]; got 10 from Stages.*Correct the schedule"):
        sbc(density=Stages([0.1, 10], steps=[0, 100]))
    with pytest.raises(ValueError, match=r"every must be a number of optimizer steps, at least 1; got 0\.1 from Exp"):
        sbc(every=Exponential(10, 0.1, steps=100))
