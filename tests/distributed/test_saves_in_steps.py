"""A checkpoint that a hook or a signal asks for at any moment of a step: the run that it resumes ends as without it."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.test_resume import BATCH, CLASSES, FEATURES, Network, differences, outside_launcher

# Long together, and seldom touched: `pytest -m slow` has them.
pytestmark = pytest.mark.slow

STEPS, SAVED = 9, 5

METHODS: dict[str, tuple[Callable[[], Method], bool]] = {
    "dgc": (lambda: methods.dgc(0.05, warmup_steps=4), False),
    "sbc": (lambda: methods.sbc(0.05, every=4), True),
    "local_adam": (lambda: methods.local_adam(0.05, warmup_steps=4), True),
}


class Saves(Network):
    """Asks for a checkpoint, once, at one moment of one step."""

    def __init__(self, adam: bool, moment: str, path: Path | None) -> None:
        super().__init__(adam=adam, norm=False)
        self.moment, self.path, self.asked = moment, path, False

    def _at(self, moment: str) -> None:
        if self.path is None or self.moment != moment or self.global_step < SAVED or self.asked:
            return
        self.asked = True
        self.trainer.save_checkpoint(self.path)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._at("training_step")
        # Ranks find the signal in different steps.
        late = self.global_rank if self.moment == "signal, late" else 0
        if self.path is not None and "signal" in self.moment and self.global_step == SAVED + late:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self._at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._at("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._at("on_before_zero_grad")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            result = optimizer_closure()
            self._at("closure")
            return result

        super().optimizer_step(epoch, batch_idx, optimizer, closure)


class Loader:
    """A rank's own batches, by their number in the epoch. It goes on after the last batch that has ended."""

    def __init__(self, rank: int) -> None:
        self.rank, self.trainer = rank, None

    def __iter__(self) -> Iterator[Any]:
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.completed
        for position in range(done, STEPS):
            generator = torch.Generator().manual_seed(10 * position + self.rank)
            x = torch.randn(BATCH, FEATURES, generator=generator)
            yield x, torch.randint(CLASSES, (BATCH,), generator=generator)

    def __len__(self) -> int:
        return STEPS


def _train(rank: int, name: str, moment: str, save: Path | None, resume: Path | None = None) -> dict[str, Any]:
    method, adam = METHODS[name]
    torch.manual_seed(7)
    trainer = pl.Trainer(
        strategy=SparseCommStrategy(method()),
        devices=2,
        max_epochs=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        **QUIET,
    )
    module, loader = Saves(adam, moment, save), Loader(rank)
    loader.trainer = trainer
    signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(save))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*(num_workers|LeafSpec|litlogger|resuming from a checkpoint|`__len__`).*")
        trainer.fit(module, loader, ckpt_path=resume)
    _, state, _ = trainer.strategy._ended
    streams = state["streams"][0]
    return {"weights": dict(module.state_dict()), "held": streams["held"], "steps": streams["steps"]}


MOMENTS = [
    "training_step",
    "on_before_zero_grad",
    "on_after_backward",
    "closure",
    "on_before_optimizer_step",
    "signal",
    "signal, late",
]


def _ends(rank: int, folder: Path, name: str, moments: list[str]) -> dict[str, Any]:
    outside_launcher(rank, 2)
    whole = _train(rank, name, "", None)
    found = {}
    for moment in moments:
        path = folder / f"{moment}.ckpt"
        saving = _train(rank, name, moment, path)
        resumed = _train(rank, name, moment, None, path)
        found[moment] = (
            torch.load(path, weights_only=True)["global_step"],
            differences(whole, saving),
            differences(whole, resumed),
        )
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_save_in_a_step_resumes_as_if_never_stopped(tmp_path: Path, name: str) -> None:
    for found in run_ranks(tmp_path, 2, _ends, tmp_path, name, MOMENTS, timeout=110):
        for moment, (step, saving, resumed) in found.items():
            assert saving == [], moment
            assert resumed == [], moment
            # It waits for the end of the batch. Where ranks got the signal in different steps, for that of the last.
            assert step == SAVED + (2 if moment == "signal, late" else 1), moment


def _signal_on_one_rank(rank: int, folder: Path) -> list[str]:
    outside_launcher(rank, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            strategy=SparseCommStrategy(methods.dgc(0.05)),
            devices=2,
            max_epochs=1,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            **QUIET,
        )
        module, loader = Saves(False, "signal" if rank else "", folder / "one.ckpt"), Loader(rank)
        loader.trainer = trainer
        signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(folder / "one.ckpt"))
        trainer.fit(module, loader)
    assert trainer.global_step == STEPS
    return [str(each.message) for each in caught if "was not saved" in str(each.message)]


def test_a_signal_to_one_rank_alone_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparsecomm.frontends.own_callbacks._PATIENCE_SECONDS", 0.01)
    first, second = run_ranks(tmp_path, 2, _signal_on_one_rank, tmp_path)
    assert first == []
    (words,) = second
    assert "one.ckpt was not saved: not all ranks were asked to." in words
    assert not list(tmp_path.glob("*.ckpt*"))


FABRIC_METHODS: dict[str, tuple[Callable[[], Method], bool]] = {
    **METHODS,
    "gradient_dropping": (lambda: methods.gradient_dropping(0.05, warmup_steps=4), True),
    "sketched_sgd": (lambda: methods.sketched_sgd(0.1), False),
    "powersgd": (lambda: methods.powersgd(1), False),
    "quantized": (methods.quantized, False),
    "local gradients": (lambda: methods.gradient_dropping(0.05, local="partial", average_every=3), False),
    "sparse tables": (lambda: methods.split(["table.*"], methods.s2_reducer(), methods.gradient_dropping(0.2)), False),
}

FABRIC_MOMENTS = ["shared", "closure", "clipped", "clipped by value"]


class Tables(nn.Module):
    """A table with sparse gradients, and dense layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(4 + FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = x[:, 0].mul(10).long().remainder(30)
        return self.head(torch.cat([self.table(words), x], 1))


class FabricRun:
    """Trains in a Fabric loop that goes on with the batch at which a checkpoint was saved."""

    def __init__(self, name: str, devices: int = 2) -> None:
        method, adam = FABRIC_METHODS[name]
        self.fabric = Fabric(accelerator="cpu", devices=devices, strategy=FabricStrategy(method()))
        self.fabric.launch()
        torch.manual_seed(7)
        module = Tables(sparse=name == "sparse tables")
        options: dict[str, Any] = {} if name == "sparse tables" else {"momentum": 0.9, "weight_decay": 1e-3}
        sgd = torch.optim.Adam(module.parameters(), lr=1e-2) if adam else None
        optimizer = sgd or torch.optim.SGD(module.parameters(), lr=0.1, **options)
        self.model, self.optimizer = self.fabric.setup(module, optimizer)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, moment: str, path: Path | None = None) -> dict[str, Any]:
        fabric, model, optimizer, norms = self.fabric, self.model, self.optimizer, []
        for step in range(self.state["step"], STEPS):
            generator = torch.Generator().manual_seed(10 * step + fabric.global_rank)
            x, y = torch.randn(BATCH, FEATURES, generator=generator), torch.arange(BATCH) % CLASSES

            def save(step: int = step) -> None:
                if path is not None and step == SAVED:
                    fabric.save(path, self.state | {"step": step})

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
                save()
                return loss

            if moment == "closure":
                optimizer.step(closure)
                continue
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            if moment == "shared":
                fabric.strategy.synchronize(optimizer)
                save()
            if moment == "clipped by value":
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
                save()
            if moment == "clipped":
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
                save()
            optimizer.step()
        state = fabric.strategy.engine.state.state_dict()
        # A run that is saved or resumed also sends what that takes.
        rows, seconds = state["ledger"].pop("rows"), state["ledger"].pop("seconds")
        assert seconds
        sent = {row: rows[row] for row in rows if row in ("gradients", "weight updates")}
        late = norms[SAVED - STEPS :]
        return {
            "weights": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": state,
            "sent": sent,
            "norms": late,
        }

    def resume(self, path: Path) -> "FabricRun":
        self.fabric.load(path, self.state)
        return self


def _fabric(rank: int, folder: Path, name: str) -> dict[str, Any]:
    outside_launcher(rank, 2)
    found = {}
    # Three methods clip each rank's own gradient, by its norm. torch cannot clip sparse gradients.
    clips = {"dgc": 1, "local_adam": 1, "sketched_sgd": 1, "sparse tables": 0}.get(name, 2)
    for moment in FABRIC_MOMENTS[: 2 + clips]:
        path = folder / f"{moment}.ckpt"
        whole = FabricRun(name).train(moment)
        saving = FabricRun(name).train(moment, path)
        resumed = FabricRun(name).resume(path).train(moment)
        found[moment] = differences(whole, saving), differences(whole, resumed)
    return found


@pytest.mark.parametrize("name", FABRIC_METHODS)
def test_fabric_saves_amid_a_step_as_before_it(tmp_path: Path, name: str) -> None:
    for found in run_ranks(tmp_path, 2, _fabric, tmp_path, name, timeout=110):
        for moment, (saving, resumed) in found.items():
            assert saving == [], moment
            assert resumed == [], moment


def _not_saved(rank: int, folder: Path) -> list[str]:
    outside_launcher(rank, 2)
    run, words = FabricRun("gradient_dropping"), []

    def refused(*_: Any) -> None:
        with pytest.raises(RuntimeError) as raised:
            run.fabric.save(folder / "never.ckpt", run.state)
        words.append(str(raised.value))

    run.fabric.backward(run.model(torch.ones(4, FEATURES)).square().sum())
    run.fabric.strategy.synchronize(run.optimizer)
    next(run.model.parameters()).grad.mul_(2)
    refused()
    removed = run.optimizer.optimizer.register_step_post_hook(refused)
    run.optimizer.step()
    removed.remove()
    run.fabric.save(folder / "after.ckpt", run.state)
    assert [path.name for path in folder.glob("*.ckpt")] == ["after.ckpt"]
    return words


def test_fabric_refuses_saves_that_could_not_be_resumed(tmp_path: Path) -> None:
    for changed, in_hook in run_ranks(tmp_path, 2, _not_saved, tmp_path):
        assert "the gradients of Adam had been shared and then changed" in changed
        assert "Save before step() or after it, and not in its hooks" in in_hook


def _saved_twice(rank: int, folder: Path) -> list[str]:
    outside_launcher(rank, 2)
    whole = FabricRun("sparse tables").train("shared")
    FabricRun("sparse tables").train("shared", folder / "one.ckpt")
    run = FabricRun("sparse tables").resume(folder / "one.ckpt")
    # Nothing has happened since: what was exchanged is still to be used.
    run.fabric.save(folder / "two.ckpt", run.state)
    return differences(whole, FabricRun("sparse tables").resume(folder / "two.ckpt").train("shared"))


def test_a_save_of_a_resumed_run_keeps_what_it_has_not_used(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _saved_twice, tmp_path) == [[], []]


def _alone(rank: int, folder: Path) -> list[str]:
    outside_launcher(rank, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = FabricRun("sparse tables", devices=1).resume(folder / "two ranks.ckpt")
        start = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        run.optimizer.zero_grad()
        run.fabric.backward(run.model(torch.ones(4, FEATURES)).sum() * 0)
        run.optimizer.step()
    moved = {name: start[name] - weight for name, weight in run.model.state_dict().items()}
    assert all(change.any() for change in moved.values())
    return [str(each.message) for each in caught if "was saved by 2 processes" in str(each.message)]


def test_another_number_of_ranks_uses_what_was_exchanged(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        outside_launcher(rank, 2)
        FabricRun("sparse tables").train("shared", tmp_path / "two ranks.ckpt")

    run_ranks(tmp_path, 2, save)
    ((words,),) = run_ranks(tmp_path, 1, _alone, tmp_path)
    assert "two ranks.ckpt" in words


def _loads(rank: int, folder: Path) -> list[int]:
    outside_launcher(rank, 2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(methods.dgc(0.1)))
    fabric.launch()
    module = nn.Linear(6, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    state = {"model": model, "optimizer": optimizer}

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(4, 6)).square().sum())
            optimizer.step()

    train()
    fabric.save(folder / "three.ckpt", state)
    steps = [fabric.strategy.ledger.steps]
    sent = fabric.strategy.ledger.sent_bytes
    for _ in range(3):
        fabric.load(folder / "three.ckpt", state)
        steps.append(fabric.strategy.ledger.steps)
        assert fabric.strategy.ledger.sent_bytes == sent
    train()
    return [*steps, fabric.strategy.ledger.steps]


def test_loading_replaces_what_the_ledger_has_counted(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _loads, tmp_path) == [[3, 3, 3, 3, 6]] * 2


def _meets(rank: int) -> list[bool]:
    wire, found = Wire(), []
    # All come; one comes when the others have left; all come again.
    found.append(wire.meet("first", 20))
    if rank == 2:
        torch.distributed.barrier()
    found.append(wire.meet("second", 0.01))
    if rank != 2:
        torch.distributed.barrier()
    found.append(wire.meet("third", 20))
    return found


def test_ranks_meet_or_do_not(tmp_path: Path) -> None:
    for found in run_ranks(tmp_path, 3, _meets):
        assert found == [True, False, True]
