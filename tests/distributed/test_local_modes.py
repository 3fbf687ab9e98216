"""Replicas that drift: averaged now and then, and one model whenever they are validated or saved, and at the end."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm import ParameterAveraging
from lightning_sparsecomm.methods import dgc, federated_averaging, gradient_dropping
from lightning_sparsecomm.sharing import Method
from tests import laws
from tests.distributed.scenarios import FEATURES, Classifier, Scenario, Shown, fit

PARTIAL = {"density": 0.05, "local": "partial"}


class Measured(Classifier):
    """Validates. Each rank notes the sum of the weights in training and in validation."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def total(self) -> float:
        return float(sum(parameter.detach().double().sum() for parameter in self.parameters()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.trained.append(self.total())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.total())

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(2, FEATURES), batch_size=1)  # type: ignore[arg-type]


class Notes(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        notes = {
            "trained": pl_module.trained,
            "validated": pl_module.validated,
            "weights": pl_module.state_dict(),
            "parameters_bytes": strategy.ledger.handed_bytes("parameters"),
        }
        torch.save(notes, self.folder / f"notes-{trainer.global_rank}.pt")


def measured(folder: Path, method: Method, *callbacks: pl.Callback, **options: Any) -> list[dict[str, Any]]:
    scenario = Scenario(Measured, steps=10)
    options = {"limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    fit(folder, scenario, 2, method, (Notes(folder), *callbacks), **options)
    return [torch.load(folder / f"notes-{rank}.pt") for rank in range(2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("local", ["sum", "partial", "error"])
def test_measuring_and_saving_never_change_training(tmp_path: Path, local: str) -> None:
    method = gradient_dropping(0.05, local=local, average_every=4)
    plain = measured(tmp_path / "plain", method)
    often = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 2, "enable_checkpointing": True}
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    watched = measured(tmp_path / "watched", method, saver, **often)
    for ours, theirs in zip(watched, plain, strict=True):
        assert ours["trained"] == theirs["trained"]
    # Buffers too, on rank 0: on the others, ddp overwrites them with rank 0's whenever it validates.
    laws.bit_equal(watched[0], plain[0])
    # Ranks are equal after every fourth step only. They validate one model, and end with one.
    assert [a == b for a, b in zip(plain[0]["trained"], plain[1]["trained"])] == [i % 4 == 3 for i in range(10)]
    assert watched[0]["validated"] == watched[1]["validated"]
    laws.replicas_are_equal(plain)
    # The sanity check finds replicas that are still equal, and averages nothing.
    averages = 10 // 4 + 1
    parameters = 4 * sum(p.numel() for p in Measured().parameters())
    assert plain[0]["parameters_bytes"] == averages * parameters + asked_at_the_end(Measured())
    assert len(watched[0]["validated"]) == 1 + 10

    # A checkpoint holds the average of what both ranks continue with.
    for path in (tmp_path / "saved").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=False)
        state, step = checkpoint["state_dict"], checkpoint["global_step"]
        total = float(sum(state[name].double().sum() for name, _ in Measured().named_parameters()))
        expected = (plain[0]["trained"][step - 1] + plain[1]["trained"][step - 1]) / 2
        assert total == pytest.approx(expected, abs=1e-5)
    assert len(list((tmp_path / "saved").glob("*.ckpt"))) == 10


def test_buffers_are_averaged_if_asked_for(tmp_path: Path) -> None:
    for buffers in (False, True):
        method = gradient_dropping(**PARTIAL, average_every=2, average_buffers=buffers)
        # Otherwise ddp broadcasts them from rank 0 before every forward pass.
        folder = tmp_path / str(buffers)
        scenario = Scenario(Measured, strategy={"broadcast_buffers": False}, steps=4)
        fit(folder, scenario, 2, method, (Notes(folder),), limit_val_batches=0)
        ranks = [torch.load(folder / f"notes-{rank}.pt")["weights"] for rank in range(2)]
        running = [name for name in ranks[0] if "running" in name]
        assert running
        assert all(torch.equal(ranks[0][name], ranks[1][name]) == buffers for name in running)


def test_parameter_averaging_with_any_method(tmp_path: Path) -> None:
    """It replaces the method's own averaging. Replicas that are equal stay equal."""
    apart = gradient_dropping(**PARTIAL, average_every=1000)
    ranks = measured(tmp_path / "apart", apart, ParameterAveraging(every=5))
    assert [a == b for a, b in zip(ranks[0]["trained"], ranks[1]["trained"])] == [i % 5 == 4 for i in range(10)]
    together = measured(tmp_path / "together", dgc(0.1, warmup_steps=0, follow_rate=False), ParameterAveraging(every=3))
    assert together[0]["trained"] == together[1]["trained"]
    # Replicas that cannot differ are not averaged again at the end.
    assert together[0]["parameters_bytes"] == 3 * 4 * sum(p.numel() for p in Measured().parameters())


def test_parameter_averaging_leaves_alone_what_exchanges_set(tmp_path: Path, capfd: Any) -> None:
    """Else the next exchange would take the averages for weights that the user has set, and share nothing."""
    method = federated_averaging(every=4)
    plain = measured(tmp_path / "plain", method)
    beside = measured(tmp_path / "beside", method, Shown(), ParameterAveraging(every=3))
    assert [ours["trained"] for ours in beside] == [theirs["trained"] for theirs in plain]
    count = len(list(Measured().parameters()))
    assert capfd.readouterr().err.count(f"ParameterAveraging leaves {count} of {count} parameters alone") == 1


def asked_at_the_end(model: pl.LightningModule) -> int:
    """Bytes with which ranks ask, at the end, whether anyone has changed a tensor: four for each."""
    floating = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    return 4 * len(floating)


class TwoOptimizers(pl.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(FEATURES, 4), nn.Linear(4, 1)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if index <= batch_idx % 2:
                optimizer.zero_grad()
                self.manual_backward(self.parts[1](self.parts[0](batch[0]).tanh()).square().mean())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in self.parts]


def test_each_optimizer_has_its_own_count_of_steps(tmp_path: Path) -> None:
    scenario = Scenario(TwoOptimizers, steps=9)
    method = gradient_dropping(0.2, local="partial", average_every=2)
    ranks = fit(tmp_path, scenario, 2, method)
    # Six batches: six steps of the first optimizer, three of the second. Both average once more at the end.
    first, second = (4 * sum(p.numel() for p in part.parameters()) for part in TwoOptimizers().parts)
    assert ranks[0]["ledger"].handed_bytes("parameters") == (3 + 1) * first + (1 + 1) * second


class SavesAlone(pl.Callback):
    """Saves on rank 0 alone, as it does after an error, when the other ranks may never join."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.is_global_zero:
            trainer.state.status = TrainerStatus.INTERRUPTED
            state = trainer.strategy.lightning_module_state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in pl_module.state_dict().items())
            trainer.state.status = TrainerStatus.RUNNING


def test_a_checkpoint_after_an_error_on_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    measured(tmp_path, gradient_dropping(**PARTIAL), SavesAlone())
