"""The lab's cables have the rate that was asked for, its counters count, and it leaves nothing behind.

Where the machine permits no network namespaces, a warning says so, and only refusals are tested. What must end by
itself has no deadline here: pytest's timeout ends the test otherwise.
"""

import ctypes
import encodings.idna  # noqa: F401  # addresses need it, and an ordinary user may not be allowed to read Python's files
import multiprocessing
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

from benchmarks import network
from benchmarks.network import (
    DEVICE,
    FORK,
    HEADER_BYTES,
    Cable,
    Counters,
    Lab,
    LabError,
    address,
    connected,
    remedy,
    transfer,
)

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
        found = shaped_devices(lab)
    # Each host, and then the switch.
    assert found == [(device, shaped) for device in (DEVICE, DEVICE, "port0", "port1")]


def shaped_devices(lab: Lab) -> list[tuple[str, str]]:
    """The names and rates of all hosts' devices, then those of the switch's."""
    found = []
    assert lab._namespaces is not None
    for namespace in lab._namespaces.networks:
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "tc", "qdisc", "show"]
        shown = subprocess.run(enter, capture_output=True, text=True, check=True).stdout
        found += re.findall(r"qdisc tbf \S+ dev (\S+) root .* rate (\S+) .* lat 400ms", shown)
    return found


@pytest.mark.parametrize(("length", "devices"), [("", 4), (", rtt 20ms", 2)])
def test_cables_change_their_rate(permitted: bool, length: str, devices: int) -> None:
    if not permitted:
        return
    with Lab(2, f"50mbit{length}") as lab:
        now = FORK.Event()
        lab.change_rate("80mbit", now.wait)
        assert not lab.has_changed
        assert {rate for _, rate in shaped_devices(lab)} == {"50Mbit"}
        now.set()
        assert lab._changer is not None
        lab._changer.join(60)
        assert lab.has_changed
        assert [rate for _, rate in shaped_devices(lab)] == ["80Mbit"] * devices
        lab._judge = lambda: None  # type: ignore[method-assign]
        (_, sender), _ = lab.run(transfer, LENGTH, timeout=60)
    assert sender.sent_bytes > LENGTH


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
    assert re.search(r"\| 0 → 1 \| rate, Mbit/s \| 20 \| [\d.]+ \| [-+][\d.]+% \| — \| (yes|NO) \|", done.stdout)


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


LONG = "200mbit, rtt 40ms, jitter 10ms, loss 1%"


def _exchange(rank: int, count: int) -> tuple[float, bool, int]:
    """Rank 0 sends so many bytes; the shortest of 20 round trips, whether all arrived, and what was sent again."""
    if rank == 0:
        with socket.create_server((address(0), 4000)) as server:
            connection, _ = server.accept()
    else:
        connection = connected()
    data = bytes(range(256)) * (count // 256)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(20):
            begin = time.monotonic()
            if rank == 0:
                connection.sendall(b"?")
            connection.recv(1)
            if rank == 1:
                connection.sendall(b"!")
            trips.append(time.monotonic() - begin)
        whole = True
        if rank == 0:
            connection.sendall(data)
            connection.recv(1)
        else:
            arrived = b""
            while len(arrived) < len(data):
                arrived += connection.recv(2**18)
            whole = arrived == data
            connection.sendall(b"!")
    return min(trips), whole, Counters.read(DEVICE).repeated


def test_a_cable_with_length_delays_and_loses(permitted: bool) -> None:
    """The delay has a lower bound. How long it really is depends on how busy the machine is; `--check` measures it."""
    if not permitted:
        return
    with Lab(2, LONG) as lab:
        lab._judge = lambda: None  # type: ignore[method-assign]
        (trip, _, repeated), (_, whole, _) = lab.run(_exchange, LENGTH, timeout=100)
        report = lab.report()
    assert whole and trip >= 0.03 - 0.001
    assert report.packets > LENGTH / 1500 and report.lost > 0 and repeated > 0


def _largest(rank: int) -> int:
    """The packets that the kernel sends as one, at most."""
    shown = subprocess.run(["ip", "-d", "link", "show", DEVICE], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"gso_max_segs (\d+)", shown)[0])


@pytest.mark.parametrize(("rate", "packets"), [("100mbit", 16), ("1mbit", 1)])
def test_large_packets_fit_into_the_token_bucket(permitted: bool, rate: str, packets: int) -> None:
    """The kernel would cut larger ones, and the switch would have ten times as many to carry."""
    if not permitted:
        return
    with Lab(2, f"{rate}, rtt 20ms") as lab:
        assert lab.run(_largest, timeout=60) == [packets] * 2
    assert packets * 1514 <= network._burst_bytes(int(rate[:-4]) * 10**6)


def _where(rank: int) -> tuple[str, ...]:
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return (*(os.environ[name] for name in names), os.readlink("/proc/self/ns/net"))


def test_the_ranks_of_a_node_share_a_host(permitted: bool) -> None:
    if not permitted:
        return
    with Lab(4, "100mbit, rtt 20ms", ranks_per_node=2, inside="10gbit") as lab:
        *places, hosts = zip(*lab.run(_where, timeout=60))
    assert [" ".join(place) for place in zip(*places)] == ["0 0 0 4 2 2", "1 0 1 4 2 2", "2 1 0 4 2 2", "3 1 1 4 2 2"]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_between_two_hosts_the_worse_of_their_cables_counts() -> None:
    slow = Cable("10mbit", rtt="200ms", jitter="5ms")
    lab = Lab(4, Cable("1gbit", up="100mbit", loss="1%"), {3: slow})
    assert lab.trip(0, 1) == (0.0, 0.0, 0.01) and lab.trip(0, 3) == lab.trip(3, 0) == (0.1, 0.005, 0.01)
    assert (lab.rates(0, 1), lab.rates(0, 3), lab.rates(3, 0)) == ((10**8, 10**9), (10**8, 10**7), (10**7, 10**9))


def test_a_switch_that_is_late_is_refused(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        return
    monkeypatch.setattr(network, "LATE_SHARE", 0.0)
    monkeypatch.setattr(network, "LATE_SECONDS", 0.0)
    refused = r"the switch could not keep up: its [\d,]+ packets were [\d.]+ ms late on average, .* 0.00 ms on average"
    with Lab(2, "100mbit, rtt 20ms") as lab, pytest.raises(LabError, match=refused):
        lab.run(_exchange, 25_600, timeout=100)


def _as_an_ordinary_user(outcome: "multiprocessing.Queue[str]") -> None:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            # A process that has been root may not write its own files in /proc.
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        for rate in ("200mbit", "200mbit, rtt 10ms"):
            with Lab(2, rate) as lab:
                lab._judge = lambda: None  # type: ignore[method-assign]
                assert [whole for _, whole, _ in lab.run(_exchange, 25_600, timeout=100)] == [True, True]
                assert lab.run_command(["sh", "-c", "test $(id -u) = 0"]) == 0
        outcome.put("done")
    except BaseException as error:
        outcome.put(f"{type(error).__name__}: {error}")


def test_an_ordinary_user_has_a_lab_too(permitted: bool) -> None:
    """Where the machine allows user namespaces and TAP devices; where it does not, the error says what to change."""
    if not permitted:
        return
    outcome = FORK.Queue()
    process = FORK.Process(target=_as_an_ordinary_user, args=(outcome,))
    process.start()
    said = outcome.get()
    process.join()
    refusals = ["LabError: network namespaces are not allowed here: .* Run it with sudo"]
    if os.stat("/dev/net/tun").st_mode & 0o006 != 0o006:
        refusals.append("LabError: a network with rtt or loss needs TAP devices, .*/dev/net/tun.* Run it with sudo")
    assert said == "done" or any(re.match(each, said) for each in refusals), said


def test_what_forbids_namespaces_is_named(tmp_path: Path) -> None:
    for name, value in (("kernel/unprivileged_userns_clone", "0"), ("user/max_user_namespaces", "100")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"{value}\n")
    assert remedy(tmp_path) == (
        "Run it with sudo, or allow user namespaces (sudo sysctl -w kernel.unprivileged_userns_clone=1), or in a"
        " container, start that with --privileged."
    )
    assert "sysctl" not in remedy(tmp_path / "none")


def test_a_missing_device_is_named(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        return

    def missing(name: str) -> int:
        raise FileNotFoundError(2, "No such file or directory", "/dev/net/tun")

    monkeypatch.setattr(network, "open_device", missing)
    with pytest.raises(LabError, match=r"/dev/net/tun is missing.*sudo modprobe tun.*--device /dev/net/tun"):
        Lab(2, "100mbit, rtt 20ms").__enter__()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--rate=50mbit", "--rtt=100ms", "--jitter=10ms", "--loss=0.1%"],
        ["--up=20mbit", "--down=200mbit", "--rtt=20ms"],
        ["--ranks=4", "--rate=100mbit", "--rank=3:rate=10mbit,rtt=200ms"],
        ["--nodes=2x2", "--rate=100mbit", "--rtt=20ms", "--inside=10gbit"],
    ],
)
def test_scenarios_are_checked(permitted: bool, options: list[str]) -> None:
    """On a busy machine, the check may refuse; it then says so."""
    if not permitted:
        return
    done = subprocess.run([sys.executable, SCRIPT, "--check", *options], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or "This is not the network that was asked for" in said or "could not keep up" in said
    assert "| rtt, ms |" in done.stdout and "Traceback" not in said


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


@pytest.mark.slow
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
        (["--rtt=100", "--check"], "rtt must be a number with its unit, ms or s; got '100'. Try 100ms."),
        (["--loss=200%", "--check"], "loss must be from 0% to 50%"),
        (["--rank=2:rate=1gbit", "--check"], "--rank must be a number from 0 to 1, a colon, and what differs there"),
        (["--rank=1:speed=1gbit", "--check"], "a cable's properties must be NAME=VALUE with names among rate, up"),
        (["--node=1:rate=1gbit", "--check"], "--node 1:rate=1gbit needs --nodes"),
        (["--nodes=2x2", "--rank=1:rate=1gbit", "--check"], "--rank 1:rate=1gbit is for hosts with one rank"),
        (["--nodes=4", "--check"], "--nodes must be hosts x ranks on each; got '4'. Try 2x2."),
        (["--nodes=2x2", "--ranks=4", "--check"], "--nodes says how many ranks there are; got --ranks 4 too"),
        (["--inside=1gbit", "--check"], "--inside 1gbit needs --nodes"),
        (["--rtt=20ms", "--rank=1:rate=10gbit", "--check"], "with rtt or loss, rate must be at most 1gbit"),
        (["--then=60:50mbit", "--", "true"], "--then must be a number with its unit, ms or s; got '60'. Try 60ms."),
        (["--then=60s", "--", "true"], "--then must be a time, a colon and a rate; got '60s'. Try 60s:50mbit."),
        (
            ["--then=60s:unlimited", "--", "true"],
            "cables cannot change to unlimited, which nothing shapes. Try 100gbit",
        ),
        (["--rtt=20ms", "--then=1s:10gbit", "--", "true"], "with rtt or loss, rate must be at most 1gbit"),
        (["--then=60s:1gbit", "--check"], "--check measures a network that stays as it is"),
    ):
        done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True)
        assert done.returncode == 2 and f"error: {sentence}" in done.stderr
