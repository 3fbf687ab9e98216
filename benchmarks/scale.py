"""What one exchange costs each rank, by the number of ranks: measured for a few ranks, and modelled for more.

A few processes on this machine are measured, in the lab of network.py (Linux) or on loopback. The model adds up
two parts. One is what a rank computes: one process rehearses it with the payloads of as many ranks. The other is what
its collectives take: hops and bytes, with constants that are measured in the same call. Prints a Markdown table with
measurement and model side by side.
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
from unittest.mock import patch

# torch warns that the lab's hosts have no names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_sparsecomm import Method, methods
from lightning_sparsecomm.basis import GRADIENTS, Collective, Ledger, Wire, link_bytes
from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.basis.wire import Waiting
from lightning_sparsecomm.codecs.payload import open_length, seal_length
from lightning_sparsecomm.exchange import gather
from lightning_sparsecomm.run.engine import Engine

# The benchmarks are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from network import DEVICE, FORK, Counters, Lab, LabError, patience_seconds
from runs import versions

LOOPBACK = "loopback"
BASELINE = "ddp"

# The first exchange compiles kernels and touches buffers; only in the second do memories hold something.
WARM_UP_EXCHANGES = 2

# Different payloads in a rehearsal; more ranks repeat them.
DISTINCT_RANKS = 128

# Distance between the places of a random vector where ranks and steps take their gradients; no multiple of a block.
STRIDE = 7919

# Size of the collective that measures hops.
TINY_ELEMENTS = 2

BACKEND_TIMEOUT = timedelta(minutes=5)


class Contender(NamedTuple):
    """One way to share gradients.

    Attributes:
        method: Makes the method; None for ddp's all-reduce.
        steps: Optimizer steps per exchange; printed costs are per step.
    """

    method: Callable[[], Method] | None
    steps: int = 1


CONTENDERS = {
    BASELINE: Contender(None),
    "dgc(0.001)": Contender(lambda: methods.dgc(0.001, warmup_steps=0)),
    "gradient_dropping(0.01)": Contender(lambda: methods.gradient_dropping(0.01)),
    "sketched_sgd()": Contender(lambda: methods.sketched_sgd()),
    "s2_reducer()": Contender(lambda: methods.s2_reducer()),
    # All its exchanges cost the same, so the steps between them are left out.
    "sbc(0.01, every=10)": Contender(lambda: methods.sbc(0.01, every=1), steps=10),
}


class Call(NamedTuple):
    """One collective, and the bytes that this rank hands to it."""

    collective: Collective
    handed_bytes: int


class Watch:
    """A stopwatch for one exchange, which knows when a collective is at work.

    Attributes:
        seconds: Wall-clock time.
        cpu_seconds: Processor time of all threads of the process.
        before: Processor time of this thread before the first collective.
        after: Processor time of this thread after that, outside of collectives.
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
    """A wait that pauses the watch's count of computation."""

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
    """The package's wire under a watch."""

    watch: Watch

    @classmethod
    def joined(cls) -> "WatchedWire":
        """A wire over this process's process group."""
        wire = cls()
        wire.watch = Watch()
        return wire

    def calling(self, collective: Collective, handed_bytes: int, row: str | None = None) -> Waiting:
        waiting = super().calling(collective, handed_bytes, row)
        return Watched(waiting, self.watch, Call(collective, handed_bytes))

    def all_reduce_later_(self, tensor: Tensor, row: str | None = None) -> Callable[[], None]:
        """Communicates only in the wait: the model adds up computation and communication, which must not overlap."""

        def wait() -> None:
            self.all_reduce_(tensor, row)

        return wait


class Rehearsal(WatchedWire):
    """A wire without a network, on which other ranks' recorded payloads arrive at once.

    Gathers and ORs use the recorded payloads. A sum is this rank's part alone: its values do not change how long
    methods then compute.

    Attributes:
        recorded: For each recorded exchange, what was handed to each collective.
    """

    def __init__(self) -> None:
        # The wire's own constructor needs a process group.
        self.group, self.row, self.backend, self.rank = None, GRADIENTS, "gloo", 0
        self.step, self.failures, self.closing, self.watch = None, [], [], Watch()
        self.recorded: list[list[Tensor]] = []
        self.take_part(1)

    def take_part(self, world_size: int) -> None:
        """Sets the number of ranks from now on; with 1, payloads are recorded."""
        self.world_size = world_size
        self.ledger = Ledger(world_size)

    def _others(self) -> list[Tensor]:
        """What the other ranks hand to the current collective."""
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
    """Random, heavy-tailed gradients that differ by rank and step, without the time to draw new ones."""

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        normal = torch.randn(2 * size, generator=torch.Generator().manual_seed(seed))
        self._source = normal.mul_(normal.abs())

    def __call__(self, number: int) -> Tensor:
        begin = number * STRIDE % self.size
        return self._source[begin : begin + self.size]


def shapes(elements: int) -> list[tuple[int, ...]]:
    """Shapes of four square weights and their biases, with about so many elements in all."""
    width = max(2, round(math.sqrt(elements / 4)))
    return [(width, width), (width,)] * 4


class Replica:
    """A rank's model without data: gradients come from outside, everything else is as in training.

    Args:
        contender: How gradients are shared.
        wire: Where to communicate.
        elements: Approximate number of parameters.
    """

    def __init__(self, contender: Contender, wire: WatchedWire, elements: int) -> None:
        self.module = nn.Module()
        self.module.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes(elements))
        self.parameters = list(self.module.parameters())
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.gradient = torch.zeros(self.size)
        self.wire = wire
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.engine: Engine | None = None
        if contender.method is not None:
            self.engine = Engine(contender.method(), wire)
            self.engine.registry.add_module(self.module)
            self.engine.registry.check()

    def step(self, gradient: Tensor, meet: Callable[[], object]) -> None:
        """One optimizer step. `wire.watch` measures the exchanges, and not the optimizer.

        Args:
            gradient: Gradient of all parameters, `[size]`.
            meet: Called before the watch starts, so that ranks begin together.
        """
        self.gradient.copy_(gradient)
        for parameter, part in zip(
            self.parameters, self.gradient.split([parameter.numel() for parameter in self.parameters])
        ):
            parameter.grad = part.view(parameter.shape)
        watch = self.wire.watch
        watch.clear()
        if self.engine is None:
            meet()
            watch.resume()
            # As in ddp's buckets, but in one collective, the best case.
            self.wire.all_reduce_(self.gradient.div_(self.wire.world_size))
            watch.pause()
            return
        stepping = self.engine.stepping(self.optimizer)
        stepping.__enter__()
        meet()
        watch.resume()
        self.engine.synchronize(self.optimizer)
        watch.pause()
        self.optimizer.step()
        # Weights are exchanged after a step.
        meet()
        watch.resume()
        stepping.__exit__(None, None, None)
        watch.pause()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


class Measured(NamedTuple):
    """One exchange of one rank.

    Attributes:
        seconds: Wall-clock time since all ranks began.
        cpu_seconds: Processor time of all threads of the process.
        computed_seconds: Processor time of the exchanging thread, outside of collectives; comparable to a rehearsal.
        link_bytes: Bytes on the link, by the ledger's rules.
        interface_bytes: Bytes that the rank's interface sent; None if others use it too.
    """

    seconds: float
    cpu_seconds: float
    computed_seconds: float
    link_bytes: float
    interface_bytes: int | None


class Probe(NamedTuple):
    """One collective on its own: wall-clock time, and processor time of all threads."""

    seconds: float
    cpu_seconds: float


def gathered_elements(size: int) -> int:
    """Size of the all-gather that measures the cost of bytes: some megabytes, much more than the lab's burst."""
    return max(2, size // 8)


class RankResult(NamedTuple):
    """What one rank measured: each contender's exchanges of `size` elements, and a tiny and two large collectives."""

    exchanges: dict[str, list[Measured]]
    size: int
    tiny: list[Probe]
    reduce: list[Probe]
    gather: list[Probe]


def measure_rank(rank: int, options: argparse.Namespace, ranks: int, store: str, barrier: Barrier) -> RankResult:
    """What each process does: exchanges with all contenders in turns."""
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
        # Spread over the whole time, since each is so short.
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
    destroy_all()
    return RankResult(exchanges, size, tiny, reduce, gather)


def measure(options: argparse.Namespace, ranks: int) -> list[RankResult]:
    """What each of so many processes measures."""
    barrier = FORK.Barrier(ranks)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, ranks, f"{folder}/store", barrier)
        if options.rate != LOOPBACK:
            # With all contenders, and two collectives.
            exchanges = (WARM_UP_EXCHANGES + options.repetitions) * (len(CONTENDERS) + 2)
            # Ten million elements take a rank a few tenths of a second, and here ranks share cores.
            computing_seconds = 5.0 * ranks * max(1, options.elements / 1e7)
            timeout = patience_seconds(exchanges, options.elements, options.rate, computing_seconds)
            with Lab(ranks, options.rate) as lab:
                return lab.run(measure_rank, *arguments, timeout=timeout)
        return in_processes(ranks, measure_rank, *arguments)


def in_processes(count: int, function: Callable[..., RankResult], *arguments: object) -> list[RankResult]:
    """Results of `function(rank, *arguments)` in so many forked processes, by rank."""
    with ProcessPoolExecutor(count, mp_context=FORK, initializer=_inherit, initargs=arguments) as pool:
        return [each.result() for each in [pool.submit(_call, function, rank) for rank in range(count)]]


_inherited: tuple[object, ...] = ()


def _inherit(*arguments: object) -> None:
    """A barrier can only be passed to a process when it starts."""
    global _inherited
    _inherited = arguments


def _call(function: Callable[..., RankResult], rank: int) -> RankResult:
    return function(rank, *_inherited)


class Rehearsed(NamedTuple):
    """One exchange of one rank without a network, for a given number of ranks.

    Attributes:
        before: Processor time before the first collective: memories, selection, coding.
        after: Processor time after it: decoding, adding up, writing.
        calls: The collectives.
    """

    before: float
    after: float
    calls: list[Call]


def believed_length(number: int, seed: int, most: int, rank: int) -> int:
    """`open_length` for a recorded length, whose checksum is of the round in which it was recorded."""
    return open_length(seal_length(number & 2**40 - 1, seed), seed, most, rank)


@patch.object(gather, "open_length", believed_length)
def rehearse(rank: int, options: argparse.Namespace, worlds: list[int]) -> dict[str, dict[int, Rehearsed]]:
    """What each contender's exchange costs a rank without a network, by the number of ranks; medians."""
    torch.set_num_threads(1)
    result: dict[str, dict[int, Rehearsed]] = {}
    for name, contender in CONTENDERS.items():
        wire = Rehearsal()
        replica = Replica(contender, wire, options.elements)
        gradients = Gradients(1, replica.size)

        def meet() -> None:
            """There is nobody to wait for."""

        for other in range(min(DISTINCT_RANKS, max(worlds))):
            wire.recorded.append([])
            if replica.engine is not None:
                # Plays another rank, whose memories are empty.
                replica.engine.restart()
            replica.step(gradients(100 * other), meet)
        if replica.engine is not None:
            replica.engine.restart()
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
    """Measured costs of collectives.

    Attributes:
        call_seconds: Cost of a call, however few bytes and hops it has.
        hop_seconds: Cost of each hop, which must wait for the one before.
        byte_seconds: Cost of each byte on the link, by collective.
        byte_cpu_seconds: Processor time of a rank for each byte.
    """

    call_seconds: float
    hop_seconds: float
    byte_seconds: dict[Collective, float]
    byte_cpu_seconds: dict[Collective, float]

    @classmethod
    def of(cls, measured: dict[int, list[RankResult]]) -> "Constants":
        """The constants, from tiny and large collectives with all measured numbers of ranks.

        Bytes count where they took least time: with other numbers, ranks shared cores or had nothing to overlap.
        """
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
        """Cost of each byte on the link where so many ranks share a core.

        An all-reduce works in segments, so its computation hides behind the network while there are enough cores. An
        all-gather copies its result once all has arrived.
        """
        seconds, cpu_seconds = self.byte_seconds[collective], self.byte_cpu_seconds[collective]
        return (
            max(seconds, sharing * cpu_seconds) if collective == "all_reduce" else seconds + (sharing - 1) * cpu_seconds
        )


def ranks_per_core(ranks: int) -> float:
    """How many ranks share a core of this machine; at least 1."""
    return max(1.0, ranks / cores())


def hops(collective: Collective, ranks: int) -> int:
    """Messages that wait for each other, in a ring such as Gloo's."""
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


def slowest(of_ranks: list[list[Probe]]) -> float:
    """The slowest rank's seconds, median over repetitions."""
    return statistics.median(max(each.seconds for each in together) for together in zip(*of_ranks))


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares; through zero if one of them would be negative."""
    if len(points) > 1:
        slope, intercept = statistics.linear_regression(*zip(*points))
        if slope >= 0 and intercept >= 0:
            return intercept, slope
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)


class Cost(NamedTuple):
    """Modelled seconds of an exchange, per optimizer step: computation before and after the first collective, hops, and
    bytes on the link."""

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
            constants: What collectives cost.
            ranks: Number of ranks.
            steps: Optimizer steps per exchange.
            sharing: Ranks that share a core; at least 1. All compute at the same time, so it takes that many times as
                long.
        """
        latency = bandwidth = 0.0
        for kind, handed_bytes in rehearsed.calls:
            latency += constants.call_seconds + constants.hop_seconds * hops(kind, ranks)
            bandwidth += constants.bytes_seconds(kind, sharing) * link_bytes(kind, handed_bytes, ranks)
        computed = rehearsed.before * sharing, rehearsed.after * sharing
        return cls(*(part / steps for part in (*computed, latency, bandwidth)))


class Row(NamedTuple):
    """One method with one number of ranks; per optimizer step. None stands for what was not measured.

    Attributes:
        method: Its name in CONTENDERS.
        ranks: Number of ranks.
        link_bytes: Bytes a rank puts on the link, by the collectives of the rehearsal.
        interface_bytes: Bytes that its interface counted, with all headers.
        seconds, lower, upper: Measured time of the slowest rank: median and quartiles of exchanges.
        cpu_seconds: Measured processor time of all threads of a rank; median.
        here: The model of the measurement: all ranks on this machine's cores.
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
    """The row of a method with so many ranks; `results` if it was measured."""
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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def break_even(name: str, costs: dict[str, dict[int, float]]) -> str:
    """In words: from how many ranks on a method costs more than ddp, by the model with a machine for each rank."""
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
    """Draws seconds against ranks: models as lines, measurements as points with quartiles."""
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
    """Processor time of all processes on this machine, and of this one with its finished children; zeros unless on
    Linux."""

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
        """The fraction of the machine's cores that others used in these seconds."""
        used = (self.everyone - earlier.everyone) - (self.ours - earlier.ours)
        return max(0.0, used) / (seconds * (os.cpu_count() or 1))


def plain(value: object) -> object:
    """The same with named tuples as dictionaries, for JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--elements", type=int, default=10_000_000, help="approximate number of parameters")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks to measure, one thread each")
    add("--to", type=int, default=1024, help="largest number of ranks to model")
    add(
        "--rate",
        default="1gbit",
        help=f"rate of each rank's cable in the lab: 100mbit, 1gbit, ...; or {LOOPBACK}, without the lab",
    )
    add("--repetitions", type=int, default=10, help="measured exchanges with each method")
    add("--rehearsals", type=int, default=5, help="rehearsed exchanges with each method and number of ranks")
    add("--output", type=Path, default=None, help="JSON file for all measurements")
    add("--plot", type=Path, default=None, help="PNG file for the plot")
    options = parser.parse_args()
    if min(options.elements, options.rehearsals) < 1 or min(options.repetitions, options.to, *options.ranks) < 2:
        parser.error("--ranks, --to and --repetitions must be at least 2, --elements and --rehearsals at least 1")
    for path in (options.output, options.plot):
        # Better now than at the end.
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"the folder of {path} must exist")
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
    """Prints the table, how far the model is off, and where each method stops paying off."""
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
