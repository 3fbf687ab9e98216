"""Replicas that are killed and started again while they train, beside the same training left alone.

    python benchmarks/churn.py --data-dir DIR --minutes 30

Each method trains with `--replicas` on this machine. Every `--kill-every` seconds one of them, in turn, is killed by
SIGKILL and started again at once; none in the last minute. A lighthouse of `sparsecomm lighthouse` serves it. Then the
same training, with as many steps, is left alone, with `--seeds` seeds. Replicas share this machine's cores, so each
step sleeps until it has taken `--step-ms`, as if an accelerator computed it; one that is started again is then in
nobody's way. Trainings that nobody kills do not sleep. Each training has a network of its own, whose kernel counts
bytes: `--at-once` runs all those with kills together.

Prints for each method

- made: optimizer steps of all replicas, killed ones included, by those that they could have made in the time from when
  they had the weights to when they were killed. What a step takes is measured before the first kill.
- counted: the same, without steps that are in no weights: those of a killed replica since its last exchange.
- repeated: exchanges that failed, the most of a kill, and all by all kills.
- back: seconds from a kill until the same replica takes steps from weights of the others: starting Python, imports and
  reading the data included.
- equal bits: comparisons of the weights of all replicas after a round, and how many of them differed.
- bytes: what crossed the network, headers and connections included, by replica and step.
- loss: on held-out data, beside the mean and the standard deviation of trainings that are left alone.

`torchft` is torchft's own DiLoCo in the same harness.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from lighthouses import lighthouse
from namespaces import FORK, make, run_commands
from network import Counters
from runs import COMMIT, load, made_with, save, versions

METHODS = ["sparse_loco(every=30)", "diloco(every=30)", "gradient_dropping(density=0.01)", "torchft"]
HEARTBEAT = "2s"
LAST_SECONDS = 60.0
"""No replica is killed in what remains of a run by then: one that comes too late would begin a run of its own."""

Line = dict[str, Any]


class Process(NamedTuple):
    """A replica's process, from its start to its end.

    Attributes:
        name: Of the replica.
        running: The process.
        path: What it prints.
    """

    name: str
    running: "subprocess.Popen[bytes]"
    path: Path

    @property
    def lines(self) -> list[Line]:
        """What it has printed so far; one that was killed may have left half a line."""
        return [json.loads(line) for line in self.path.read_text().splitlines() if line[:1] == "{" and line[-1:] == "}"]


class Fleet:
    """The replicas of one run.

    Args:
        options: Of the command.
        method: What they exchange by.
        seed: Of the run.
        step_ms: What a step takes at least.
        address: Of the lighthouse.
    """

    def __init__(self, options: argparse.Namespace, method: str, seed: int, step_ms: float, address: str) -> None:
        self._options, self._method, self._seed = options, method, seed
        self._step_ms, self._address = step_ms, address
        self.all: list[Process] = []
        self.now: dict[str, Process] = {}
        name = f"{method.partition('(')[0]}-{seed}-{int(time.time())}"
        self.folder = Path(options.output).with_suffix("") / name
        self.folder.mkdir(parents=True)

    def start(self, name: str) -> None:
        """Starts a replica, or starts it again."""
        options, path = self._options, self.folder / f"{name}-{len(self.all)}.jsonl"
        said = {"replica": name, "lighthouse": self._address, "method": self._method, "task": options.task}
        said |= {"seed": 1000 * self._seed + len(self.all), "steps": options.steps, "optimizer": options.optimizer}
        said |= {"batch-size": options.batch_size, "step-ms": self._step_ms, "data-dir": options.data_dir}
        if options.local_state and "every" in self._method:
            said["local-state-dir"] = self.folder
        said |= {"compare-every": 1 if "every" in self._method or self._method == "torchft" else 10}
        command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in said.items())]
        # Replicas share the cores: more threads than one would wait for each other.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        with path.open("wb") as out, path.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log, env=environment)
        self.now[name] = Process(name, process, path)
        self.all.append(self.now[name])

    def kill(self, name: str) -> None:
        """Kills a replica, without a word to the others."""
        self.now[name].running.send_signal(signal.SIGKILL)
        self.now[name].running.wait()

    @property
    def begun(self) -> bool:
        """Whether all take steps."""
        return all(any("made" in line for line in process.lines) for process in self.now.values())

    @property
    def ended(self) -> bool:
        return any(process.running.poll() is not None for process in self.now.values())

    def finish(self, timeout: float) -> None:
        """Waits until all have ended. Raises `RuntimeError` if one failed, or hangs."""
        try:
            for process in self.now.values():
                if process.running.wait(timeout) != 0:
                    raise RuntimeError(f"{process.name} has failed; see {process.path.with_suffix('.log')}")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a replica hangs; see {self.folder}") from None
        finally:
            for process in self.all:
                process.running.kill()


def train(options: argparse.Namespace, method: str, seed: int, kill_every: float | None) -> Line:
    """One run of all replicas."""
    names = [f"replica-{number}" for number in range(options.replicas)]
    kills: list[tuple[float, str]] = []
    before = Counters.read("lo")
    with lighthouse("127.0.0.1:0", "--heartbeat-timeout", HEARTBEAT) as address:
        fleet = Fleet(options, method, seed, 0 if kill_every is None else options.step_ms, address)
        for name in names:
            fleet.start(name)
        while not fleet.begun and not fleet.ended:
            time.sleep(0.2)
        begin = time.time()
        victims = itertools.cycle(names)
        last = begin + 60 * options.minutes - LAST_SECONDS
        while not fleet.ended:
            time.sleep(0.2)
            if kill_every is not None and begin + kill_every * (len(kills) + 1) <= min(time.time(), last):
                victim = next(victims)
                kills.append((time.time(), victim))
                fleet.kill(victim)
                fleet.start(victim)
        fleet.finish(options.hang)
    sent = Counters.read("lo").since(before).sent_bytes
    measured = {"method": method, "seed": seed, "steps": options.steps, "kills": len(kills), "commit": COMMIT}
    if kills and options.local_state:
        measured["local_state"] = "every" in method
    return measured | summary(fleet.all, kills, begin, sent)


def summary(processes: Sequence[Process], kills: Sequence[tuple[float, str]], begin: float, sent: float) -> Line:
    """What is told of a run."""
    lines = [process.lines for process in processes]
    steps = [[line for line in some if "made" in line] for some in lines]
    made, counted = (sum(some[-1][name] for some in steps if some) for name in ("made", "counted"))
    ends = [line for some in lines for line in some if "loss" in line]
    found = {
        "seconds": round(max(some[-1]["time"] for some in steps if some) - begin, 1),
        "made": made,
        "counted": counted,
        "bytes": sent,
        "rounds": max(line["round"] for some in steps for line in some),
        **compared(line for some in steps for line in some),
        "ended": len(ends),
        "losses": [line["loss"] for line in ends],
        "accuracies": [line["accuracy"] for line in ends],
    }
    return found | (of_kills(processes, kills, begin) if kills else {})


def compared(steps: Iterator[Line]) -> Line:
    """How often two replicas or more told their weights after the same round, and how often these differed."""
    weights = defaultdict(list)
    for line in steps:
        if "digest" in line:
            weights[line["round"]].append(line["digest"])
    several = [digests for digests in weights.values() if len(digests) > 1]
    return {"compared": len(several), "differed": sum(len(set(digests)) > 1 for digests in several)}


def of_kills(processes: Sequence[Process], kills: Sequence[tuple[float, str]], begin: float) -> Line:
    """What the kills have cost."""
    all_steps = [[line for line in process.lines if "made" in line] for process in processes]
    first = kills[0][0]
    quiet = [line["time"] for some in all_steps for line in some if begin < line["time"] < first]
    rate = len(quiet) / (first - begin) / len({process.name for process in processes})
    possible = 0.0
    for process, some in zip(processes, all_steps):
        # With weights from others: a replica may begin with its own, and get theirs later.
        starts = [line["time"] for line in process.lines if "begin" in line]
        if starts and some:
            possible += rate * (some[-1]["time"] - starts[-1]) + sum(line["time"] < starts[-1] for line in some)
    repeated = [
        max((failures(some, at, until) for some in all_steps), default=0)
        for (at, _), (until, _) in itertools.pairwise([*kills, (float("inf"), "")])
    ]
    back = []
    for at, name in kills:
        again = next((p for p in processes if p.name == name and p.lines and p.lines[0]["time"] > at), None)
        starts = [] if again is None else [line["time"] for line in again.lines if "begin" in line]
        back += [starts[-1] - at] if starts else []
    return {
        "step_ms": 1000 / rate,
        "possible": round(possible),
        "repeated": repeated,
        "back": [round(each, 1) for each in back],
    }


def failures(steps: Sequence[Line], after: float, until: float) -> int:
    """Exchanges that failed on a replica from a time to another."""
    before = [line["repeated"] for line in steps if line["time"] <= after]
    within = [line["repeated"] for line in steps if after < line["time"] <= until]
    return within[-1] - (before[-1] if before else 0) if within else 0


def in_a_network(options: argparse.Namespace, pipe: Connection, *run: Any) -> None:
    """Runs `train` in a network of its own, and sends what it returns."""
    spaces = make(1, loopback)
    spaces.enter(0)
    try:
        pipe.send(train(options, *run))
    except Exception as error:
        pipe.send(error)


def loopback(networks: list[int]) -> list[int]:
    """Sets up a network that has nothing else."""
    run_commands(["ip link set lo up"])
    return []


def trained(
    options: argparse.Namespace, runs: Sequence[tuple[str, int, float | None]], together: bool
) -> Iterator[Line]:
    """Each run's outcome as it ends, in their order."""
    waiting = list(runs)
    while waiting:
        now, waiting = (waiting, []) if together else (waiting[:1], waiting[1:])
        pipes = []
        for each in now:
            here, there = FORK.Pipe()
            FORK.Process(target=in_a_network, args=(options, there, *each)).start()
            there.close()
            pipes.append(here)
        for here in pipes:
            outcome = here.recv()
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome


def table(runs: Sequence[Line]) -> str:
    """Each disturbed run beside the undisturbed ones of its method."""
    lines = [
        "| method | steps | kills | made | counted | repeated, most and all | back, s | compared, differed"
        " | kB a replica's step | loss, left alone | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        if not run["kills"]:
            continue
        alone = [each["losses"][0] for each in runs if each["method"] == run["method"] and not each["kills"]]
        spread = f" ± {statistics.stdev(alone):.3f}" if len(alone) > 1 else ""
        kept = ", local state kept" if run.get("local_state") else ""
        back = f"{statistics.median(run['back']):.1f} (to {max(run['back']):.1f})" if run["back"] else ""
        lines.append(
            f"| `{run['method']}`{kept} | {run['steps']:,} | {run['kills']} | {run['made'] / run['possible']:.1%}"
            f" | {run['counted'] / run['possible']:.1%} | {max(run['repeated'])}, {sum(run['repeated'])} | {back}"
            f" | {run['compared']:,}, {run['differed']} | {run['bytes'] / run['made'] / 1000:.1f}"
            f" | {f'{statistics.mean(alone):.3f}{spread}' if alone else ''} | {run['losses'][0]:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs all that is asked for, or one replica of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    add("--methods", nargs="+", default=METHODS, help="as in Python, or torchft")
    add("--replicas", type=int, default=4)
    add("--seeds", type=int, default=3, help="of trainings that are left alone, besides those of --kill-seeds")
    add("--kill-seeds", type=int, default=1, metavar="N", help="seeds of those with kills; a row for each")
    add("--minutes", type=float, default=30.0, help="of those with kills")
    add("--kill-every", type=float, default=60.0, help="seconds between two kills")
    add("--step-ms", type=float, default=400.0)
    add("--task", default="gpt", help="a network of tasks.py")
    add("--optimizer", choices=["sgd", "adamw"], default="adamw")
    add("--batch-size", type=int, default=32, help="of each replica")
    add("--hang", type=float, default=300.0, help="seconds after which replicas that do not end count as hanging")
    add("--at-once", action="store_true", help="all runs with kills at once")
    add("--output", type=Path, default=Path("churn.json"))
    add("--resume", action="store_true", help="keep the runs in --output")
    add("--only-print", action="store_true", help="print the table of --output")
    add("--local-state", action="store_true", help="replicas keep their local state, where they exchange weights")
    for name in ("--replica", "--lighthouse", "--method", "--local-state-dir"):
        add(name, help=argparse.SUPPRESS)
    for name in ("--steps", "--seed", "--compare-every"):
        add(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is not None:
        # Only here, since a process with threads cannot enter a network.
        import churn_replica

        return churn_replica.main(options)
    options.steps = round(60_000 * options.minutes / options.step_ms / 30) * 30
    settings = {"replicas": options.replicas, "minutes": options.minutes, "kill_every": options.kill_every}
    settings |= {"step_ms": options.step_ms, "task": options.task, "optimizer": options.optimizer} | versions()
    runs: list[Line] = load(options.output, settings, options.resume or options.only_print)
    there = {(run["method"], run["seed"], run["kills"] > 0, run.get("local_state", False)) for run in runs}
    # Seeds of runs with kills: 0, 100, 200 and so on. Others are left alone with the same ones, and with more.
    killed = [(method, 100 * number) for number in range(options.kill_seeds) for method in options.methods]
    disturbed = [
        (*run, options.kill_every)
        for run in killed
        if (*run, True, options.local_state and "every" in run[0]) not in there
    ]
    seeds = [100 * number for number in range(options.kill_seeds)] + list(range(1, options.seeds + 1))
    alone = [(method, seed, None) for seed in seeds for method in options.methods]
    alone = [run for run in alone if (*run[:2], False, False) not in there]
    if not options.only_print:
        for outcome in itertools.chain(trained(options, disturbed, options.at_once), trained(options, alone, False)):
            runs.append(outcome)
            save(runs, options.output, settings)
            print(json.dumps(outcome), file=sys.stderr, flush=True)
    print(table(runs))
    print(f"\n{made_with(each['commit'] for each in runs)}")
    return None


if __name__ == "__main__":
    main()
