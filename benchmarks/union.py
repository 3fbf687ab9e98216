"""How many positions ranks select together, as a multiple of what one of them selects.

Trains tasks of `tasks.py` for 300 steps by SGD, with gradient dropping at each density, and counts in some steps which
positions the first 2, 4, 8 … ranks have selected. 1 says that all select the same, and the number of ranks says that no
two select the same position. Prints a Markdown table.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from defaults import Learner
from tasks import RATES, TASKS
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import Channel, GradientSync, Method, SparseCommStrategy
from lightning_sparsecomm.basis import Round, SparseVector, Vector, Wire
from lightning_sparsecomm.channel import ErrorFeedback
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import Exchanged, Gather

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder, quieten

STEPS, BATCH = 300, 32
NOTED = (5, 30, 100, 200, 290)


class Counting(Gather):
    """A gather that writes down how many positions ranks have selected together."""

    def __init__(self, density: float, path: Path) -> None:
        super().__init__(SparseCodec(TopK(density)))
        self.path, self.found = path, {}

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        if context.step in NOTED and wire.world_size > 1:
            sent = exchanged.sent
            marked = torch.zeros(context.layout.size, dtype=torch.uint8)
            marked[sent.indices if isinstance(sent, SparseVector) else sent.nonzero().view(-1)] = 1
            union = wire.all_gather(marked).cummax(0).values.sum(1, dtype=torch.int64).tolist()
            ranks = [2**power for power in range(1, wire.world_size.bit_length())]
            self.found[context.step] = {count: union[count - 1] / max(1, union[0]) for count in ranks}
            if wire.rank == 0:
                # Forked ranks return nothing.
                self.path.write_text(json.dumps(self.found))
        return exchanged


def unions(task: str, density: float, options: argparse.Namespace) -> dict[int, dict[int, float]]:
    """For each step that is noted, by number of ranks."""
    data = TASKS[task].read(options.data_dir, False)
    pl.seed_everything(0, verbose=False)
    learner = Learner(TASKS[task].network(data.classes), "sgd", RATES["sgd"][task], STEPS, TASKS[task].loss)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "unions.json"
        method = Method([GradientSync(Channel(Counting(density, path), [ErrorFeedback()]))])
        pl.Trainer(
            accelerator="cpu",
            devices=options.processes,
            strategy=SparseCommStrategy(method, start_method="fork"),
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(learner, DataLoader(TensorDataset(*data.train), BATCH, shuffle=True))
        found = json.loads(path.read_text())
    return {int(step): {int(ranks): times for ranks, times in each.items()} for step, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["convolution", "gpt"])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.001, 0.01, 0.05])
    parser.add_argument("--processes", type=at_least(2), default=8)
    options = parser.parse_args()
    quieten()
    warnings.filterwarnings("ignore", message=".*does not end before.*|.*sync_dist.*|.*num_workers.*")
    ranks = [2**power for power in range(1, options.processes.bit_length())]
    print("| task | density | step | " + " | ".join(f"{each} ranks" for each in ranks) + " |")
    print("|---|---:|---:|" + "---:|" * len(ranks))
    for task in options.tasks:
        for density in options.densities:
            for step, found in unions(task, density, options).items():
                cells = " | ".join(f"{found[each]:.2f}" for each in ranks)
                print(f"| {task} | {density:.1%} | {step} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
