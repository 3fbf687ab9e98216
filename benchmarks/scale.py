"""What one exchange costs each rank, by the number of ranks and of machines: measured for a few, predicted for more.

Processes are hosts of their own in the lab of network.py (Linux), or several on a host with `--worlds 2x4`, where they
work at two levels; or all on loopback. The prediction is that of `sparsecomm plan`: one process rehearses what a rank
computes and sends with so many ranks, and the network has the rate and latency that tiny and large collectives took in
the same call. Prints a Markdown table with both side by side.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_sparsecomm import Channel, methods
from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.basis.ledger import OURS
from lightning_sparsecomm.planning.links import Network
from lightning_sparsecomm.planning.measured_link import MeasuredLink
from lightning_sparsecomm.planning.probe import measure_link
from lightning_sparsecomm.planning.rehearsed import Rehearsed, rehearse
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.node_turns import divide
from lightning_sparsecomm.run.nodes import Nodes
from lightning_sparsecomm.sharing import Method

# The benchmarks are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from network import DEVICE, FORK, Counters, Lab, LabError, patience_seconds
from runs import versions

LOOPBACK = "loopback"
BASELINE = "ddp"

# The first exchange compiles kernels and touches buffers; only from the second on do memories hold something.
WARM_UP_EXCHANGES = 2

# How far magnitudes differ between elements that are alike on all ranks: so far that ranks select as many positions
# together as in trainings (union.py).
SPREAD = 1.0

# A run of so many steps, for densities that follow from it.
LENGTH = 1000

BACKEND_TIMEOUT = timedelta(minutes=10)


class Contender(NamedTuple):
    """One way to share gradients.

    Attributes:
        method: Makes the method; None for ddp's all-reduce.
        steps: Optimizer steps per exchange; printed costs are per step.
        at_two_levels: Whether it is measured at two levels too.
    """

    method: Callable[[], Method] | None
    steps: int = 1
    at_two_levels: bool = True


CONTENDERS = {
    BASELINE: Contender(None),
    "sparsecomm": Contender(methods.default),
    "dgc(0.001)": Contender(lambda: methods.dgc(0.001, warmup_steps=0)),
    "gradient_dropping(0.01)": Contender(lambda: methods.gradient_dropping(0.01)),
    "dgc(0.01)": Contender(lambda: methods.dgc(0.01, warmup_steps=0)),
    "dgc(0.01, exchange='gather')": Contender(lambda: methods.dgc(0.01, warmup_steps=0, exchange="gather")),
    "dgc(0.01, exchange='all_reduce')": Contender(lambda: methods.dgc(0.01, warmup_steps=0, exchange="all_reduce")),
    "ok_topk(0.01)": Contender(lambda: methods.ok_topk(0.01)),
    "aligned_topk(0.01)": Contender(lambda: methods.aligned_topk(0.01)),
    "random_k(0.01)": Contender(lambda: methods.random_k(0.01)),
    "powersgd(rank=2)": Contender(lambda: methods.powersgd(2)),
    "quantized(bits=4)": Contender(lambda: methods.quantized(4)),
    "sketched_sgd()": Contender(methods.sketched_sgd),
    "s2_reducer()": Contender(methods.s2_reducer),
    # All its exchanges cost the same, so the steps between them are left out.
    "sbc(0.01, every=10)": Contender(lambda: methods.sbc(0.01, every=1), steps=10, at_two_levels=False),
}


class World(NamedTuple):
    """So many machines with so many ranks each, such as `2x4`; at two levels if there are several ranks on each."""

    machines: int
    per_machine: int

    @classmethod
    def of(cls, text: str) -> "World":
        """Raises `argparse.ArgumentTypeError` unless the text is one."""
        parts = text.split("x")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts) or text == "1x1":
            raise argparse.ArgumentTypeError(f"a world must be machines x ranks on each, such as 4x1; got {text!r}")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.machines}x{self.per_machine}"

    @property
    def ranks(self) -> int:
        return self.machines * self.per_machine

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each machine."""
        size = self.per_machine
        return [list(range(first, first + size)) for first in range(0, self.ranks, size)]

    def contenders(self, names: Sequence[str]) -> list[str]:
        """Those of the contenders that are measured here; ddp always."""
        names = [name for name in CONTENDERS if name in (BASELINE, *names)]
        return [name for name in names if self.per_machine == 1 or CONTENDERS[name].at_two_levels]


class Gradients:
    """Random, heavy-tailed gradients, without the time to draw new ones. Ranks have large elements in like places."""

    def __init__(self, rank: int, size: int) -> None:
        self.size = size
        self._scale = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(SPREAD).exp_()
        self._source = torch.randn(2 * size, generator=torch.Generator().manual_seed(1 + rank))

    def __call__(self, number: int) -> Tensor:
        # No multiple of a block.
        begin = number * 7919 % self.size
        return self._source[begin : begin + self.size] * self._scale


def shapes(elements: int) -> list[tuple[int, ...]]:
    """Shapes of four square weights and their biases, with about so many elements in all."""
    width = max(2, round(math.sqrt(elements / 4)))
    return [(width, width), (width,)] * 4


class Replica:
    """A rank's model without data: gradients come from outside, everything else is as in training.

    Args:
        contender: How gradients are shared.
        world: At how many levels.
        rank: This one.
        elements: Approximate number of parameters.
    """

    def __init__(self, contender: Contender, world: World, rank: int, elements: int) -> None:
        self.module = nn.Module()
        self.module.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes(elements))
        self.parameters = list(self.module.parameters())
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.gradient = torch.zeros(self.size)
        self.wire = Wire()
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.engine: Engine | None = None
        if contender.method is not None:
            self.engine = Engine(contender.method(), self.wire)
            self.engine.length = LENGTH
            self.engine.registry.add_module(self.module)
            self.engine.registry.check()
            if world.per_machine > 1:
                divide(self.engine, world.groups, rank // world.per_machine)

    def step(self, gradient: Tensor, barrier: Barrier) -> float:
        """Seconds of one step's exchange, from when all ranks begin, and not of the optimizer.

        Args:
            gradient: Gradient of all parameters, `[size]`.
            barrier: Where ranks meet.
        """
        self.gradient.copy_(gradient)
        parts = self.gradient.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad = part.view(parameter.shape)
        barrier.wait()
        begin = time.perf_counter()
        if self.engine is None:
            # As in ddp's buckets, but in one collective, the best case.
            self.wire.all_reduce_(self.gradient.div_(self.wire.world_size))
            return time.perf_counter() - begin
        stepping = self.engine.stepping(self.optimizer)
        stepping.__enter__()
        self.engine.synchronize(self.optimizer)
        taken = time.perf_counter() - begin
        self.optimizer.step()
        # Weights are exchanged after a step.
        barrier.wait()
        begin = time.perf_counter()
        stepping.__exit__(None, None, None)
        return taken + time.perf_counter() - begin

    @property
    def link_bytes(self) -> float:
        """Bytes that this rank has put on the link between machines."""
        return sum(self.wire.ledger.link_bytes(row) for row in OURS)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class RankResult(NamedTuple):
    """What one rank measured.

    Attributes:
        seconds: Of each exchange, by contender.
        link_bytes: That a rank puts on the link between machines in one exchange, by the ledger; by contender.
        device_bytes: The same by its machine's device, with headers; None where others use it too.
        spread: How many times as many positions all ranks selected as one of them, by contender.
        link: Collectives between ranks; or between machines, all ranks of a machine at once.
        inside: Collectives between the ranks of a machine; None at one level.
    """

    seconds: dict[str, list[float]]
    link_bytes: dict[str, float]
    device_bytes: dict[str, float | None]
    spread: dict[str, float]
    link: MeasuredLink
    inside: MeasuredLink | None


def measure_rank(rank: int, options: argparse.Namespace, world: World, store: str, barrier: Barrier) -> RankResult:
    """What each process does: exchanges with all contenders in turns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world.ranks, timeout=BACKEND_TIMEOUT
    )
    nodes = Nodes(world.groups, Wire()) if world.per_machine > 1 else None
    link = measure_link(nodes.between if nodes is not None else Wire(), 10)
    inside = measure_link(nodes.inside, 10) if nodes is not None else None
    names = world.contenders(options.methods)
    replicas = {name: Replica(CONTENDERS[name], world, rank, options.elements) for name in names}
    gradients = Gradients(rank, replicas[BASELINE].size)

    def counted() -> int | None:
        return None if options.rate == LOOPBACK else Counters.read(DEVICE).sent_bytes

    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, float] = {}
    device: dict[str, float | None] = {}
    for repetition in range(WARM_UP_EXCHANGES + options.repetitions):
        for name in names[:: -1 if repetition % 2 else 1]:
            replica = replicas[name]
            on_link = replica.link_bytes
            barrier.wait()
            before = counted()
            taken = replica.step(gradients(repetition), barrier)
            barrier.wait()
            after = counted()
            if repetition >= WARM_UP_EXCHANGES:
                seconds[name].append(taken)
                sent[name] = replica.link_bytes - on_link
                device[name] = None if before is None or after is None else after - before
    spread = {name: found for name, replica in replicas.items() for found in spreads(replica)}
    for replica in replicas.values():
        replica.close()
    destroy_all()
    return RankResult(seconds, sent, device, spread, link, inside)


def spreads(replica: Replica) -> Iterator[float]:
    """What `Sparse` exchanges have noted."""
    for tracked in replica.engine.registry.optimizers if replica.engine is not None else []:
        for share in tracked.shares.values():
            channel = getattr(share, "channel", None)
            if isinstance(channel, Channel) and "positions" in channel.exchange.state_dict():
                yield float(channel.exchange.state_dict()["positions"])


def measure(options: argparse.Namespace, world: World) -> list[RankResult]:
    """What each process of a world measures."""
    barrier = FORK.Barrier(world.ranks)
    with tempfile.TemporaryDirectory() as place:
        arguments = (options, world, f"{place}/store", barrier)
        if options.rate == LOOPBACK:
            with ProcessPoolExecutor(world.ranks, FORK, _inherit, arguments) as pool:
                return [each.result() for each in [pool.submit(_call, rank) for rank in range(world.ranks)]]
        exchanges = (WARM_UP_EXCHANGES + options.repetitions) * (len(CONTENDERS) + 8)
        # Ten million elements take a rank a few tenths of a second, and here ranks share cores.
        computing_seconds = 5.0 * world.ranks * max(1, options.elements / 1e7)
        timeout = patience_seconds(exchanges, options.elements, options.rate, computing_seconds)
        with Lab(world.ranks, options.rate, ranks_per_node=world.per_machine) as lab:
            return lab.run(measure_rank, *arguments, timeout=timeout)


_inherited: tuple[Any, ...] = ()


def _inherit(*arguments: object) -> None:
    """A barrier can only be passed to a process when it starts."""
    global _inherited
    _inherited = arguments


def _call(rank: int) -> RankResult:
    return measure_rank(rank, *_inherited)


def rehearsed(name: str, ranks: int, part: int, elements: int) -> Rehearsed | None:
    """What a rank computes and sends with so many ranks, if it has one of so many parts of the elements."""
    contender = CONTENDERS[name]
    if contender.method is None:
        return None
    torch.set_num_threads(1)
    parameters = [
        (f"parts.{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes(elements // part))
    ]
    optimizer = torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1, momentum=0.9)
    return rehearse(contender.method(), [(optimizer, parameters)], ranks, LENGTH, elements)


class Predicted(NamedTuple):
    """One step's exchange, in seconds: what a rank computes, and what its collectives take."""

    computing: float
    network: float

    @property
    def seconds(self) -> float:
        return self.computing + self.network


def predict(
    name: str, world: World, found: Rehearsed | None, network: Network, inside: MeasuredLink | None, elements: int
) -> tuple[Predicted, float]:
    """What a step's exchange takes with a machine's cores for each rank, and the bytes that a rank puts on the link.

    Args:
        name: The contender.
        world: Machines and ranks.
        found: What a rank computes and sends; None for ddp.
        network: A machine's cable, which its ranks share.
        inside: Collectives between the ranks of a machine.
        elements: Of the model.
    """
    steps, size = CONTENDERS[name].steps, 4.0 * elements
    if found is None:
        # Around one ring of all ranks, in which only one of a machine's ranks sends to another machine.
        taken = network.seconds("all_reduce", size, world.ranks)
        return Predicted(0.0, taken), 2 * (world.ranks - 1) / world.ranks * size
    shared = Network(network.bandwidth / world.per_machine, call=network.call)
    taken = sum(often * shared.seconds(kind, handed, found.ranks) for kind, handed, often in found.calls)
    if inside is not None:
        taken += inside.seconds("all_reduce", size, world.per_machine)
    return Predicted(found.computing / steps, taken / steps), found.link_bytes / steps


class Row(NamedTuple):
    """One method in one world; per optimizer step. None stands for what was not measured.

    Attributes:
        method: Its name in CONTENDERS.
        machines, per_machine: The world.
        link_bytes: Bytes that a rank puts on the link between machines: measured, or else predicted.
        device_bytes: Bytes that its machine's device counted, with all headers.
        seconds: Of each measured exchange, on the slowest rank.
        spread: How many times as many positions all ranks selected as one.
        here: Prediction of the measurement: all ranks compute on this machine's cores.
        predicted: Prediction with cores for each rank.
    """

    method: str
    machines: int
    per_machine: int
    link_bytes: float
    device_bytes: float | None
    seconds: list[float]
    spread: float | None
    here: Predicted | None
    predicted: Predicted

    @property
    def world(self) -> World:
        return World(self.machines, self.per_machine)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def markdown(self, baseline: "Row") -> str:
        def ms(seconds: float | None) -> str:
            return "" if seconds is None else f"{1000 * seconds:,.1f}"

        def kilobytes(count: float | None) -> str:
            return "" if count is None else f"{count / 1000:,.0f}"

        quartiles = ratio = ""
        if self.median is not None and self.here is not None:
            lower, _, upper = statistics.quantiles(self.seconds, method="inclusive")
            quartiles, ratio = f"{ms(lower)} – {ms(upper)}", f"{self.median / self.here.seconds:.2f}"
        cells = [
            *(f"`{self.method}`", str(self.world), kilobytes(self.link_bytes), kilobytes(self.device_bytes)),
            *("" if self.spread is None else f"{self.spread:.1f}", ms(self.median), quartiles),
            *(ms(self.here.seconds if self.here is not None else None), ratio, ms(self.predicted.seconds)),
            *(ms(self.predicted.computing), ms(self.predicted.network)),
            f"{self.predicted.seconds / baseline.predicted.seconds:.2f}",
        ]
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| method | machines x ranks | kB per rank | machine's kB, by its device | positions | measured ms | quartiles"
    " | predicted here | measured by it | predicted, cores for each | computing | network | by ddp |"
)


def row(
    name: str, world: World, results: list[RankResult] | None, network: Network, elements: int, found: Rehearsed | None
) -> Row:
    """The row of a method in a world; `results` if it was measured."""
    inside = results[0].inside if results is not None else None
    predicted, on_link = predict(name, world, found, network, inside, elements)
    if results is None:
        return Row(name, *world, on_link, None, [], None, None, predicted)
    steps = CONTENDERS[name].steps
    counted = [each.device_bytes[name] for each in results]
    return Row(
        name,
        *world,
        statistics.mean(each.link_bytes[name] for each in results) / steps,
        None if counted[0] is None else statistics.mean(each or 0.0 for each in counted) / steps,
        [max(together) / steps for together in zip(*(each.seconds[name] for each in results))],
        results[0].spread.get(name),
        predicted._replace(computing=predicted.computing * max(1.0, world.ranks / cores())),
        predicted,
    )


def network_of(measured: dict[World, list[RankResult]]) -> Network:
    """The rate and latency of tiny and large collectives; of several worlds at one level, the medians."""
    links = [results[0].link for world, results in measured.items() if world.per_machine == 1]
    links = links or [results[0].link for results in measured.values()]
    rate = statistics.median(link.bandwidth for link in links)
    return Network(rate, call=statistics.median(link.latency for link in links))


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def break_even(name: str, costs: dict[str, dict[int, float]]) -> str:
    """In words: from how many ranks on a method costs more than ddp, as predicted with cores for each rank."""
    worlds = sorted(costs[name])
    advantages = [math.log(costs[BASELINE][ranks] / costs[name][ranks]) for ranks in worlds]
    if max(advantages) <= 0:
        return f"costs more than ddp with any number of ranks up to {worlds[-1]:,}"
    last = max(index for index, advantage in enumerate(advantages) if advantage > 0)
    begins = (
        "" if advantages[0] > 0 else f"pays from {worlds[next(i for i, a in enumerate(advantages) if a > 0)]:,} on, "
    )
    if last == len(worlds) - 1:
        return f"{begins}costs less than ddp with {worlds[-1]:,} ranks, by {math.exp(advantages[-1]):.1f}"
    # Where a straight line between two points of the plot, with its logarithmic axes, crosses ddp's.
    part = advantages[last] / (advantages[last] - advantages[last + 1])
    ranks = worlds[last] * (worlds[last + 1] / worlds[last]) ** part
    return f"{begins}stops paying near {ranks:,.0f} ranks (between {worlds[last]:,} and {worlds[last + 1]:,})"


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Draws seconds against ranks at one level: predictions as lines, measurements as points with quartiles."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(each.method for each in rows)):
        ours = sorted(
            (each for each in rows if each.method == name and each.per_machine == 1), key=lambda r: r.machines
        )
        look = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
        axes.plot([r.machines for r in ours], [1000 * r.predicted.seconds for r in ours], label=name, **look)
        for each in ours:
            if each.median is not None:
                lower, middle, upper = (1000 * q for q in statistics.quantiles(each.seconds, method="inclusive"))
                bars = [[middle - lower], [upper - middle]]
                axes.errorbar([each.machines], [middle], bars, fmt="o", markersize=4, color=look["color"], elinewidth=1)
    worlds = sorted({each.machines for each in rows if each.per_machine == 1})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [f"{ranks:,}" for ranks in worlds])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks, each on a machine of its own")
    axes.set_ylabel("ms per step for the exchange")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.plot([], [], "o", color="gray", markersize=4, label="measured, all on this machine's cores")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=90)


@contextmanager
def watching_others(found: dict[str, float], world: World) -> Iterator[None]:
    """Notes the fraction of the machine's cores that other processes use meanwhile; nothing unless on Linux."""

    def now() -> tuple[float, float, float]:
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        if not Path("/proc/stat").exists():
            return 0.0, 0.0, 0.0
        user, nice, system = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK"), ours, time.monotonic()

    before = now()
    yield
    everyone, ours, seconds = (after - each for after, each in zip(now(), before))
    if seconds:
        found[str(world)] = max(0.0, everyone - ours) / (seconds * (os.cpu_count() or 1))


def plain(value: object) -> object:
    """The same with named tuples as dictionaries, for JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    default = ["2x1", "4x1", "8x1", "2x2", "2x4", "4x2"]
    add(
        "--worlds",
        type=World.of,
        nargs="+",
        default=[World.of(each) for each in default],
        metavar="NxM",
        help=f"N machines of M ranks each, to measure (default: {' '.join(default)})",
    )
    add("--methods", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME", help="default: all")
    add("--to", type=int, default=1024, metavar="N", help="largest number of ranks to predict (default: 1024)")
    add("--rate", default="100mbit", help=f"rate of each machine's cable, or {LOOPBACK} (default: 100mbit)")
    add("--elements", type=int, default=10_000_000, metavar="N", help="parameters (default: 10,000,000)")
    add("--repetitions", type=int, default=5, metavar="N", help="measured exchanges, 2 or more (default: 5)")
    add("--output", type=Path, metavar="FILE", help="JSON file for all numbers")
    add("--plot", type=Path, metavar="FILE", help="picture of the rows at one level")
    options = parser.parse_args()
    if options.repetitions < 2 or options.elements < 1000:
        parser.error("--repetitions must be 2 or more, and --elements 1,000 or more")
    if options.rate == LOOPBACK and any(world.per_machine > 1 for world in options.worlds):
        parser.error("--rate loopback has no machines; use --worlds 2x1 4x1, for example")

    measured: dict[World, list[RankResult]] = {}
    others: dict[str, float] = {}
    try:
        for world in options.worlds:
            with watching_others(others, world):
                measured[world] = measure(options, world)
            print(f"measured {world}", file=sys.stderr, flush=True)
    except (LabError, ValueError) as error:
        sys.exit(f"{error} Without the lab: --rate {LOOPBACK}.")
    doubled = [World(2**power, 1) for power in range(1, options.to.bit_length()) if 2**power <= options.to]
    worlds = sorted({*measured, *doubled}, key=lambda world: (world.per_machine, world.machines))
    size = sum(math.prod(shape) for shape in shapes(options.elements))
    network, rows, rehearsals = network_of(measured), [], {}
    for name in World(2, 1).contenders(options.methods):
        for world in worlds:
            if name in world.contenders(options.methods):
                found = rehearsed(name, world.machines, world.per_machine, options.elements)
                rehearsals[f"{name}, {world}"] = None if found is None else vars(found)
                rows.append(row(name, world, measured.get(world), network, size, found))
        print(f"rehearsed {name}", file=sys.stderr, flush=True)
    setting = f"{size:,} float32, {options.rate}"
    report(rows, network, others, setting)
    if options.plot is not None:
        draw(rows, f"One step's exchange, {setting}", options.plot)
    if options.output is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "versions": versions(),
            "machine": {"system": platform.system(), "architecture": platform.machine(), "cores": cores()},
            "elements": size,
            "network": vars(network),
            "others": others,
            "rehearsals": rehearsals,
            "rows": plain(rows),
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def report(rows: list[Row], network: Network, others: dict[str, float], setting: str) -> None:
    """Prints the table, how far the prediction is off, and where each method stops paying off."""
    by = {(each.method, each.world): each for each in rows}
    at_one_level = sorted({each.machines for each in rows if each.per_machine == 1})
    measured = {each.world for each in rows if each.seconds}
    beyond = {World(ranks, 1) for ranks in at_one_level if ranks > 8 and math.log2(ranks) % 2 == 0}
    printed = sorted(measured | beyond, key=lambda world: (world.per_machine, world.machines))
    print(f"{setting}; {', '.join(f'{name} {number}' for name, number in versions().items())}")
    busy = ", ".join(f"{part:.0%} with {world}" for world, part in others.items())
    print(f"Measured on {cores()} cores, of which other processes used {busy or 'an unknown part'}.")
    print(f"A hop takes {1e6 * network.call:.0f} µs, and the rate is {network.bandwidth / 1e6:.1f} Mbit/s.\n")
    print(HEADER)
    print("|---|---|" + "---:|" * (HEADER.count("|") - 3))
    names = list(dict.fromkeys(each.method for each in rows))
    for name in names:
        for world in printed:
            if (name, world) in by:
                print(by[name, world].markdown(by[BASELINE, world]))
    ratios = [each.median / each.here.seconds for each in rows if each.median is not None and each.here is not None]
    print(
        f"\nMeasured by prediction: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}."
        " Predicted with a machine for each rank:"
    )
    costs = {name: {ranks: by[name, World(ranks, 1)].predicted.seconds for ranks in at_one_level} for name in names}
    for name in names:
        if name != BASELINE:
            print(f"- `{name}` {break_even(name, costs)}.")


if __name__ == "__main__":
    main()
