"""`sparsecomm lighthouse`: where replicas that come and go find each other."""

import argparse
import threading
from typing import Any

from lightning_sparsecomm.elastic.quorum import load_torchft
from lightning_sparsecomm.planning.quantities import seconds

_LOOKING_SECONDS = 0.5


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lighthouse",
        help="where replicas that come and go find each other",
        description=(
            f"{__doc__} Start it once, on a machine that all replicas reach, and pass the address that it prints to"
            " each: ElasticSparseCommStrategy(lighthouse=...), or TORCHFT_LIGHTHOUSE in the environment. It serves"
            " until it is interrupted. No weights pass through it."
        ),
    )
    add = parser.add_argument
    add("--bind", default="[::]:29510", metavar="HOST:PORT", help="where it listens; [::]:29510 by default")
    add("--min-replicas", type=int, default=1, metavar="N", help="that train, or else all wait; 1 by default")
    add(
        "--join-timeout",
        default="60s",
        metavar="TIME",
        help="how long replicas wait for one that is there, but not in the exchange yet; then they leave it behind, if"
        " they are more than half of those that are there. Longer than the slowest one lags, and than a joining replica"
        " receives; 60s by default",
    )
    add(
        "--heartbeat-timeout",
        default="5s",
        metavar="TIME",
        help="after which a replica that is silent counts as gone; 5s by default",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Serves until it is interrupted."""
    if options.min_replicas < 1:
        raise ValueError(f"--min-replicas must be at least 1; got {options.min_replicas}. Leave it out for 1.")
    join = seconds("--join-timeout", options.join_timeout)
    heartbeat = seconds("--heartbeat-timeout", options.heartbeat_timeout)
    if heartbeat < 0.1:
        raise ValueError(
            f"--heartbeat-timeout must be at least 100ms, as replicas tell ten times a second that they live; got"
            f" {options.heartbeat_timeout!r}. Leave it out for 5s."
        )
    try:
        server = load_torchft().coordination.LighthouseServer(
            bind=options.bind,
            min_replicas=options.min_replicas,
            join_timeout_ms=round(1000 * join),
            quorum_tick_ms=100,
            heartbeat_timeout_ms=round(1000 * heartbeat),
        )
    except RuntimeError as error:
        raise ValueError(
            f"--bind must be an address of this machine with a free port; got {options.bind}, and: {error}. Use port 0"
            " for any."
        ) from error
    except OverflowError as error:
        raise ValueError(
            "--min-replicas and the timeouts must be numbers that 64 bits hold, in milliseconds; got"
            f" {options.min_replicas}, {options.join_timeout} and {options.heartbeat_timeout}. Leave them out for 1,"
            " 60s and 5s."
        ) from error
    try:
        print(f"lighthouse at {_address(options.bind, server.address())}, until interrupted", flush=True)
        never = threading.Event()
        # An interrupt may reach one of the server's own threads, which does not wake this one.
        while not never.wait(_LOOKING_SECONDS):
            pass
    except KeyboardInterrupt:
        server.shutdown()


def _address(bound: str, address: str) -> str:
    """Where replicas reach the server: torchft names this machine, also where it listens at one address only."""
    host = bound.rpartition(":")[0]
    wildcard = host in ("0.0.0.0", "[::]", "")
    return address if wildcard else f"http://{host}:{address.rpartition(':')[2]}"
