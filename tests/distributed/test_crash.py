"""All ranks, or one, are killed at random moments and resumed. The weights end as in a run that was never killed."""

import os
import random
import re
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy

from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import FORK, QUIET
from tests.distributed.test_resume import BATCH, CASES, CLASSES, FEATURES, Network, outside_launcher, ranks_of

# The number of steps is no multiple of those between checkpoints, so that a resumed run always has steps left. Without
# any, all ranks would have rank 0's buffers, as under ddp, and not those of their own last forward pass.
STEPS, EPOCH = 49, 30

# dense() writes no files. Lightning's own stochastic weight averaging is not resumed exactly, even in one process, from
# a checkpoint of an epoch's last step, or where a run is resumed twice before averaging begins.
LEFT_OUT = ("dense", "local gradients, stochastic average")


# Lightning's own strategy, with the model of this case.
DDP = "dense"


class Loader:
    """A rank's own batches. It resumes within an epoch, as torchdata's StatefulDataLoader does."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.position = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.position < EPOCH:
            generator = torch.Generator().manual_seed(self.world_size * self.position + self.rank)
            self.position += 1
            x = torch.randn(BATCH, FEATURES, generator=generator)
            yield x, torch.randint(CLASSES, (BATCH,), generator=generator)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Progress(pl.Callback):
    """Writes the current step to a file, for the process that kills the ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            self.path.write_text(str(trainer.global_step))


class Overwriting(Checkpoint):
    """Saves to one path after each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def _rank(rank: int, folder: Path, name: str, store: Path, resume: Path | None, one: bool) -> None:
    world_size = ranks_of(name)
    outside_launcher(rank, world_size)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    method, model, callbacks = CASES[name]
    strategy = SparseCommStrategy(method(), find_unused_parameters=True)
    if name == DDP:
        strategy = DDPStrategy(find_unused_parameters=True)
    torch.manual_seed(7)
    checkpoint: Checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    if one:
        checkpoint = Overwriting(folder / "last.ckpt")
    trainer = pl.Trainer(
        devices=world_size,
        strategy=strategy,
        max_steps=STEPS * (2 if model.get("two") else 1),
        use_distributed_sampler=False,
        callbacks=[checkpoint, Progress(folder / "progress"), *callbacks()],
        **QUIET,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*(empty memories|is lost).*")
        trainer.fit(Network(**model), Loader(rank, world_size), ckpt_path=resume)
    state = {key: tensor.numpy() for key, tensor in trainer.lightning_module.state_dict().items()}
    np.savez(folder / f"rank_{rank}", **state)
    os._exit(0)


def _train(folder: Path, name: str, resume: Path | None, kill_at: float | None, victim: int | None = None) -> bool:
    """Begins or resumes a training, and kills it at step `kill_at`, a fraction included. Whether it ended by itself.

    If only one rank is the `victim`, the others end by themselves, and one path is overwritten after each batch.
    """
    (folder / "progress").write_text("0")
    store = folder / f"store-{os.urandom(4).hex()}"
    one = victim is not None
    ranks = [
        FORK.Process(target=_rank, args=(rank, folder, name, store, resume, one)) for rank in range(ranks_of(name))
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 60
    try:
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < deadline, "the ranks hang"
            if kill_at is not None and int((folder / "progress").read_text() or 0) >= int(kill_at):
                time.sleep(0.02 * (kill_at % 1))
                break
            time.sleep(0.001)
    finally:
        ended = not any(process.is_alive() for process in ranks)
        if victim is not None and not ended:
            ranks[victim].kill()
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in ranks:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    return ended and all(process.exitcode == 0 for process in ranks)


def _last(folder: Path, name: str) -> Path | None:
    """The last checkpoint that is complete: every rank has written its file; or with ddp, it is there."""
    steps = {}
    for path in folder.glob("step=*.ckpt"):
        step = re.fullmatch(r"step=(\d+)\.ckpt", path.name)
        files = list(Path(f"{path}.sparsecomm").glob("rank_*.pt"))
        if step is not None and (len(files) == ranks_of(name) or name == DDP):
            steps[int(step[1])] = path
    return steps[max(steps)] if steps else None


def _weights(folder: Path, name: str) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / f"rank_{rank}.npz")) for rank in range(ranks_of(name))]


def _killed_and_not(tmp_path: Path, name: str, kills: int, one: bool = False) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert _train(whole, name, None, None)
    optimizer_steps = STEPS * (2 if CASES[name][1].get("two") else 1)
    moments = random.Random(name)
    resumed = 0
    last = (lambda folder, _: next(folder.glob("last.ckpt"), None)) if one else _last
    for count in range(kills):
        resume = last(broken, name)
        resumed += resume is not None
        # Later each time, so that training makes progress.
        at = optimizer_steps * (count + moments.random()) / (kills + 1)
        victim = moments.randrange(ranks_of(name)) if one else None
        if _train(broken, name, resume, at + moments.random() / 2, victim):
            # A busy machine may not let us kill them in time.
            assert count > kills / 2, "the ranks ended before most of the moments to kill them"
            break
    else:
        assert _train(broken, name, last(broken, name), None)
    assert resumed
    for ours, theirs in zip(_weights(broken, name), _weights(whole, name), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("name", [pytest.param("dgc, summed", marks=pytest.mark.slow), "sbc"])
def test_killed_some_times(name: str, tmp_path: Path) -> None:
    _killed_and_not(tmp_path, name, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
def test_killed_at_twenty_steps(name: str, tmp_path: Path) -> None:
    _killed_and_not(tmp_path, name, 20)


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        pytest.param("dgc", 2, marks=pytest.mark.slow),
        *(pytest.param(name, 40, marks=pytest.mark.slow) for name in ("dgc", "dgc, summed", "sbc", "diloco")),
    ],
)
@pytest.mark.timeout(900)
def test_one_rank_killed_while_one_path_is_overwritten(name: str, kills: int, tmp_path: Path) -> None:
    _killed_and_not(tmp_path, name, kills, one=True)
