"""A training that is started again when a node is lost or comes back, each time by the same command on each node:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc-per-node=1 --max-restarts=100 \
        --rdzv-backend=c10d --rdzv-id=digits --rdzv-endpoint=HOST:29400 examples/restarts.py

It resumes from the last checkpoint, in a folder that all nodes must be able to read and write. docs/guide/clusters.md
has the options; examples/cluster/ has files that start it by SLURM and by Kubernetes.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
from classifier import Classifier
from command_line import at_least, folder
from images import Images
from pytorch_lightning.callbacks import ModelCheckpoint

import lightning_sparsecomm  # noqa: F401  (registers "sparsecomm")


def world() -> tuple[int, int]:
    """How many processes each node has, and how many nodes there are this time."""
    for processes, nodes in (("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), ("SLURM_NTASKS_PER_NODE", "SLURM_NNODES")):
        if processes in os.environ and nodes in os.environ:
            return int(os.environ[processes]), int(os.environ[nodes])
    raise SystemExit("Start this by torchrun, or by srun with --ntasks-per-node.")


def train(checkpoints: Path, steps: int, every: int, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Trains until step `steps`, from the newest checkpoint if there is one, and saves in every `every`-th step."""
    processes, nodes = world()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        num_nodes=nodes,
        strategy="sparsecomm",
        max_steps=steps,
        # One file, last.ckpt, which is replaced once the new one is whole.
        callbacks=[
            ModelCheckpoint(checkpoints, "last", every_n_train_steps=every, enable_version_counter=False),
            *callbacks,
        ],
        # Where Lightning saves, as hpc_ckpt_1.ckpt, before SLURM ends the job.
        default_root_dir=checkpoints,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = sorted(checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    pl.seed_everything(0, verbose=False)
    trainer.fit(Classifier(), Images(), ckpt_path=saved[-1] if saved else None)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=folder, default=Path("checkpoints"), help="a folder that all nodes share")
    parser.add_argument("--steps", type=at_least(1), default=1000)
    parser.add_argument("--every", type=at_least(1), default=50, help="steps between two checkpoints")
    options = parser.parse_args()
    trainer = train(options.checkpoints, options.steps, options.every)
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics.get("accuracy", float("nan")))
        print(f"accuracy {accuracy:.1%} after {trainer.global_step} steps, on {trainer.num_nodes} nodes in the end")
