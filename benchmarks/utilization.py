"""How much of the time is training, where weights are exchanged every few steps over a slow network.

    python benchmarks/utilization.py

Each row trains ten million parameters, in twelve equal layers, on hosts of the lab (see `network.py`), with 30 steps
between two exchanges of a parameter. A step sleeps until it has taken `--step-ms`, as if an accelerator computed it, so
that hosts which share two cores do not wait for each other's training; what exchanges compute they do share. After one
period, `--periods` are measured, without the end of training, where all wait for what is left. Utilization is the time
that as many steps take without exchanges, by the time that they take.

Streamed rows exchange the model in parts, and use what they get some steps later. The last two do so in each step, with
a half of the model and with a quarter. `torchft` is torchft's own DiLoCo.
Peak is the most that a host has sent or received within a second, by its network device, the largest of all hosts.
"""

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torchft_diloco
from cable import Cable
from defaults import method_of
from lighthouses import lighthouse
from network import DEVICE, FORK, Lab, address
from runs import COMMIT, load, made_with, save, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import SparseCommStrategy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, quieten

ALONE = "without exchanges"
EVERY, PARTS, DELAY = 30, 3, 5
STREAMED = f"every={EVERY}, fragments={PARTS}, delay={DELAY}"
HALVES = "sparse_loco(every=2, density=0.25, decay=1.0, fragments=2, delay=1)"
QUARTERS = "sparse_loco(every=4, density=0.25, decay=1.0, fragments=4, delay=3)"
ROWS = (
    ALONE,
    "torchft",
    "torchft streamed",
    f"diloco(every={EVERY})",
    f"streaming_diloco({STREAMED})",
    f"sparse_loco(every={EVERY})",
    f"sparse_loco({STREAMED})",
    HALVES,
    QUARTERS,
)
NETWORKS = ("50mbit", "30mbit, rtt 100ms")
LAYERS = 12
PORT = 29510
LONGEST_SECONDS = 570.0
WINDOW_SECONDS, LOOK_SECONDS = 1.0, 0.05

Run = dict[str, Any]


class Layers(pl.LightningModule):
    """Square matrices, one after another, by SGD; a step takes at least as long as told."""

    def __init__(self, parameters: int, step_seconds: float) -> None:
        super().__init__()
        self.side = round((parameters / LAYERS) ** 0.5)
        self.network = nn.Sequential(*(nn.Linear(self.side, self.side, bias=False) for _ in range(LAYERS)))
        self.step_seconds = step_seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean square of what it makes of noise."""
        begin = time.monotonic()
        loss: Tensor = self.network(batch[0]).square().mean()
        time.sleep(max(0.0, self.step_seconds - (time.monotonic() - begin)))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def data(self, count: int) -> "DataLoader[tuple[Tensor, ...]]":
        """Batches of one sample."""
        return DataLoader(TensorDataset(torch.randn(count, 1).expand(-1, self.side)))


class Ends(pl.Callback):
    """Notes when steps end, and when what is measured begins and ends, after so many `periods`."""

    def __init__(self, peak: "Peak", periods: int) -> None:
        self.times: list[float] = []
        self._peak, self._last = peak, EVERY * (1 + periods)

    def on_train_batch_end(self, *_: Any) -> None:
        """After each step."""
        self.note()

    def note(self) -> None:
        """A step has ended."""
        self.times.append(time.monotonic())
        if len(self.times) == EVERY:
            self._peak.begin()
        elif len(self.times) == self._last:
            self._peak.end()


class Peak:
    """The most bytes that a network device has carried within a second, one way, from `begin` to `end`; a context."""

    def __enter__(self) -> "Peak":
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def begin(self) -> None:
        """Forgets what was before, such as the first weights that rank 0 has sent."""
        self.bytes = 0

    def end(self) -> None:
        """What follows does not count, such as the exchange of what is left when training ends."""
        self._over.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _watch(self) -> None:
        seen: deque[tuple[float, int, int]] = deque()
        while not self._over.wait(LOOK_SECONDS):
            line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if f"{DEVICE}:" in each)
            fields = line.partition(":")[2].split()
            now = (time.monotonic(), int(fields[0]), int(fields[8]))
            seen.append(now)
            while now[0] - seen[0][0] > WINDOW_SECONDS:
                seen.popleft()
            self.bytes = max(self.bytes, *(now[way] - seen[0][way] for way in (1, 2)))


def host(rank: int, row: str, options: argparse.Namespace, ready: Any) -> tuple[list[float], int]:
    """One host's training: when its steps have ended, and its peak, in bytes."""
    quieten()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    learner = Layers(options.parameters, options.step_ms / 1000)
    # The last step also exchanges what is left, and waits for it: it is not measured.
    steps = EVERY * (1 + options.periods) + 2 * DELAY
    with Peak() as peak:
        ends = Ends(peak, options.periods)
        (torchft if row.startswith("torchft") else ours)(rank, row, learner, steps, ready, ends)
    return ends.times, peak.bytes


def ours(rank: int, row: str, learner: Layers, steps: int, ready: Any, ends: Ends) -> None:
    """Trains with a strategy of ours, or with none."""
    alone = row == ALONE
    if alone:
        for name in [name for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))]:
            # Each is a training of its own.
            os.environ.pop(name)
        os.environ.pop("TORCHELASTIC_RUN_ID")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1 if alone else int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="auto" if alone else SparseCommStrategy(method_of(row)),
        max_steps=steps,
        callbacks=[ends],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(learner, learner.data(steps))


def torchft(rank: int, row: str, learner: Layers, steps: int, ready: Any, ends: Ends) -> None:
    """Trains with torchft's DiLoCo; the lighthouse is on the first host."""
    everybody = f"--min-replicas={os.environ['WORLD_SIZE']}"
    with lighthouse(f"[::]:{PORT}", everybody) if rank == 0 else nullcontext():
        if rank == 0:
            ready.set()
        elif not ready.wait(LONGEST_SECONDS):
            raise TimeoutError("the lighthouse does not answer")
        train_torchft(rank, row, learner, steps, ends)


def train_torchft(rank: int, row: str, learner: Layers, steps: int, ends: Ends) -> None:
    """Trains one replica."""
    streamed = "streamed" in row
    layers = list(learner.network)
    parts = [nn.Sequential(*layers[LAYERS * part // PARTS : LAYERS * (part + 1) // PARTS]) for part in range(PARTS)]
    training = torchft_diloco.steps(
        learner,
        learner.data(steps),
        f"http://{address(0)}:{PORT}",
        f"replica-{rank}",
        EVERY,
        parts if streamed else (),
        DELAY if streamed else 0,
        alike=True,
    )
    for _ in itertools.islice(training, steps):
        ends.note()


def measured(network: str, row: str, options: argparse.Namespace) -> Run:
    """One run of a row: the slowest host's seconds for the steps that are measured."""
    ready = FORK.Event()
    with Lab(options.ranks, Cable.of(network)) as lab:
        hosts = lab.run(host, row, options, ready, timeout=LONGEST_SECONDS)
    last = EVERY * (1 + options.periods) - 1
    seconds = max(times[last] - times[EVERY - 1] for times, _ in hosts)
    return {
        "network": network,
        "row": row,
        "seconds": seconds,
        "peak": max(peak for _, peak in hosts),
        "commit": COMMIT,
    }


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        utilizations: Of each run, beside the run without exchanges in the same turn.
        peaks: Mbit/s.
    """

    utilizations: list[float]
    peaks: list[float]


def table(runs: Sequence[Run]) -> str:
    """Utilization: the median, the least and the most of all turns."""
    lines = ["| network | row | utilization | least | most | peak, Mbit/s |", "|---|---|---:|---:|---:|---:|"]
    for network in dict.fromkeys(run["network"] for run in runs):
        alone = [run["seconds"] for run in runs if (run["network"], run["row"]) == (network, ALONE)]
        for row in dict.fromkeys(run["row"] for run in runs):
            mine = [run for run in runs if (run["network"], run["row"]) == (network, row)]
            if row == ALONE or not mine:
                continue
            shares = [base / run["seconds"] for base, run in zip(alone, mine)]
            peak = statistics.median(8e-6 * run["peak"] / WINDOW_SECONDS for run in mine)
            lines.append(
                f"| {network} | `{row}` | {statistics.median(shares):.1%} | {min(shares):.1%} | {max(shares):.1%}"
                f" | {peak:.1f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing, in turns, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--networks", nargs="+", default=list(NETWORKS), help="cables, as in network.py: '50mbit' '30mbit, rtt 100ms'")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="all by default")
    add("--ranks", type=at_least(2), default=4)
    add("--parameters", type=at_least(100), default=10_000_000)
    add("--step-ms", type=float, default=900.0, help="by default, what the GPT of examples/gpt.py takes on one core")
    add("--periods", type=at_least(1), default=2, help=f"of {EVERY} steps")
    add("--turns", type=at_least(1), default=3)
    add("--output", type=Path, default=Path("utilization.json"))
    add("--resume", action="store_true", help="keep the runs in --output")
    add("--only-print", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("ranks", "parameters", "step_ms", "periods")}
    settings = chosen | {"layers": LAYERS} | versions()
    runs = load(options.output, settings, options.resume or options.only_print)
    cells = itertools.product(range(options.turns), options.networks, options.rows)
    for turn, network, row in () if options.only_print else cells:
        if sum((run["network"], run["row"]) == (network, row) for run in runs) <= turn:
            runs.append(measured(network, row, options))
            save(runs, options.output, settings)
            print(runs[-1], file=sys.stderr, flush=True)
    print(table(runs))
    print(f"\n{made_with(run['commit'] for run in runs)}")


if __name__ == "__main__":
    main()
