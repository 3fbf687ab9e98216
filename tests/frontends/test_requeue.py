"""SLURM's automatic requeue: the job is requeued once its checkpoint is whole, and goes on from there to the bit."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader

from lightning_sparsecomm import methods
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.frontends.fitting import Model

RANKS, STEPS = 2, 4  # Of an epoch.

# In the place of SLURM's command: notes how it was called, and which checkpoints and files of ranks are there then.
SCONTROL = f"""#!{sys.executable}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
found = sorted(str(path.relative_to(here)) for path in here.rglob("hpc_ckpt_*") if path.is_file())
ranks = len(list(here.glob("hpc_ckpt_1.ckpt.sparsecomm/rank_*")))
with open(here / "called", "a") as calls:
    print(json.dumps([sys.argv[1:], found, ranks]), file=calls)
"""


class Signalled(Model):
    """Gets SLURM's signal in the backward pass of one step."""

    def __init__(self, at: int) -> None:
        super().__init__(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.at = at

    def on_after_backward(self) -> None:
        if self.global_step == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


def _fit(rank: int, path: Path, method: Method, at: int) -> dict[str, Any]:
    job = {"JOB_ID": 17, "JOB_NAME": "train", "PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": RANKS}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in job.items()})
    os.environ.update({"SLURM_NTASKS_PER_NODE": str(RANKS), "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"})
    # Lightning leaves a signal alone that has a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    model = Signalled(at)
    trainer = pl.Trainer(
        default_root_dir=path,
        strategy=SparseCommStrategy(method),
        devices=RANKS,
        max_epochs=3,
        enable_checkpointing=False,
        plugins=[SLURMEnvironment()],
        **QUIET,
    )
    batches = torch.randn(4 * RANKS * 4, 6, generator=torch.Generator().manual_seed(3))
    trainer.fit(model, DataLoader(batches, batch_size=4))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "files"), [(methods.dgc(0.1, warmup_steps=0), RANKS), (methods.dense(), 0)], ids=["dgc", "dense"]
)
def test_a_job_is_requeued_when_its_checkpoint_is_whole(tmp_path: Path, method: Method, files: int) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    # The last step of the first epoch: elsewhere, a plain DataLoader would begin its epoch anew.
    unstopped = run_ranks(tmp_path, RANKS, _fit, tmp_path, method, STEPS - 1)
    (call,) = (tmp_path / "called").read_text().splitlines()
    assert json.loads(call) == [["requeue", "17"], ["hpc_ckpt_1.ckpt"], files]
    if files:
        # Lightning finds that checkpoint by itself. ddp's, taken in the backward pass, would repeat that step.
        resumed = run_ranks(tmp_path, RANKS, _fit, tmp_path, method, -1)
        for ended, again in zip(unstopped, resumed):
            assert all((ended[name] == again[name]).all() for name in ended)
