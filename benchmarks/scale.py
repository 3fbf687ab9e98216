"""What one exchange costs each rank, by the number of ranks: measured on a slow network, and by a model beyond that.

Measured with a few processes on this machine, in the lab of network.py (Linux, root) or on loopback. The model adds up
what a rank computes, which one process rehearses with the payloads of as many ranks, and what its collectives take:
hops and bytes, by constants that are measured in the same call. Prints a Markdown table with both side by side.
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

# torch warns of hosts without names, such as the lab's.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_sparsecomm import Method, methods
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import GRADIENTS, Collective, Ledger, Waiting, Wire, link_bytes

# The benchmarks are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from network import DEVICE, FORK, Counters, Lab, LabError, patience_seconds
from runs import versions

LOOPBACK = "loopback"
BASELINE = "ddp"

# Kernels are compiled, and buffers touched, in the first exchange; memories hold something in the second.
WARM_UP_EXCHANGES = 2

# Ranks of a rehearsal whose payloads differ; more have the same ones again.
DISTINCT_RANKS = 128

# No two ranks or steps take their gradients from the same place of a random vector; and this is no multiple of a block.
STRIDE = 7919

# Of the collective that tells what hops cost.
TINY_ELEMENTS = 2

BACKEND_TIMEOUT = timedelta(minutes=5)


class Contender(NamedTuple):
    """One way to share gradients.

    Attributes:
        method: Makes the method; None for the all-reduce of ddp.
        steps: Optimizer steps for which one exchange serves; what is printed is its part for one of them.
    """

    method: Callable[[], Method] | None
    steps: int = 1


CONTENDERS = {
    BASELINE: Contender(None),
    "dgc(0.001)": Contender(lambda: methods.dgc(0.001, warmup_steps=0)),
    "gradient_dropping(0.01)": Contender(lambda: methods.gradient_dropping(0.01)),
    "sketched_sgd()": Contender(lambda: methods.sketched_sgd()),
    "s2_reducer()": Contender(lambda: methods.s2_reducer()),
    # All its exchanges cost the same: the steps between them need not be made.
    "sbc(0.01, every=10)": Contender(lambda: methods.sbc(0.01, every=1), steps=10),
}


class Call(NamedTuple):
    """One collective, and the bytes that this rank hands over to it."""

    collective: Collective
    handed_bytes: int


class Watch:
    """What one exchange takes: runs while it is resumed, and knows when a collective is at work.

    Attributes:
        seconds: By the wall.
        cpu_seconds: Of all threads of the process.
        before: Seconds that this thread computed before the first collective.
        after: Those after it, without what it did within collectives.
        calls: The collectives.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds = self.cpu_seconds = self.before = self.after = 0.0
        self.calls: list[Call] = []

    def resume(self) -> None:
        self._wall, self._cpu, self._thread = time.perf_counter(), time.process_time(), time.thread_time()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._wall
        self.cpu_seconds += time.process_time() - self._cpu
        self._computed()

    def _computed(self) -> None:
        computed = time.thread_time() - self._thread
        if self.calls:
            self.after += computed
        else:
            self.before += computed

    def enter(self, call: Call) -> None:
        self._computed()
        self.calls.append(call)

    def leave(self) -> None:
        self._thread = time.thread_time()


class Watched(Waiting):
    """A wait that the watch knows of."""

    def __init__(self, waiting: Waiting, watch: Watch, call: Call) -> None:
        self._waiting, self._watch, self._call = waiting, watch, call

    def __enter__(self) -> None:
        self._watch.enter(self._call)
        self._waiting.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.__exit__(kind, error, trace)
        self._watch.leave()


class WatchedWire(Wire):
    """The product's wire under a watch."""

    watch: Watch

    @classmethod
    def joined(cls) -> "WatchedWire":
        """To the process group that this process is in."""
        wire = cls()
        wire.watch = Watch()
        return wire

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None, peer: str = "") -> Waiting:
        waiting = super().calling(collective, handed_bytes, row, peer)
        return Watched(waiting, self.watch, Call(collective, handed_bytes))

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        """Not before it is waited for: the watch tells computing from communicating, and the model adds them up."""

        def wait() -> None:
            self.all_reduce_(tensor, row)

        return wait


class Rehearsal(WatchedWire):
    """A wire without a network: the other ranks say what has been recorded of them, at once.

    Gathers and ORs are of what ranks have recorded. A sum is this rank's part alone, since what methods do next does
    not take longer by the numbers that are in it.

    Attributes:
        recorded: Of each exchange recorded, what was handed over to each collective.
    """

    def __init__(self) -> None:
        # Not the wire's own, which asks for a process group.
        self.group, self.row, self.backend, self.rank = None, GRADIENTS, "gloo", 0
        self.step, self.failures, self.watch = None, [], Watch()
        self.recorded: list[list[Tensor]] = []
        self.take_part(1)

    def take_part(self, world_size: int) -> None:
        """From now on, in a world of so many ranks; in one of 1, what is handed over is recorded."""
        self.world_size = world_size
        self.ledger = Ledger(world_size)

    def _others(self) -> list[Tensor]:
        """What the other ranks hand over to the collective that is at work."""
        call = len(self.watch.calls) - 1
        return [self.recorded[rank % len(self.recorded)][call] for rank in range(1, self.world_size)]

    def _record(self, tensor: Tensor) -> None:
        if self.world_size == 1:
            self.recorded[-1].append(tensor.clone())

    def all_reduce_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        with self._calling("all_reduce", tensor, row):
            self._record(tensor.new_empty(0))
        return tensor

    def all_reduce_or_(self, tensor: Tensor, row: str | None = None) -> Tensor:
        with self._calling("all_reduce", tensor, row):
            self._record(tensor)
            for other in self._others():
                tensor.bitwise_or_(other)
        return tensor

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        with self._calling("all_gather", tensor, row):
            self._record(tensor)
            gathered = tensor.new_zeros((self.world_size, *tensor.shape))
            gathered[0] = tensor
            for place, other in zip(gathered[1:], self._others()):
                # Payloads are padded to the longest.
                common = min(len(place), len(other))
                place[:common] = other[:common]
        return gathered


class Gradients:
    """Random gradients of rather heavy tails, which differ by rank and step, without the time to draw them anew."""

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        normal = torch.randn(2 * size, generator=torch.Generator().manual_seed(seed))
        self._source = normal.mul_(normal.abs())

    def __call__(self, number: int) -> Tensor:
        begin = number * STRIDE % self.size
        return self._source[begin : begin + self.size]


def shapes(elements: int) -> list[tuple[int, ...]]:
    """Of four square weights and their biases, of about so many elements together."""
    width = max(2, round(math.sqrt(elements / 4)))
    return [(width, width), (width,)] * 4


class Replica:
    """A rank's model without data: gradients come from outside, all else is as in training.

    Args:
        contender: How gradients are shared.
        wire: Where.
        elements: About how many parameters it has.
    """

    def __init__(self, contender: Contender, wire: WatchedWire, elements: int) -> None:
        self.module = nn.Module()
        self.module.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes(elements))
        self.parameters = list(self.module.parameters())
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.gradient = torch.zeros(self.size)
        self.wire = wire
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.synchronizer: Synchronizer | None = None
        if contender.method is not None:
            self.synchronizer = Synchronizer(contender.method(), wire)
            self.synchronizer.add_module(self.module)
            self.synchronizer.check()

    def step(self, gradient: Tensor, meet: Callable[[], object]) -> None:
        """One optimizer step; `wire.watch` has run while something was exchanged, and not in the optimizer.

        Args:
            gradient: Of all parameters, `[size]`.
            meet: Called before the watch runs, so that ranks begin together.
        """
        self.gradient.copy_(gradient)
        for parameter, part in zip(
            self.parameters, self.gradient.split([parameter.numel() for parameter in self.parameters])
        ):
            parameter.grad = part.view(parameter.shape)
        watch = self.wire.watch
        watch.clear()
        if self.synchronizer is None:
            meet()
            watch.resume()
            # As ddp does in its buckets; in one collective, which is the best case.
            self.wire.all_reduce_(self.gradient.div_(self.wire.world_size))
            watch.pause()
            return
        stepping = self.synchronizer.stepping(self.optimizer)
        stepping.__enter__()
        meet()
        watch.resume()
        self.synchronizer.synchronize(self.optimizer)
        watch.pause()
        self.optimizer.step()
        # What is exchanged after a step.
        meet()
        watch.resume()
        stepping.__exit__(None, None, None)
        watch.pause()

    def close(self) -> None:
        if self.synchronizer is not None:
            self.synchronizer.close()


class Measured(NamedTuple):
    """One exchange of one rank.

    Attributes:
        seconds: By the wall, from when all ranks begin.
        cpu_seconds: Of all threads of the process.
        computed_seconds: Of the thread that exchanges, outside of collectives; what the rehearsal tells too.
        link_bytes: By the ledger's rules.
        interface_bytes: What the rank's interface has sent; None where others use it too.
    """

    seconds: float
    cpu_seconds: float
    computed_seconds: float
    link_bytes: float
    interface_bytes: int | None


class Probe(NamedTuple):
    """One collective on its own: by the wall, and of all threads of the process."""

    seconds: float
    cpu_seconds: float


def gathered_elements(size: int) -> int:
    """Of the all-gather that tells what its bytes cost: some megabytes, of which the lab's burst is a small part."""
    return max(2, size // 8)


class RankResult(NamedTuple):
    """What one rank measured: of each contender's exchanges of `size` elements, and of a tiny and two large
    collectives."""

    exchanges: dict[str, list[Measured]]
    size: int
    tiny: list[Probe]
    reduce: list[Probe]
    gather: list[Probe]


def measure_rank(rank: int, options: argparse.Namespace, ranks: int, store: str, barrier: Barrier) -> RankResult:
    """What one of several processes does: exchanges of all contenders by turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=BACKEND_TIMEOUT)
    wire = WatchedWire.joined()
    replicas = {name: Replica(contender, wire, options.elements) for name, contender in CONTENDERS.items()}
    size = replicas[BASELINE].size
    gradients = Gradients(1 + rank, size)

    def interface_bytes() -> int | None:
        return None if options.rate == LOOPBACK else Counters.read(DEVICE).sent_bytes

    def probe(collective: Callable[[Tensor], Tensor], elements: int, count: int) -> list[Probe]:
        probes = []
        for _ in range(count):
            tensor = torch.ones(elements)
            barrier.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            collective(tensor)
            probes.append(Probe(time.perf_counter() - wall, time.process_time() - cpu))
        return probes[1:]

    bare = Wire()
    tiny: list[Probe] = []
    reduce = probe(bare.all_reduce_, size, 1 + options.repetitions)
    gather = probe(bare.all_gather, gathered_elements(size), 1 + options.repetitions)

    exchanges: dict[str, list[Measured]] = {name: [] for name in replicas}
    for repetition in range(WARM_UP_EXCHANGES + options.repetitions):
        # Spread over the whole time, since they are over so soon.
        tiny += probe(bare.all_reduce_, TINY_ELEMENTS, 21)
        for name in list(replicas)[:: -1 if repetition % 2 else 1]:
            barrier.wait()
            before = interface_bytes()
            replicas[name].step(gradients(repetition), barrier.wait)
            barrier.wait()
            after = interface_bytes()
            watch = wire.watch
            if repetition >= WARM_UP_EXCHANGES:
                exchanges[name].append(
                    Measured(
                        watch.seconds,
                        watch.cpu_seconds,
                        watch.before + watch.after,
                        sum(link_bytes(*call, ranks) for call in watch.calls),
                        None if before is None or after is None else after - before,
                    )
                )
    for replica in replicas.values():
        replica.close()
    dist.destroy_process_group()
    return RankResult(exchanges, size, tiny, reduce, gather)


def measure(options: argparse.Namespace, ranks: int) -> list[RankResult]:
    """What so many processes measure, by rank."""
    barrier = FORK.Barrier(ranks)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, ranks, f"{folder}/store", barrier)
        if options.rate != LOOPBACK:
            # Of all contenders, and of two collectives.
            exchanges = (WARM_UP_EXCHANGES + options.repetitions) * (len(CONTENDERS) + 2)
            # Ten million elements take a rank some tenths of a second, and here ranks share cores.
            computing_seconds = 5.0 * ranks * max(1, options.elements / 1e7)
            timeout = patience_seconds(exchanges, options.elements, options.rate, computing_seconds)
            with Lab(ranks, options.rate) as lab:
                return lab.run(measure_rank, *arguments, timeout=timeout)
        return in_processes(ranks, measure_rank, *arguments)


def in_processes(count: int, function: Callable[..., RankResult], *arguments: object) -> list[RankResult]:
    """`function(rank, *arguments)` in so many forked processes; their results, by rank."""
    with ProcessPoolExecutor(count, mp_context=FORK, initializer=_inherit, initargs=arguments) as pool:
        return [each.result() for each in [pool.submit(_call, function, rank) for rank in range(count)]]


_inherited: tuple[object, ...] = ()


def _inherit(*arguments: object) -> None:
    """Barriers reach a process when it starts, and not later."""
    global _inherited
    _inherited = arguments


def _call(function: Callable[..., RankResult], rank: int) -> RankResult:
    return function(rank, *_inherited)


class Rehearsed(NamedTuple):
    """One exchange of one rank without a network, in a world of some size.

    Attributes:
        before: Seconds of CPU before the first collective: memories, selection, coding.
        after: Those after it: decoding, adding up, writing.
        calls: The collectives.
    """

    before: float
    after: float
    calls: list[Call]


def rehearse(rank: int, options: argparse.Namespace, worlds: list[int]) -> dict[str, dict[int, Rehearsed]]:
    """What each contender's exchange costs a rank by itself, by the number of ranks; medians."""
    torch.set_num_threads(1)
    result: dict[str, dict[int, Rehearsed]] = {}
    for name, contender in CONTENDERS.items():
        wire = Rehearsal()
        replica = Replica(contender, wire, options.elements)
        gradients = Gradients(1, replica.size)

        def meet() -> None:
            """Nobody else is there."""

        for other in range(min(DISTINCT_RANKS, max(worlds))):
            wire.recorded.append([])
            if replica.synchronizer is not None:
                # As another rank, with nothing in its memories.
                replica.synchronizer.forget()
            replica.step(gradients(100 * other), meet)
        if replica.synchronizer is not None:
            replica.synchronizer.forget()
        result[name] = {}
        for ranks in worlds:
            wire.take_part(ranks)
            watches = []
            for repetition in range(WARM_UP_EXCHANGES + options.rehearsals):
                replica.step(gradients(1 + repetition), meet)
                watches.append(Rehearsed(wire.watch.before, wire.watch.after, wire.watch.calls))
            watches = watches[WARM_UP_EXCHANGES:]
            result[name][ranks] = Rehearsed(
                statistics.median(each.before for each in watches),
                statistics.median(each.after for each in watches),
                watches[-1].calls,
            )
        replica.close()
    return result


class Constants(NamedTuple):
    """What collectives cost, measured.

    Attributes:
        call_seconds: Of a collective, however few bytes and hops it has.
        hop_seconds: Of each hop, which must wait for the one before.
        byte_seconds: Of each byte on the link, by collective.
        byte_cpu_seconds: CPU that a rank spends on each.
    """

    call_seconds: float
    hop_seconds: float
    byte_seconds: dict[Collective, float]
    byte_cpu_seconds: dict[Collective, float]

    @classmethod
    def of(cls, measured: dict[int, list[RankResult]]) -> "Constants":
        """From tiny and large collectives in all measured worlds; of bytes, from the world where they took least time:
        in the others ranks shared cores, or had nothing to overlap."""
        points = [(hops("all_reduce", ranks), slowest([r.tiny for r in each])) for ranks, each in measured.items()]
        call, hop = line_through(points)
        seconds: dict[Collective, list[float]] = {"all_reduce": [], "all_gather": []}
        cpu_seconds: dict[Collective, list[float]] = {"all_reduce": [], "all_gather": []}
        for ranks, results in measured.items():
            size = results[0].size
            large: list[tuple[Collective, int, list[list[Probe]]]] = [
                ("all_reduce", 4 * size, [each.reduce for each in results]),
                ("all_gather", 4 * gathered_elements(size), [each.gather for each in results]),
            ]
            for kind, handed, probes in large:
                on_link = link_bytes(kind, handed, ranks)
                seconds[kind].append(max(0.0, slowest(probes) - call - hop * hops(kind, ranks)) / on_link)
                cpu = statistics.median(each.cpu_seconds for several in probes for each in several)
                cpu_seconds[kind].append(cpu / on_link)
        return cls(
            call,
            hop,
            {kind: min(each) for kind, each in seconds.items()},
            {kind: statistics.median(each) for kind, each in cpu_seconds.items()},
        )

    def bytes_seconds(self, collective: Collective, sharing: float) -> float:
        """Of each byte on the link, where so many ranks share a core.

        What an all-reduce computes is hidden behind the network while there are cores enough, since it goes in
        segments. An all-gather is copied to its place when all is there.
        """
        seconds, cpu_seconds = self.byte_seconds[collective], self.byte_cpu_seconds[collective]
        return (
            max(seconds, sharing * cpu_seconds) if collective == "all_reduce" else seconds + (sharing - 1) * cpu_seconds
        )


def ranks_per_core(ranks: int) -> float:
    """How many of them have to share a core of this machine."""
    return max(1.0, ranks / cores())


def hops(collective: Collective, ranks: int) -> int:
    """Messages that wait for one another, in a ring as Gloo's."""
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


def slowest(of_ranks: list[list[Probe]]) -> float:
    """Median over repetitions of the seconds of the slowest rank."""
    return statistics.median(max(each.seconds for each in together) for together in zip(*of_ranks))


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares; through zero where that would make one of them negative."""
    if len(points) > 1:
        slope, intercept = statistics.linear_regression(*zip(*points))
        if slope >= 0 and intercept >= 0:
            return intercept, slope
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)


class Cost(NamedTuple):
    """Seconds of one optimizer step's part of an exchange, as modelled: computed before the first collective and
    after it, hops, and bytes on the link."""

    before: float
    after: float
    latency: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        return sum(self)

    @classmethod
    def of(cls, rehearsed: Rehearsed, constants: Constants, ranks: int, steps: int, sharing: float) -> "Cost":
        """The model.

        Args:
            rehearsed: What a rank computes, and its collectives.
            constants: What those cost.
            ranks: How many there are.
            steps: Optimizer steps for which the exchange serves.
            sharing: Ranks that have to share a core; at least 1. All of them compute at the same time, so it takes as
                many times longer.
        """
        latency = bandwidth = 0.0
        for kind, handed_bytes in rehearsed.calls:
            latency += constants.call_seconds + constants.hop_seconds * hops(kind, ranks)
            bandwidth += constants.bytes_seconds(kind, sharing) * link_bytes(kind, handed_bytes, ranks)
        computed = rehearsed.before * sharing, rehearsed.after * sharing
        return cls(*(part / steps for part in (*computed, latency, bandwidth)))


class Row(NamedTuple):
    """One method with one number of ranks, a step's part of an exchange.

    Attributes:
        method: Its name in CONTENDERS.
        ranks: How many.
        link_bytes: Bytes a rank puts on the link, by the collectives of the rehearsal.
        interface_bytes: Those that its interface has counted, with all headers; None where it was not measured.
        seconds, lower, upper: Measured: the slowest rank's, median and quartiles of exchanges; None where not measured.
        cpu_seconds: Measured, of all threads of a rank; median.
        here: The model of what was measured: all ranks on this machine's cores.
        model: The model with a machine for each rank.
    """

    method: str
    ranks: int
    link_bytes: float
    interface_bytes: float | None
    seconds: float | None
    lower: float | None
    upper: float | None
    cpu_seconds: float | None
    here: Cost | None
    model: Cost

    def markdown(self, baseline: "Row") -> str:
        def ms(seconds: float | None) -> str:
            return "" if seconds is None else f"{1000 * seconds:,.1f}"

        def kilobytes(count: float | None) -> str:
            return "" if count is None else f"{count / 1000:,.0f}"

        quartiles = "" if self.lower is None else f"{ms(self.lower)} – {ms(self.upper)}"
        here = None if self.here is None else self.here.seconds
        ratio = "" if self.seconds is None or here is None else f"{self.seconds / here:.2f}"
        cells = [
            *(f"`{self.method}`", str(self.ranks), kilobytes(self.link_bytes), kilobytes(self.interface_bytes)),
            *(ms(self.cpu_seconds), ms(self.seconds), quartiles, ms(here), ratio),
            *(ms(self.model.seconds), *map(ms, self.model), f"{self.model.seconds / baseline.model.seconds:.2f}"),
        ]
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| method | ranks | kB per rank | by its interface | CPU ms | measured ms | quartiles | model here | measured by it"
    " | model, a machine each | select, code | decode | latency | bandwidth | by ddp |"
)


def row(
    name: str,
    ranks: int,
    rehearsed: Rehearsed,
    constants: Constants,
    results: list[RankResult] | None,
) -> Row:
    """What is known of a method with so many ranks; `results` where it was measured."""
    steps = CONTENDERS[name].steps
    model = Cost.of(rehearsed, constants, ranks, steps, 1.0)
    on_link = sum(link_bytes(*call, ranks) for call in rehearsed.calls) / steps
    if results is None:
        return Row(name, ranks, on_link, None, None, None, None, None, None, model)
    exchanges = [each.exchanges[name] for each in results]
    seconds = [max(each.seconds for each in together) / steps for together in zip(*exchanges)]
    lower, median, upper = statistics.quantiles(seconds, method="inclusive")
    everything = [each for several in exchanges for each in several]
    counted = [each.interface_bytes for each in everything if each.interface_bytes is not None]
    return Row(
        name,
        ranks,
        on_link,
        statistics.median(counted) / steps if counted else None,
        median,
        lower,
        upper,
        statistics.median(each.cpu_seconds for each in everything) / steps,
        Cost.of(rehearsed, constants, ranks, steps, ranks_per_core(ranks)),
        model,
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def break_even(name: str, costs: dict[str, dict[int, float]]) -> str:
    """In words: with how many ranks a method stops costing less than ddp, by the model with a machine for each."""
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
    # A straight line between two points of the plot, whose axes are logarithmic.
    part = advantages[last] / (advantages[last] - advantages[last + 1])
    ranks = worlds[last] * (worlds[last + 1] / worlds[last]) ** part
    return f"{begins}stops paying near {ranks:,.0f} ranks (between {worlds[last]:,} and {worlds[last + 1]:,})"


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Seconds against ranks: models as lines, what was measured as points with their quartiles."""
    figure = Figure(figsize=(8, 5.3), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(CONTENDERS):
        ours = sorted((each for each in rows if each.method == name), key=lambda each: each.ranks)
        color = f"C{number}"
        axes.plot([r.ranks for r in ours], [1000 * r.model.seconds for r in ours], color=color, label=name)
        measured = [each for each in ours if each.seconds is not None and each.here is not None]
        ranks, medians = [r.ranks for r in measured], [1000 * (r.seconds or 0) for r in measured]
        axes.plot(ranks, [1000 * r.here.seconds for r in measured if r.here is not None], "--", color=color)
        bars = [
            [1000 * abs((r.seconds or 0) - (end or 0)) for r, end in zip(measured, ends)]
            for ends in ([r.lower for r in measured], [r.upper for r in measured])
        ]
        axes.errorbar(ranks, medians, bars, fmt="o", markersize=4, color=color, elinewidth=1)
    worlds = sorted({each.ranks for each in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [f"{ranks:,}" for ranks in worlds])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms per step for the exchange")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    styles = [("-", "model, a machine for each rank"), ("--", "model, all on this machine"), ("o", "measured there")]
    for style, label in styles:
        axes.plot([], [], style, color="gray", markersize=4, label=label)
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=90)


class Busy(NamedTuple):
    """Seconds of CPU that processes of this machine have used, and that this one and its finished children have;
    zeros where the system is not Linux."""

    everyone: float
    ours: float

    @classmethod
    def now(cls) -> "Busy":
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        if not Path("/proc/stat").exists():
            return cls(0.0, 0.0)
        user, nice, system = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:4])
        return cls((user + nice + system) / os.sysconf("SC_CLK_TCK"), ours)

    def others_since(self, earlier: "Busy", seconds: float) -> float:
        """The part of the machine's cores that others have used in these seconds."""
        used = (self.everyone - earlier.everyone) - (self.ours - earlier.ours)
        return max(0.0, used) / (seconds * (os.cpu_count() or 1))


def plain(value: object) -> object:
    """The same with dictionaries in the place of named tuples, for JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--elements", type=int, default=10_000_000, help="about how many parameters there are")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks to measure with, one thread each")
    add("--to", type=int, default=1024, help="most ranks that are modelled")
    add(
        "--rate", default="1gbit", help=f"of each rank's cable in the lab, as 100mbit, 1gbit; or {LOOPBACK}, without it"
    )
    add("--repetitions", type=int, default=10, help="exchanges that are measured with each method")
    add("--rehearsals", type=int, default=5, help="exchanges that are rehearsed with each method and number of ranks")
    add("--output", type=Path, default=None, help="JSON file for all that was measured")
    add("--plot", type=Path, default=None, help="PNG file for the plot")
    options = parser.parse_args()
    if min(options.elements, options.rehearsals) < 1 or min(options.repetitions, options.to, *options.ranks) < 2:
        parser.error("repetitions (for quartiles) and numbers of ranks must be at least 2, other numbers at least 1")
    for path in (options.output, options.plot):
        # At the end it would be too late.
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path} cannot be written: its folder does not exist")
    try:
        for ranks in options.ranks if options.rate != LOOPBACK else []:
            Lab(ranks, options.rate)
    except ValueError as error:
        parser.error(f"{error} Without the lab: --rate {LOOPBACK}.")

    torch.set_num_threads(1)
    measured: dict[int, list[RankResult]] = {}
    others: dict[int, float] = {}
    try:
        for ranks in sorted(set(options.ranks)):
            begin, busy = time.monotonic(), Busy.now()
            measured[ranks] = measure(options, ranks)
            others[ranks] = Busy.now().others_since(busy, time.monotonic() - begin)
    except LabError as error:
        sys.exit(f"{error} Without the lab: --rate {LOOPBACK}.")
    doubled = [2**power for power in range(1, options.to.bit_length()) if 2**power <= options.to]
    worlds = sorted({*measured, *doubled})
    rehearsals = in_processes(1, rehearse, options, worlds)[0]

    constants = Constants.of(measured)
    rows = [
        row(name, ranks, rehearsals[name][ranks], constants, measured.get(ranks))
        for name in CONTENDERS
        for ranks in worlds
    ]
    size = measured[min(measured)][0].size
    setting = f"{size:,} float32, {options.rate}"
    report(rows, constants, others, setting)
    if options.plot is not None:
        draw(rows, f"One step's exchange, {setting}", options.plot)
    if options.output is not None:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "versions": versions(),
            "machine": {"system": platform.system(), "architecture": platform.machine(), "cores": cores()},
            "elements": size,
            "constants": plain(constants),
            "others": others,
            "rehearsals": plain(rehearsals),
            "rows": plain(rows),
            "measured": {ranks: [plain(result) for result in results] for ranks, results in measured.items()},
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def report(rows: list[Row], constants: Constants, others: dict[int, float], setting: str) -> None:
    """Prints the table, how far the model is off, and where each method stops paying."""
    by = {(each.method, each.ranks): each for each in rows}
    worlds = sorted({each.ranks for each in rows})
    beyond = [ranks for ranks in worlds if ranks > max(others) and math.log2(ranks) % 2 == 0]
    print(f"{setting}; {', '.join(f'{name} {number}' for name, number in versions().items())}")
    busy = ", ".join(f"{part:.0%} with {ranks} ranks" for ranks, part in others.items())
    print(f"Measured on {cores()} cores, of which other processes used {busy}.")
    labels = zip(("all_reduce", "all_gather"), ("all-reduce", "all-gather"))
    per_byte = "; ".join(
        f"{label} {1e9 * constants.byte_seconds[kind]:.2f} ns per byte on the link, CPU"
        f" {1e9 * constants.byte_cpu_seconds[kind]:.2f} ns"
        for kind, label in labels
    )
    print(
        f"A collective {1e6 * constants.call_seconds:.0f} µs, and {1e6 * constants.hop_seconds:.0f} µs for each hop;"
        f" {per_byte}.\n"
    )
    print(HEADER)
    print("|---|" + "---:|" * (HEADER.count("|") - 2))
    for name in CONTENDERS:
        for ranks in [*others, *beyond]:
            print(by[name, ranks].markdown(by[BASELINE, ranks]))
    ratios = [each.seconds / each.here.seconds for each in rows if each.seconds is not None and each.here is not None]
    print(
        f"\nMeasured by model: {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}."
        " By the model with a machine for each rank:"
    )
    costs_by_ranks = {name: {ranks: by[name, ranks].model.seconds for ranks in worlds} for name in CONTENDERS}
    for name in CONTENDERS:
        if name != BASELINE:
            print(f"- `{name}` {break_even(name, costs_by_ranks)}.")


if __name__ == "__main__":
    main()
