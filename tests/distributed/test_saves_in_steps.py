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


def _fabric(rank: int, folder: Path) -> str:
    outside_launcher(rank, 2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(methods.dgc(0.1)))
    fabric.launch()
    module = nn.Linear(6, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    fabric.backward(model(torch.ones(4, 6)).square().sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(RuntimeError) as raised:
        fabric.save(folder / "amid.ckpt", state)
    optimizer.step()
    fabric.save(folder / "after.ckpt", state)
    assert not (folder / "amid.ckpt").exists()
    assert (folder / "after.ckpt").exists()
    return str(raised.value)


def test_fabric_says_that_it_cannot_save_amid_a_step(tmp_path: Path) -> None:
    for words in run_ranks(tmp_path, 2, _fabric, tmp_path):
        assert "Save after optimizer.step(), or before clip_gradients" in words


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
