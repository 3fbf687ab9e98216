"""What a strategy writes beside a checkpoint, and takes over again; here with a strategy of nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.frontends.saving import SavingMixin
from lightning_sparsecomm.methods import dense, dgc, gradient_dropping
from lightning_sparsecomm.run.contents import fingerprint_of
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.rank_files import RankFiles
from lightning_sparsecomm.sharing import Method
from tests.run.test_rank_files import Plugin
from tests.run.training import backward, step

Make = Callable[..., "Strategy"]
CHECKPOINT = {"epoch": 1}


class Strategy(SavingMixin):
    """Saves and reads, and trains one module."""

    def __init__(self, method: Method, wire: Wire, steps: int = 0) -> None:
        super().__init__()
        self.method, self.wire = method, wire
        self.checkpoint_io = Plugin()
        self.global_rank, self.world_size, self.root_device = 0, 1, torch.device("cpu")
        torch.manual_seed(1)
        self.module = nn.Linear(2, 3)
        self._engine: Engine | None = Engine(method, wire)
        self._engine.registry.add_module(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self._engine.register(self.optimizer)
        self.train(steps)

    def train(self, steps: int = 1) -> None:
        assert self._engine is not None
        for _ in range(steps):
            self.optimizer.zero_grad()
            backward(self._engine, self.module)
            step(self._engine, self.optimizer)

    def write(self, path: Path, to_resume: bool = True, together: bool = True) -> None:
        self._save(path, CHECKPOINT, {}, to_resume, lambda where: torch.save(CHECKPOINT, where), together)

    def found(self, path: Path) -> int:
        return len(RankFiles(path, self.checkpoint_io).found())

    def resume(self, path: Path) -> str:
        return self._load_state(path, self._read_state(path, fingerprint_of(CHECKPOINT), None, self.wire))


@pytest.fixture
def make(wire: Wire) -> Iterator[Make]:
    made = []

    def strategy(method: Method, steps: int = 0) -> Strategy:
        made.append(Strategy(method, wire, steps))
        return made[-1]

    yield strategy
    for each in made:
        each._end()


def test_what_was_written_is_taken_over(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    first = make(gradient_dropping(0.3), steps=3)
    first.write(path)
    resumed = make(gradient_dropping(0.3))
    assert resumed.resume(path) == f"sparsecomm: resumed from {path}, with what ranks had not sent yet"
    tracked = resumed._engine.registry.optimizers[0]
    assert tracked.steps == 3
    (share,) = tracked.shares.values()
    (saved,) = first._engine.registry.optimizers[0].shares.values()
    kept = "GradientSync.ErrorFeedback"
    for name, held in saved.state_dict()[kept].items():
        assert torch.equal(share.state_dict()[kept][name], held)


def test_earlier_files_go_with_the_next_save(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    strategy = make(gradient_dropping(0.3), steps=1)
    for _ in range(2):
        strategy.write(path)
        assert strategy.found(path) == 1
        strategy.train()
    strategy._remove(path, path.unlink)
    assert not list(tmp_path.glob("last*"))


def test_a_checkpoint_after_the_run_holds_its_last_state(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    strategy = make(gradient_dropping(0.3), steps=2)
    strategy._end()
    strategy.write(path)
    resumed = make(gradient_dropping(0.3))
    resumed.resume(path)
    assert resumed._engine.registry.optimizers[0].steps == 2


def test_weights_alone_are_saved_by_rank_0_alone(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ddp. Saves of all ranks count on alike."""
    strategy = make(gradient_dropping(0.3), steps=1)
    monkeypatch.setattr(Wire, "all_gather", lambda *_: pytest.fail("a collective"))
    strategy.write(tmp_path / "weights.ckpt", to_resume=False)
    assert (tmp_path / "weights.ckpt").exists()
    monkeypatch.undo()
    strategy.write(tmp_path / "last.ckpt")
    (file,) = RankFiles(tmp_path / "last.ckpt", strategy.checkpoint_io).found()
    assert file.save % 2**32 == 1


@pytest.mark.parametrize("case", ["weights alone", "nothing to hold", "no run"])
def test_files_that_no_longer_belong_to_a_checkpoint_are_removed(make: Make, tmp_path: Path, case: str) -> None:
    path = tmp_path / "last.ckpt"
    make(gradient_dropping(0.3), steps=1).write(path)
    strategy = make(dense() if case == "nothing to hold" else gradient_dropping(0.3))
    if case == "no run":
        strategy._engine.close()
        strategy._engine = None
    assert strategy.found(path) == 1
    strategy.write(path, case != "weights alone")
    assert strategy.found(path) == 0


def test_a_checkpoint_without_files_is_warned_of(make: Make, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"resuming from .*last.ckpt with empty memories.*there is no .*beside it"):
        assert not make(gradient_dropping(0.3)).resume(tmp_path / "last.ckpt")
    # There is nothing to lose.
    make(dense()).resume(tmp_path / "last.ckpt")


def test_only_rank_0_warns_where_there_are_no_files(make: Make, tmp_path: Path) -> None:
    strategy = make(gradient_dropping(0.3))
    strategy.global_rank = 1
    strategy.resume(tmp_path / "last.ckpt")


def test_all_ranks_warn_of_a_damaged_file(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    make(gradient_dropping(0.3), steps=1).write(path)
    (file,) = Path(f"{path}.sparsecomm").iterdir()
    content = torch.load(file)
    content["state"]["streams"][0]["held"]["GradientSync.ErrorFeedback"]["weight"][0, 0] += 1
    torch.save(content, file)
    for rank in range(2):
        strategy = make(gradient_dropping(0.3))
        strategy.global_rank = rank
        with pytest.warns(UserWarning, match="with empty memories.*is damaged: its checksum does not fit") as words:
            strategy.resume(path)
        assert len(words) == 1
        assert strategy._engine.residual_norm() == 0


def test_a_save_amid_a_step_is_said(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    strategy = make(gradient_dropping(0.3), steps=1)
    strategy._engine.synchronize(strategy.optimizer)
    # Gradients that are as they were shared are saved with the rest.
    strategy.module.weight.grad.mul_(2)
    strategy.write(path, together=False)
    with pytest.warns(UserWarning, match="saved after an error in the middle of an optimizer step: what ranks had"):
        make(gradient_dropping(0.3)).resume(path)


def test_what_another_method_has_no_place_for_is_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    make(dgc(0.3, warmup_steps=0), steps=2).write(path)
    with pytest.warns(
        UserWarning,
        match=r"this run has no place for .*MomentumCorrection of 1 parameters.*gradient_dropping\(density=0\.3\)",
    ):
        make(gradient_dropping(0.3)).resume(path)


def test_a_world_of_another_size_takes_the_mean(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for rank in range(2):
        strategy = make(gradient_dropping(0.3), steps=2)
        strategy.global_rank, strategy.world_size = rank, 2
        strategy._engine.agreement.run = 5
        strategy.write(path, together=False)
    resumed = make(gradient_dropping(0.3))
    with pytest.warns(UserWarning, match="saved by 2 processes, and these are 1"):
        resumed.resume(path)
    assert resumed._engine.registry.optimizers[0].steps == 2
