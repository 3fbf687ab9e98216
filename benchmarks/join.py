"""How long a replica takes to join others over a slow and lossy network.

    python benchmarks/join.py --rate 50mbit --rtt 100ms --loss 1%

Two replicas train, each on a host of the lab (see `network.py`), with the lighthouse on the first. Once they have
exchanged twice, a third one joins on a third host, and gets the state. Prints, for each of TCP's congestion controls
that the kernel has, medians over `--runs`: seconds from the meeting until it has the state, the exchange of the others
included; those in which the state was sent, beside those that the weights alone need at the cable's rate; bytes of the
state by the ledger; and the steps that the others have made meanwhile.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from cable import Cable
from defaults import method_of
from lighthouses import lighthouse
from network import FORK, Lab, address, bits_per_second
from runs import COMMIT, made_with
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm.basis.ledger import JOINING
from lightning_sparsecomm.elastic import streams
from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, quieten

PORT = 29510
TORCHRUN = (
    "RANK",
    "GROUP_RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
)
CONTROLS = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
REPLICAS, ROUNDS_BEFORE = 2, 2
LONGEST_SECONDS = 570.0


class Wide(pl.LightningModule):
    """A square matrix, with steps that take as long as told."""

    def __init__(self, parameters: int, step_seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(side := round(parameters**0.5), side, bias=False)
        self.step_seconds = step_seconds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean square of what it makes of noise."""
        time.sleep(self.step_seconds)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch(pl.Callback):
    """Notes when steps end, and tells when it is time to join."""

    def __init__(self, strategy: ElasticSparseCommStrategy, ready: Any) -> None:
        self._strategy, self._ready = strategy, ready
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """After each step."""
        self.ends.append(time.time())
        if self._strategy.turns is not None and self._strategy.turns.round >= ROUNDS_BEFORE:
            self._ready.set()


def allowed() -> list[str]:
    """The congestion controls that a network of the lab may choose."""
    return CONTROLS.read_text().split() if CONTROLS.exists() else []


def replica(rank: int, options: argparse.Namespace, control: str, ready: Any) -> dict[str, Any]:
    """One host: a replica's run, on the first one beside the lighthouse."""
    CONTROL.write_text(control)
    for name in TORCHRUN:
        # Each replica is a training of its own.
        os.environ.pop(name)
    quieten()
    torch.set_num_threads(1)
    serving = lighthouse(f"[::]:{PORT}", "--heartbeat-timeout", "10s") if rank == 0 else nullcontext()
    with serving:
        return train(rank, options, ready)


def train(rank: int, options: argparse.Namespace, ready: Any) -> dict[str, Any]:
    """A replica's run; the last rank is the one that joins."""
    if rank == REPLICAS and not ready.wait(LONGEST_SECONDS):
        raise TimeoutError("the others have not exchanged")
    received, sent = list[tuple[float, float]](), list[float]()
    receive, fetch = Joining.receive, streams.fetch

    def timed(self: Joining, *arguments: Any) -> Any:
        begin = time.time()
        state = receive(self, *arguments)
        received.append((begin, time.time()))
        return state

    def fetching(*arguments: Any) -> None:
        begin = time.time()
        fetch(*arguments)
        sent.append(time.time() - begin)

    Joining.receive, streams.fetch = timed, fetching  # type: ignore[method-assign]
    strategy = ElasticSparseCommStrategy(
        method_of(options.method),
        lighthouse=f"http://{address(0)}:{PORT}",
        replica=f"replica-{rank}",
        exchange_timeout=timedelta(seconds=LONGEST_SECONDS),
    )
    watch = Watch(strategy, ready)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.steps,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    side = round(options.parameters**0.5)
    data = TensorDataset(torch.randn(options.steps, 1).expand(-1, side))
    trainer.fit(Wide(options.parameters, options.step_ms / 1000), DataLoader(data))
    return {
        "received": received,
        "sent": sent,
        "ends": watch.ends,
        "state_bytes": strategy.ledger.handed_bytes(JOINING),
    }


def joined(options: argparse.Namespace, control: str) -> dict[str, float]:
    """One run of all replicas."""
    ready = FORK.Event()
    with Lab(REPLICAS + 1, Cable(options.rate, rtt=options.rtt, loss=options.loss)) as lab:
        *others, last = lab.run(replica, options, control, ready, timeout=LONGEST_SECONDS)
    begin, end = last["received"][0]
    # The first replica sends to all, also to the second one, as training begins.
    states = sum(len(each["received"]) for each in (*others, last))
    return {
        "seconds": end - begin,
        "sent": last["sent"][0],
        "bytes": sum(each["state_bytes"] for each in others) / states,
        "steps": min(sum(begin < at < end for at in each["ends"]) for each in others),
    }


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rate", default="50mbit")
    add("--rtt", default="100ms")
    add("--loss", default="1%")
    add("--method", default="sparse_loco(every=10)", help="as in Python")
    add("--parameters", type=at_least(1), default=10_000_000)
    add("--steps", type=at_least(1), default=60)
    add("--step-ms", type=float, default=500.0)
    add("--runs", type=at_least(1), default=3)
    add("--controls", nargs="+", default=allowed())
    options = parser.parse_args()
    weights = 4 * round(options.parameters**0.5) ** 2
    bits = bits_per_second(options.rate)
    print(
        "| congestion control | s | least | most | s, state alone | least | most | by the weights at this rate | MB"
        " | by the weights | others' steps |"
    )
    print(f"|---|{'---:|' * 10}", flush=True)
    for control in options.controls:
        runs = [joined(options, control) for _ in range(options.runs)]
        parts = [
            f"{statistics.median(some):.1f} | {min(some):.1f} | {max(some):.1f}"
            for some in ([run[name] for run in runs] for name in ("seconds", "sent"))
        ]
        ideal = 8 * weights / bits if bits else float("nan")
        size = runs[0]["bytes"]
        print(
            f"| {control} | {' | '.join(parts)} | {statistics.median(run['sent'] for run in runs) / ideal:.2f}"
            f" | {size / 1e6:.1f} | {size / weights:.3f} | {min(run['steps'] for run in runs):.0f} |",
            flush=True,
        )
    print(f"\n{made_with([COMMIT])}")


if __name__ == "__main__":
    main()
