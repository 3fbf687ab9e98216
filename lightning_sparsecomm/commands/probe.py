"""`sparsecomm probe`, under torchrun: what the network between the ranks takes, and which links are slow."""

import argparse
import itertools
import json
import math
import os
import socket
from datetime import timedelta
from typing import Any

import torch

from lightning_sparsecomm.basis.launched import joined
from lightning_sparsecomm.basis.ledger import PROBING
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.commands.model import model_named, optimizers_of
from lightning_sparsecomm.methods import default
from lightning_sparsecomm.planning import MeasuredLink, ModelLayout, rehearse, square_layers
from lightning_sparsecomm.planning.pairs import Pair, measure_pairs, slow_links
from lightning_sparsecomm.planning.planner import optimizer_for
from lightning_sparsecomm.planning.probe import agreed, measure_link
from lightning_sparsecomm.planning.quantities import as_bytes, as_rate, as_time
from lightning_sparsecomm.run.gathered import gather_texts

_TIMEOUT = timedelta(minutes=2)

# Pairs in a table; of more ranks only the slow ones are shown.
_MOST_PAIRS = 28


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "probe",
        help="measure the network between ranks, under torchrun",
        description=(
            "Measures sums and gathers of growing size between all ranks, the link between each two, and what the"
            " default method computes. Start it on all machines, with --node-rank=1 on the second: torchrun --nnodes=2"
            " --nproc-per-node=1 --node-rank=0 --master-addr=HOST --no-python sparsecomm probe"
        ),
    )
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="for sums and gathers; 2 by default")
    parser.add_argument(
        "--model",
        metavar="FILE:CLASS",
        help="a model to describe, made without arguments: train:Model for class Model in train.py; none by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures, and prints on rank 0."""
    if not 0 < options.seconds < math.inf:
        raise ValueError(f"--seconds must be positive, and finite; got {options.seconds}. Leave it out for 2.")
    if os.environ.get("WORLD_SIZE", "").lstrip("0") == "1":
        raise ValueError(
            "WORLD_SIZE must be at least 2 to measure a network; got 1. Start two processes here, torchrun"
            " --nproc-per-node=2 --no-python sparsecomm probe, or one on each of several machines with --nnodes."
        )
    # On all ranks and before they meet: what cannot be made is said at once, and nobody waits.
    model = None if options.model is None else model_named(options.model)
    layout = None if model is None else ModelLayout.of([model], optimizers_of(model))
    with joined(_TIMEOUT) as wire:
        names = gather_texts(f"rank {wire.rank} on {socket.gethostname()}", wire, torch.device("cpu"), PROBING)
        link = measure_link(wire, options.seconds)
        pairs = measure_pairs(wire)
        coding = agreed(wire, [_coding_seconds(wire)])[0]
        if wire.rank == 0:
            if options.json:
                described = {} if layout is None else {"model": layout.as_dict()}
                print(json.dumps(_as_dict(names, link, pairs, coding) | described, indent=1))
            else:
                print(_text(names, link, pairs, coding))
                if layout is not None:
                    sums = link.buckets_seconds(layout.buckets_bytes, wire.world_size)
                    print(f"\n{layout.table()}\nTheir sums take about {as_time(sums)} here, by the figures above.")


def _coding_seconds(wire: Wire) -> float:
    """What the default method computes in a step of a million parameters."""
    parameters = square_layers(1_000_000)
    optimizer = optimizer_for("sgd", parameters)
    return rehearse(default(), [(optimizer, parameters)], wire.world_size, length=1000).computing


def _as_dict(names: list[str], link: MeasuredLink, pairs: list[Pair], coding: float) -> dict[str, object]:
    return {
        "ranks": names,
        "latency": link.latency,
        "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None,
        "bandwidth_is_rough": not link.rate_is_known,
        "collectives": {kind: [list(point) for point in points] for kind, points in link.points.items()},
        "pairs": [vars(pair) for pair in pairs],
        "slow": [[names[rank] for rank in pair.ranks] for pair in slow_links(pairs)],
        "coding_seconds_per_million": coding,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _text(names: list[str], link: MeasuredLink, pairs: list[Pair], coding: float) -> str:
    about = "" if link.rate_is_known else "about "
    reaches = f"a sum reaches {about}{as_rate(link.bandwidth)}"
    lines = [f"{len(names)} ranks. A hop takes {as_time(link.latency)}; {reaches}.", ""]
    if about:
        lines[1:1] = ["No message filled the link, so that its rate is a rough one."]
    lines.append(f"{'handed over':>14}{'sum':>12}    {'handed over':>14}{'gather':>12}")
    for points in itertools.zip_longest(link.points["all_reduce"], link.points["all_gather"]):
        cells = [f"{as_bytes(point[0]):>14}{as_time(point[1]):>12}" if point else 26 * " " for point in points]
        lines.append("    ".join(cells))
    slow = slow_links(pairs)
    shown = pairs if len(pairs) <= _MOST_PAIRS else slow
    if shown:
        width = max(len(name) for name in names) + 2
        lines += ["", f"{'between':<{width}}{'and':<{width}}{'round trip':>12}{'rate':>14}"]
    for pair in shown:
        a, b = (names[rank] for rank in pair.ranks)
        mark = "  slow" if pair in slow else ""
        lines.append(f"{a:<{width}}{b:<{width}}{as_time(pair.rtt):>12} {as_rate(pair.bandwidth):>13}{mark}")
    lines += ["", f"The default method computes {as_time(coding)} per million parameters in a step."]
    return "\n".join(lines)
