"""What short trainings select: the positions and values that rank 0 of 4 sends, with their layout."""

import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from defaults import Learner
from tasks import RATES, TASKS
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import SparseCommStrategy, methods
from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.basis.layout import SparseVector
from lightning_sparsecomm.codecs import IndexCoding, ValueCodec, encode_sparse
from lightning_sparsecomm.sharing import Method

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import quieten

PROCESSES, BATCH, STEPS = 4, 32, 300
EXCHANGES = (5, 30, 100, 200, 280)
"""Those that are noted, of the 300 of a training that exchanges in each step."""


class Selection(NamedTuple):
    """What a rank sends in one exchange.

    Attributes:
        indices: Sorted positions.
        values: Their values, not yet rounded.
        size: The length of the vector.
        sizes: Those of its tensors.
    """

    indices: Tensor
    values: Tensor
    size: int
    sizes: list[int]


def selections(task: str, density: float | None, data_dir: Path, folder: Path) -> list[Selection]:
    """Trains for 300 steps, and returns what was selected in some of them; kept in `folder` for the next call.

    The method is dgc's part of `strategy="sparsecomm"` with this density. None stands for `sparse_loco(every=10)` with
    AdamW.
    """
    path = folder / f"{task}-{'sparse_loco' if density is None else density}.pt"
    if not path.exists():
        if density is None:
            _train(
                task,
                "adamw",
                methods.sparse_loco(every=10),
                tuple(each // 10 + 1 for each in EXCHANGES),
                data_dir,
                path,
            )
        else:
            method = methods.dgc(density, warmup_steps=0, scope="balanced", values="three_bit", positions="short")
            _train(task, "sgd", method, EXCHANGES, data_dir, path)
    return [Selection(*each) for each in torch.load(path)]


def _train(task: str, optimizer: str, method: Method, noted: tuple[int, ...], data_dir: Path, path: Path) -> None:
    found: list[tuple[Tensor, Tensor, int, list[int]]] = []
    count = 0

    def noting(vector: SparseVector, layout: Layout, values: ValueCodec, indices: IndexCoding) -> Tensor:
        nonlocal count
        count += 1
        if dist.get_rank() == 0 and count in noted:
            sizes = [segment.size for segment in layout.segments]
            found.append((vector.indices.clone(), vector.values.clone(), vector.size, sizes))
            # Forked ranks return nothing.
            torch.save(found, path)
        return encode_sparse(vector, layout, values, indices)

    quieten()
    warnings.filterwarnings("ignore", message=".*does not end before.*|.*sync_dist.*|.*num_workers.*")
    data = TASKS[task].read(data_dir, False)
    pl.seed_everything(0, verbose=False)
    learner = Learner(TASKS[task].network(data.classes), optimizer, RATES[optimizer][task], STEPS, TASKS[task].loss)
    with mock.patch("lightning_sparsecomm.codecs.sparse.encode_sparse", noting):
        pl.Trainer(
            accelerator="cpu",
            devices=PROCESSES,
            strategy=SparseCommStrategy(method, start_method="fork"),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(learner, DataLoader(TensorDataset(*data.train), BATCH, shuffle=True))
