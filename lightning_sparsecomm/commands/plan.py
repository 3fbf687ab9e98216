"""`sparsecomm plan`: what a step would take with ddp and with each method, over a network that you describe."""

import argparse
import json
import math
import sys
import time
from typing import Any, get_args

from lightning_sparsecomm.basis.arguments import renamed
from lightning_sparsecomm.methods.auto import Quality
from lightning_sparsecomm.planning import Network, Work, plan, square_layers
from lightning_sparsecomm.planning.planner import optimizer_for
from lightning_sparsecomm.planning.quantities import bits_per_second, count, seconds

# Of a core, for rehearsals that compute all the time.
_LEAST_SHARE = 0.9

# The line's beginning, and all that follows removed.
_CLEAR = "\r\x1b[K"

_LEGEND = """
*: the fastest of those that --quality allows; the others are marked +. Rows without a mark are for you to choose: they
let ranks drift between exchanges, or need a density or a learning rate of your own (docs/choosing.md).
by ddp's: the step as a multiple of ddp's. coding: what the method computes. waiting: what is left of the network after
overlap. kept: memory of residuals and the like."""


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="predict a step with each method, and choose",
        description=f"{__doc__} Coding is rehearsed on this processor, so run it on one like those that will train.",
    )
    add = parser.add_argument
    add("--parameters", required=True, metavar="N", help="of the model: 11000000, 11M, 1.5B")
    add("--ranks", required=True, type=int, metavar="N", help="processes that train together")
    add("--bandwidth", required=True, metavar="RATE", help="that each rank can send: 100mbit, 1gbit, unlimited")
    add("--compute", required=True, metavar="TIME", help="of a step on one rank without exchange: 300ms")
    add("--rtt", default="0", metavar="TIME", help="round-trip time between ranks, as ping shows: 20ms; 0 by default")
    add("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="sgd has momentum 0.9; the default")
    add("--steps", metavar="N", help="of the whole run, which the default's density follows; unknown by default")
    add("--straggler", type=float, default=1.0, metavar="X", help="how much slower the slowest rank computes; 1")
    add("--quality", choices=get_args(Quality), default="trained", help="what may be chosen; trained by default")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the plan."""
    parameters = square_layers(count("--parameters", options.parameters))
    network = Network(bits_per_second("--bandwidth", options.bandwidth), seconds("--rtt", options.rtt))
    with renamed(straggler="--straggler"):
        work = Work(seconds("--compute", options.compute), straggler=options.straggler)
    length = math.inf if options.steps is None else float(count("--steps", options.steps))
    optimizer = optimizer_for(options.optimizer, parameters)
    if options.ranks < 1:
        raise ValueError(f"--ranks must be at least 1; got {options.ranks}. Give the number of processes that train.")
    # This thread's: with several, their times would add up to more than there is.
    begin, used = time.perf_counter(), time.thread_time()
    print("sparsecomm: rehearsing each method on this processor, which may take minutes", file=sys.stderr)
    on_terminal = sys.stderr.isatty()
    progress = _show if on_terminal else None
    result = plan([(optimizer, parameters)], options.ranks, network, work, length, options.quality, progress=progress)
    if on_terminal:
        print(_CLEAR, end="", file=sys.stderr, flush=True)
    print(json.dumps(result.as_dict(), indent=1) if options.json else result.table())
    if not options.json:
        print(_LEGEND)
        if length == math.inf:
            print("Without --steps, sparsecomm is planned for a run of unknown length: it sends as one of 5,000.")
        for name, reason in result.refused.items():
            print(f"Left out: {name}. {reason}")
    share = (time.thread_time() - used) / (time.perf_counter() - begin)
    if share < _LEAST_SHARE:
        print(
            f"sparsecomm: other work has taken the processor ({share:.0%} was left for rehearsals), so coding seems"
            " slower than it is: plan again when this machine is idle.",
            file=sys.stderr,
        )


def _show(name: str, number: int, of: int) -> None:
    print(f"{_CLEAR}{number} of {of}: {name}", end="", file=sys.stderr, flush=True)
