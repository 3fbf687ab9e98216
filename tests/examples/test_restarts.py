"""Real torchrun, by the guide's commands: a node is killed, the rest resume without it, and with it when it returns."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# Each start imports Lightning anew, which is slow on a busy machine.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
EVERY, STEPS = 5, 40

# All waits are for events; this only bounds them.
LONGEST_SECONDS = 400


def commands() -> dict[str, str]:
    """The guide's commands for restarts: of the store, and of a node."""
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", guide.partition("## Restarts with torchrun\n")[2], flags=re.MULTILINE)[0]
    store, node = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return {"store": store, "node": node}


class Cluster:
    """Nodes of this machine: agents of torchrun, each with a worker, and the store where they meet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = str(free.getsockname()[1])

    def start(self, kind: str, hold: str = "") -> subprocess.Popen[bytes]:
        """Runs one of the guide's commands here. A node's output goes to a file `node-N` for its number N."""
        command = commands()[kind].replace("\\\n", " ").replace("10.0.0.1", "localhost").replace("29400", self.port)
        words = shlex.split(command)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOLD": hold}
        while re.match(r"\w+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if kind == "node":
            assert words[0] == "torchrun" and words[-1] == "examples/restarts.py"
            script = [str(ROOT / "tests" / "examples" / "restarting.py"), str(self.folder), str(STEPS), str(EVERY)]
            words = ["-m", "torch.distributed.run", *words[1:-1], *script]
        else:
            assert words[0] == "python"
            words = words[1:]
        with (self.folder / f"node-{len(self.processes)}").open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
        self.processes.append(started)
        return started

    def happened(self, event: str, **where: object) -> list[dict[str, Any]]:
        """The events of this kind so far, at some place."""
        path = self.folder / "diary"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == event and where.items() <= line.items()]

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert not any((process.poll() or 0) > 0 for process in self.processes), self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("node-*")))

    def kill(self, agent: subprocess.Popen[bytes], worker: int) -> None:
        """A node is gone at once: the agent, and the worker, which has a session of its own."""
        agent.kill()
        os.kill(worker, signal.SIGKILL)
        agent.wait()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for pid in {event["pid"] for event in self.happened("start")}:
            # It has ended, mostly.
            with suppress(OSError):
                if b"restarting.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        cluster.start("store")
        yield cluster
    finally:
        cluster.end()


def _starts(cluster: Cluster) -> list[tuple[int, int]]:
    """The ranks and the first step of each world, in order; each rank of it has started there."""
    events = [(event["world"], event["step"]) for event in cluster.happened("start")]
    worlds = list(dict.fromkeys(events))
    assert all(events.count(world) == world[0] for world in worlds), events
    return worlds


def _ended_well(cluster: Cluster, world_size: int) -> None:
    """All ranks of the last world have made all steps, are equal, and have learnt."""
    ends = cluster.happened("end")
    assert sorted((end["rank"], end["world"], end["step"]) for end in ends) == [
        (rank, world_size, STEPS) for rank in range(world_size)
    ]
    assert len({end["weights"] for end in ends}) == 1
    # By the step that was made last, if it was made more than once.
    losses = {event["step"]: event["loss"] for event in cluster.happened("step", rank=0)}
    assert sorted(losses) == [*range(1, STEPS + 1)]
    first, last = ([losses[step] for step in steps] for steps in (range(1, 6), range(STEPS - 4, STEPS + 1)))
    assert sum(last) < 0.5 * sum(first)


@pytest.mark.slow
def test_who_is_left_goes_on_alone(cluster: Cluster) -> None:
    """One of two nodes is killed in the midst of a step; it is the one that hosts the ranks' store, and saves."""
    first = cluster.start("node", hold="2:12")
    second = cluster.start("node")
    cluster.wait(lambda: cluster.happened("hold"))
    (held,) = cluster.happened("hold")
    cluster.kill(first, held["pid"])
    assert second.wait(LONGEST_SECONDS) == 0, cluster.logs()
    # What was made of steps 11 and 12 since the last checkpoint is lost, and made again.
    assert _starts(cluster) == [(2, 0), (1, 10)]
    assert "PeerError: rank " in (cluster.folder / "node-2").read_text()
    _ended_well(cluster, 1)


@pytest.mark.slow
def test_a_node_is_killed_and_returns(cluster: Cluster) -> None:
    victim = cluster.start("node", hold="3:12")
    others = [cluster.start("node", hold="2:22") for _ in range(2)]
    cluster.wait(lambda: cluster.happened("hold", world=3))
    (held,) = cluster.happened("hold")
    cluster.kill(victim, held["pid"])
    cluster.wait(lambda: len(cluster.happened("hold", world=2)) == 2)
    returned = cluster.start("node")
    for node in (*others, returned):
        assert node.wait(LONGEST_SECONDS) == 0, cluster.logs()
    assert _starts(cluster) == [(3, 0), (2, 10), (3, 20)]
    assert sum("PeerError: rank " in (cluster.folder / f"node-{number}").read_text() for number in (2, 3)) >= 1
    _ended_well(cluster, 3)
