"""One training run of several clients, and how its results are printed."""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from clients import ClientData, Network
from pytorch_lightning.strategies import DDPStrategy
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_sparsecomm import Method, NonFiniteGradientError
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

POINTS = 10  # of a run at which quality is measured


def fit(
    method: Method | None,
    seed: int,
    network: Callable[[], Network],
    data: ClientData,
    recorder: Callable[[Path], pl.Callback],
    clients: int,
    iterations: int,
    clip: float | None,
) -> dict[str, Any] | None:
    """Trains in one process for each client, and measures quality `POINTS` times.

    Args:
        method: How clients communicate; None for ddp.
        seed: Seed of the initial weights, and of the method.
        network: Makes the network.
        data: The clients' data.
        recorder: Makes a callback that measures; rank 0 writes its JSON to the path given to `recorder`, since the
            strategy starts processes.
        clients: Number of processes.
        iterations: Optimizer steps of each client.
        clip: Largest norm of a gradient; None for no clipping.

    Returns:
        What the recorder wrote; None if the training diverged.
    """
    strategy: DDPStrategy = (
        DDPStrategy(start_method="fork")
        if method is None
        else SparseCommStrategy(method=method, seed=seed, start_method="fork")
    )
    pl.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=clients,
            max_steps=iterations,
            max_epochs=-1,
            gradient_clip_val=clip,
            val_check_interval=math.ceil(iterations / POINTS),
            check_val_every_n_epoch=None,
            callbacks=[recorder(path)],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        try:
            trainer.fit(network(), data)
        except ProcessRaisedException as error:
            # Divergence is a result; every other error is not.
            if NonFiniteGradientError.__name__ not in str(error):
                raise
            return None
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def aligned(lines: list[list[str]]) -> str:
    """A table for a terminal: the first column aligned to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "    ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def times(ratios: Iterable[float]) -> str:
    """The mean ratio, with one decimal below 1,000."""
    mean = statistics.mean(ratios)
    return f"{mean:,.{1 if mean < 1000 else 0}f} x"
