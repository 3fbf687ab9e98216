"""The lab's cables have the rate that was asked for, its counters count, and it leaves nothing behind.

Where the machine permits no network namespaces, a warning says so, and only refusals are tested. What must end by
itself has no deadline here: pytest's timeout ends the test otherwise.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from benchmarks.network import DEVICE, HEADER_BYTES, Lab, LabError, address, connected, transfer

pytestmark = pytest.mark.filterwarnings("default:the network lab")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "network.py"
LENGTH = 2_000_000


@pytest.fixture(scope="module")
def permitted() -> bool:
    try:
        with Lab(1, "unlimited"):
            return True
    except LabError as error:
        warnings.warn(f"the network lab was not tested: {error}", stacklevel=1)
        return False


@pytest.mark.parametrize(("rate", "shaped"), [("50mbit", "50Mbit"), ("10gbit", "10Gbit")])
def test_every_cable_has_the_rate_in_both_directions(permitted: bool, rate: str, shaped: str) -> None:
    """How fast it then is depends on how busy the machine is: `network.py --check` measures it."""
    if not permitted:
        return
    with Lab(2, rate) as lab:
        found = []
        for namespace in lab._namespaces:
            enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "tc", "qdisc", "show"]
            shown = subprocess.run(enter, capture_output=True, text=True, check=True).stdout
            found += re.findall(r"qdisc tbf \S+ dev (\S+) root .* rate (\S+) .* lat 400ms", shown)
    # Each host, and then the switch.
    assert found == [(device, shaped) for device in (DEVICE, DEVICE, "port0", "port1")]


def test_what_is_sent_is_counted(permitted: bool) -> None:
    if not permitted:
        return
    with Lab(2, "200mbit") as lab:
        (_, sender), (_, receiver) = lab.run(transfer, LENGTH, timeout=60)
    payload_bytes = sender.sent_bytes - HEADER_BYTES * sender.packets
    if not sender.repeated:
        # Addresses are asked for, and connections made.
        assert payload_bytes + 200 >= LENGTH and payload_bytes <= LENGTH + 200
    assert receiver.sent_bytes < LENGTH / 20


def test_check(permitted: bool) -> None:
    """The exit code says whether the rate was reached; here, it may be either."""
    if not permitted:
        return
    done = subprocess.run([sys.executable, SCRIPT, "--check", "--rate=20mbit"], capture_output=True, text=True)
    assert done.returncode in (0, 1) and not done.stderr
    assert re.search(r"asked 20mbit; measured [\d.,]+ Mbit/s: 2\.50 MB in [\d.]+ s\ncounted 2\.", done.stdout)


def _across_processors(rank: int) -> int:
    """Two ranks send to each other, moving from processor to processor; how many packets came out of order."""
    if rank == 0:
        with socket.create_server((address(0), 4000)) as server:
            connection, _ = server.accept()
    else:
        connection = connected()
    piece = bytes(2**17)
    with connection:
        receiver = threading.Thread(target=lambda: [connection.recv(2**17, socket.MSG_WAITALL) for _ in range(400)])
        receiver.start()
        processors = sorted(os.sched_getaffinity(0))
        for number in range(400):
            os.sched_setaffinity(0, {processors[number % len(processors)]})
            connection.sendall(piece)
        receiver.join()
    names, values = (line.split() for line in Path("/proc/self/net/netstat").read_text().splitlines()[:2])
    return int(values[names.index("TCPOFOQueue")])


def test_packets_do_not_overtake_each_other(permitted: bool) -> None:
    """TCP would take those that are late for lost."""
    if not permitted:
        return
    with Lab(2, "unlimited") as lab:
        # A connection that has seen a loss may change its path once.
        assert max(lab.run(_across_processors, timeout=60)) <= 2


def test_a_rank_that_fails_ends_the_others(permitted: bool) -> None:
    if not permitted:
        return

    def one_fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("on purpose")
        time.sleep(600)

    def one_dies(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with Lab(2, "unlimited") as lab:
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*on purpose"):
            lab.run(one_fails, timeout=100)
        with pytest.raises(RuntimeError, match="rank 1 died, exit code -9"):
            lab.run(one_dies, timeout=100)


def test_a_rank_that_hangs_is_named(permitted: bool) -> None:
    if not permitted:
        return
    # Rank 0 needs some of the time to start and end.
    with Lab(3, "unlimited") as lab, pytest.raises(RuntimeError, match="ranks 1, 2 not done after 5 s, and killed"):
        lab.run(lambda rank: time.sleep(600 * (rank > 0)), timeout=5)
    arguments = ["--ranks=2", "--timeout=5", "--", "sh", "-c", "test $RANK = 1 || sleep 600"]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 124 and "rank 0 not done after 5 s, and killed" in done.stderr


def _namespaces() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns" / "net"))
        except OSError:
            continue  # it has ended
    return found


def test_nothing_is_left_of_a_lab_that_is_killed(permitted: bool, tmp_path: Path) -> None:
    """Each rank's command has started a process that the lab does not know of."""
    if not permitted:
        return
    # When a process changes its user, the kernel forgets to kill it with its parent.
    script = f'readlink /proc/self/ns/net > "{tmp_path}/$RANK"; setpriv --reuid 65534 sleep 300 & sleep 301'
    launcher = subprocess.Popen([sys.executable, SCRIPT, "--ranks=2", "--", "sh", "-c", script])
    while len([path for path in tmp_path.glob("*") if path.read_text()]) < 2:
        time.sleep(0.05)
    hosts = {path.read_text().strip() for path in tmp_path.glob("*")}
    assert len(hosts) == 2 and hosts <= _namespaces()
    launcher.kill()
    launcher.wait()
    while hosts & _namespaces():
        time.sleep(0.05)


def test_a_command_runs_on_each_host(permitted: bool, tmp_path: Path) -> None:
    if not permitted:
        return
    # Rank 1 fails, which ends the other, once both have said who they are.
    script = 'test "$GLOO_SOCKET_IFNAME" = eth0 && echo "$MASTER_ADDR $WORLD_SIZE" > "$0/$RANK"'
    script += '; while ! test -s "$0/0"; do sleep 0.05; done; exit $RANK'
    arguments = ["--ranks=2", "--rate=1gbit", "--", "sh", "-c", script, str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert "rank 1 ended with exit code 1; the others are ended too." in done.stderr
    assert "1gbit: " in done.stderr and "MB sent by each rank" in done.stderr
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [f"{address(0)} 2\n"] * 2


def test_a_command_that_is_killed_has_failed(permitted: bool) -> None:
    if not permitted:
        return
    arguments = ["--ranks=1", "--", "sh", "-c", "kill -9 $$"]
    assert subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True).returncode == 128 + 9


def test_what_the_lab_refuses() -> None:
    with pytest.raises(ValueError, match=r"kbit, mbit or gbit a second, or unlimited; got '100'. Try 100mbit"):
        Lab(2, "100")
    with pytest.raises(ValueError, match="from 100kbit to 100gbit: no other can be shaped; got 1kbit"):
        Lab(2, "1kbit")
    with pytest.raises(ValueError, match="from 1 to 250; got 0"):
        Lab(0, "unlimited")
    with pytest.raises(ValueError, match="ranks must be from 1 to 250; got 300"):
        Lab(300, "unlimited")
    for options, sentence in (
        (["--rate=fast", "--", "true"], "a rate must be a number"),
        (["--ranks=300", "--", "true"], "ranks must be from 1 to 250"),
        ([], "a command is missing"),
        (["--check", "--", "true"], "--check takes no command"),
    ):
        done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
        assert done.returncode == 2 and f"error: {sentence}" in done.stderr
