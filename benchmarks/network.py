"""A slow network on one machine: each rank has its own host, and all hosts are on one switch.

Runs a command once per rank, with torchrun's environment variables. A Lightning script needs
`Trainer(devices=1, num_nodes=int(os.environ["WORLD_SIZE"]))`. Hosts are network namespaces: nothing outside them
changes, and the kernel removes them with the last process in them, however it ends. Needs Linux, root, and the
commands ip, tc and unshare (packages iproute2 and util-linux).

`--check` runs no command: it measures how fast the lab's network is, beside the rate that was asked for.
"""

import argparse
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

FORK = multiprocessing.get_context("fork")

UNLIMITED = "unlimited"
DEVICE = "eth0"  # of each host
_PORT = 4000  # free on each host, which is new

# The token bucket holds what the rate carries in this time. A smaller bucket is refilled too rarely to reach the rate,
# and a larger one lets short messages pass at once.
BURST_SECONDS = 0.002

SLOWEST, FASTEST = 10**5, 10**11  # bits a second

# A packet that would wait longer is dropped, as by a switch with a full buffer. All flows share one queue, first come,
# first served: beside a large message, a small one waits about 15 ms at each cable of 100 Mbit instead of 1 ms. Fair
# queues (fq_codel, sfq) are modules that many kernels lack, and results must not depend on them.
QUEUE_SECONDS = 0.4

# Ethernet 14, IPv4 20, TCP 20, its timestamps 12.
HEADER_BYTES = 66

# What Gloo adds to each message: about 185 bytes in an all-reduce or an all-gather, 90 to 150 in a broadcast.
MESSAGE_BYTES = 185

# What --check sends: a second's worth, of which the token bucket is a small part, but no more than this.
MOST_CHECKED_BYTES = 200_000_000
TOLERANCE = 0.25

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_PRIVILEGES = "Run it with sudo, or as root in a container that is started with --privileged."


class LabError(RuntimeError):
    """The lab cannot be set up here; the message says what is missing."""


class Counters(NamedTuple):
    """What a network device has sent since it was made, and what TCP in its namespace has sent again.

    Attributes:
        sent_bytes: Bytes with headers; segments that the kernel sends as one packet have one header.
        packets: Packets sent.
        repeated: TCP segments sent again.
    """

    sent_bytes: int
    packets: int
    repeated: int

    @classmethod
    def read(cls, device: str) -> "Counters":
        """The counters of a device in this process's namespace; zeros on systems other than Linux."""
        if not Path("/proc/self/net/snmp").exists():
            return cls(0, 0, 0)
        # /sys/class/net would show the namespace in which it was mounted.
        devices = dict(line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line)
        fields = {name.strip(): values.split() for name, values in devices.items()}[device]
        names, values = (
            line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
        )
        return cls(int(fields[8]), int(fields[9]), int(values[names.index("RetransSegs")]))

    def since(self, earlier: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(self, earlier)))


def bits_per_second(rate: str) -> int | None:
    """The number for a rate such as `100mbit`; None for `unlimited`.

    Raises:
        ValueError: Not a rate, or one that cannot be shaped.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"([0-9]+)(kbit|mbit|gbit)", rate)
    if match is None or not int(match[1]):
        raise ValueError(
            f"a rate must be a number of kbit, mbit or gbit a second, or {UNLIMITED}; got {rate!r}. Try 100mbit."
        )
    bits = int(match[1]) * _UNITS[match[2]]
    if not SLOWEST <= bits <= FASTEST:
        raise ValueError(f"a rate must be from 100kbit to 100gbit: no other can be shaped; got {rate}.")
    return bits


def machine() -> dict[str, int | str]:
    """What all hosts share: processors, and TCP's congestion control, which a namespace cannot choose freely."""
    file = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cores": os.cpu_count() or 1,
        "congestion control": file.read_text().strip() if file.exists() else "unknown",
    }


def messages_of(collective: str, ranks: int) -> float:
    """Messages that a rank sends, averaged over W ranks: 2 (W-1) in a ring all-reduce, W-1 in an all-gather, (W-1) / W
    in a broadcast."""
    return {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "broadcast": (ranks - 1) / ranks}[collective]


def patience_seconds(exchanges: int, floats: int, rate: str, computing_seconds: float) -> float:
    """A timeout for `Lab.run` that only a rank that hangs exceeds.

    Args:
        exchanges: Exchanges of gradients, warm-up included.
        floats: Elements of a gradient. A rank sends nearly two gradients in a ring all-reduce; six are allowed for.
        rate: Rate of each cable.
        computing_seconds: The most that a rank computes between two exchanges.
    """
    bits = bits_per_second(rate)
    sending_seconds = 0.0 if bits is None else 6 * 32 * floats / bits
    # Ten minutes to import, compile, read data and connect.
    return 600 + exchanges * (computing_seconds + sending_seconds)


class Lab:
    """Hosts on a switch, each with a cable of `rate` in both directions. Use it in a `with` statement: that makes the
    hosts, and the constructor only checks its arguments.

    Args:
        ranks: Number of hosts; one rank runs on each.
        rate: Rate of each cable: `100mbit`, `1gbit`, ..., or `unlimited`.

    Raises:
        ValueError: Too many or too few ranks, or not a rate.
        LabError: Not Linux, not root, or a command is missing.
    """

    def __init__(self, ranks: int, rate: str) -> None:
        if not 1 <= ranks <= 250:
            raise ValueError(f"ranks must be from 1 to 250; got {ranks}.")
        self.ranks = ranks
        self.rate = rate
        self._shaping = _shaping(rate)
        self._namespaces: list[int] = []

    def __enter__(self) -> "Lab":
        if not sys.platform.startswith("linux"):
            raise LabError(f"the network lab needs Linux, for its network namespaces; this is {sys.platform}.")
        missing = [command for command in ("ip", "tc", "unshare") if shutil.which(command) is None]
        if missing:
            raise LabError(f"commands are missing: {', '.join(missing)}. Install the packages iproute2 and util-linux.")
        try:
            # The switch is the last. Its namespace is kept open too, or the kernel would remove it with all cables.
            self._namespaces = [_new_namespace() for _ in range(self.ranks + 1)]
        except PermissionError as error:
            raise LabError(f"network namespaces need root: {error}. {_PRIVILEGES}") from error
        *hosts, switch = self._namespaces
        try:
            _run_in(switch, "ip link add switch type bridge", "ip link set switch addrgenmode none up")
            for rank, host in enumerate(hosts):
                self._connect(switch, rank, host)
        except BaseException:
            self._close()
            raise
        return self

    def _connect(self, switch: int, rank: int, host: int) -> None:
        port = f"port{rank}"
        # `_run_in` starts the command in a thread; its file descriptors are this process's, the command's parent.
        _run_in(
            switch,
            f"ip link add {port} type veth peer name {DEVICE} netns /proc/{os.getpid()}/fd/{host}",
            f"ip link set {port} master switch addrgenmode none up",
            _in_order(port),
            *(f"tc qdisc add dev {port} {shaping}" for shaping in self._shaping),
        )
        _run_in(
            host,
            # IPv6 would look for routers, and add to the ranks' own traffic.
            f"ip link set {DEVICE} addrgenmode none",
            "ip link set lo up",
            f"ip address add {address(rank)}/16 dev {DEVICE}",
            _in_order(DEVICE),
            f"ip link set {DEVICE} up",
            *(f"tc qdisc add dev {DEVICE} {shaping}" for shaping in self._shaping),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces = []

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun would set for this rank if each host were a machine."""
        return {
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(0),
            "MASTER_PORT": "29500",  # free: the host is new
            "TORCHELASTIC_RUN_ID": "lab",
            "GLOO_SOCKET_IFNAME": DEVICE,
            # Each host looks like a whole machine: torch and Lightning would give every rank all cores.
            "OMP_NUM_THREADS": "1",
        }

    def move_to(self, rank: int) -> None:
        """Moves this process, which must have a single thread, to a rank's host. It then dies with its parent."""
        _die_with_parent()
        _system_call("setns", self._namespaces[rank], _NEW_NETWORK)
        os.environ.update(self.environment(rank))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Runs `function(rank, *args)` on each host, in a forked process.

        Returns:
            What each rank returned.

        Raises:
            RuntimeError: A rank failed (the message has its traceback), died, or was not done within `timeout`
                seconds. All ranks are killed.
        """
        results = FORK.Queue()
        processes = [
            FORK.Process(target=self._rank_main, args=(results, rank, function, args)) for rank in range(self.ranks)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(values) < self.ranks:
                try:
                    rank, value, failure = results.get(timeout=1)
                except queue.Empty:
                    dead = [rank for rank, each in enumerate(processes) if not each.is_alive() and rank not in values]
                    if dead and results.empty():
                        raise RuntimeError(f"rank {dead[0]} died, exit code {processes[dead[0]].exitcode}") from None
                    if time.monotonic() > deadline:
                        late = [rank for rank in range(self.ranks) if rank not in values]
                        raise RuntimeError(_not_done(late, timeout)) from None
                    continue
                if failure is not None:
                    # A rank that lost its peer fails too and reports first: the dead report nothing.
                    codes = enumerate(process.exitcode for process in processes)
                    dead = "".join(f"rank {other} died, exit code {code}; " for other, code in codes if code)
                    raise RuntimeError(f"{dead}rank {rank} failed:\n{failure}")
                values[rank] = value
        finally:
            for process in processes:
                process.join(5 if len(values) == self.ranks else 0)
                if process.is_alive():
                    process.kill()
                process.join()
        return [values[rank] for rank in range(self.ranks)]

    def _rank_main(self, results: Any, rank: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
        try:
            self.move_to(rank)
            results.put((rank, function(rank, *args), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        # The exit handlers are those of the process that forked.
        os._exit(0)

    def run_command(self, command: Sequence[str], timeout: float | None = None) -> int:
        """Runs a command on each host until all have ended or one has failed. The others are then killed.

        Returns:
            The first exit code that is not 0. 124, as with the command timeout, where some had not ended within
            `timeout` seconds.
        """
        # Each runs in a PID namespace whose first process is a shell. When the shell ends, or is killed because this
        # process is gone, the kernel kills all others in the namespace. The command itself gets signals as usual.
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *shell, *command]
        processes = [FORK.Process(target=self._execute, args=(rank, command)) for rank in range(self.ranks)]
        for process in processes:
            process.start()
        try:
            deadline = None if timeout is None else time.monotonic() + timeout
            while True:
                codes = [process.exitcode for process in processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed:
                    code = codes[failed[0]] or 0
                    print(f"rank {failed[0]} ended with exit code {code}; the others are ended too.", file=sys.stderr)
                    return code if code > 0 else 128 - code
                running = [rank for rank, code in enumerate(codes) if code is None]
                if not running:
                    return 0
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not _wait_for_end_of_any([processes[rank] for rank in running], left):
                    print(_not_done(running, timeout or 0), file=sys.stderr)
                    return 124
        finally:
            for process in processes:
                process.kill()
                process.join()

    def _execute(self, rank: int, command: Sequence[str]) -> None:
        self.move_to(rank)
        os.execvp(command[0], command)


def _wait_for_end_of_any(processes: Sequence[BaseProcess], timeout: float | None) -> bool:
    """Whether one ends within `timeout` seconds."""
    # Their sentinels are closed when a command begins.
    descriptors = [os.pidfd_open(process.pid or 0) for process in processes]
    try:
        return bool(multiprocessing.connection.wait(descriptors, timeout))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _not_done(ranks: Sequence[int], timeout: float) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank{'s' * (len(ranks) > 1)} {numbers} not done after {timeout:g} s, and killed"


def address(rank: int) -> str:
    """The address of a rank's host."""
    return f"10.99.0.{rank + 1}"


def _shaping(rate: str) -> list[str]:
    bits = bits_per_second(rate)
    if bits is None:
        return []
    burst_bytes = max(3000, int(bits / 8 * BURST_SECONDS))
    return [f"root tbf rate {bits}bit burst {burst_bytes} latency {QUEUE_SECONDS * 1000:.0f}ms"]


def _in_order(device: str) -> str:
    """The command, for the device's namespace, that makes one processor receive all packets of a flow.

    Otherwise the sender's processor receives them. When the sender moves to another, packets overtake each other, and
    TCP takes the late ones for lost.
    """
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    steer = f"echo {status['Cpus_allowed'].strip()} > /sys/class/net/{device}/queues/rx-0/rps_cpus"
    # Only a new mount shows the namespace's own devices.
    return f"unshare --mount sh -c 'mount -t sysfs sysfs /sys && {steer}'"


def _system_call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _die_with_parent() -> None:
    parent = os.getppid()
    _system_call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a new thread: it may enter a namespace, and so do only it and the commands that it starts."""
    outcome: list[Any] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return outcome[0]


def _new_namespace() -> int:
    """An empty network namespace, as a file descriptor that keeps it alive."""

    def enter() -> int:
        _system_call("unshare", _NEW_NETWORK)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    return int(_in_thread(enter))


def _run_in(namespace: int, *commands: str) -> None:
    """Runs commands in a network namespace, one after another.

    Raises:
        LabError: A command failed.
    """

    def enter() -> None:
        _system_call("setns", namespace, _NEW_NETWORK)
        for command in commands:
            done = subprocess.run(shlex.split(command), capture_output=True, text=True)
            if done.returncode:
                refused = f" {_PRIVILEGES}" if "not permitted" in done.stderr else ""
                raise LabError(f"{command!r} failed: {done.stderr.strip()}.{refused}")

    _in_thread(enter)


def transfer(rank: int, count: int) -> tuple[float, Counters]:
    """Rank 0 sends so many bytes to rank 1 over TCP; for `Lab.run`.

    Returns:
        Seconds until rank 1 had all bytes, as rank 0 measures them (0 on rank 1), and this rank's counters.
    """
    if rank == 0:
        with socket.create_server((address(0), _PORT)) as server:
            connection, _ = server.accept()
        with connection:
            begin = time.perf_counter()
            connection.sendall(bytes(count))
            connection.recv(1)
            return time.perf_counter() - begin, Counters.read(DEVICE)
    with connected() as connection:
        arrived = 0
        while arrived < count:
            arrived += len(connection.recv(2**16))
        connection.sendall(b"!")
        return 0.0, Counters.read(DEVICE)


def connected() -> socket.socket:
    """A connection to rank 0, once it listens."""
    for _ in range(100):
        try:
            return socket.create_connection((address(0), _PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError("rank 0 does not listen")


def check(rate: str) -> bool:
    """Sends bytes between two hosts and prints the rate that they measure; whether it is the one asked for.

    Raises:
        LabError: The lab cannot be set up here.
    """
    bits = bits_per_second(rate)
    count = MOST_CHECKED_BYTES if bits is None else min(MOST_CHECKED_BYTES, bits // 8)
    with Lab(2, rate) as lab:
        (seconds, counters), _ = lab.run(transfer, count, timeout=patience_seconds(1, count // 4, rate, 60))
    measured = 8 * count / seconds
    print(f"asked {rate}; measured {measured / 1e6:,.1f} Mbit/s: {count / 1e6:,.2f} MB in {seconds:.3f} s")
    payload_bytes = counters.sent_bytes - HEADER_BYTES * counters.packets
    print(f"counted {payload_bytes / 1e6:,.2f} MB without headers; {counters.repeated} segments were sent again")
    return bits is None or abs(measured / bits - 1) <= TOLERANCE


def _sent(rank: int) -> Counters:
    return Counters.read(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--ranks N] [--rate RATE] [--timeout SECONDS] (-- command ... | --check)",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="hosts, with one rank on each (default: 2)")
    rate = f"rate of each host's cable: 100mbit, 1gbit, or {UNLIMITED} (default: 100mbit)"
    parser.add_argument("--rate", default="100mbit", help=rate)
    limit = "kill ranks that have not ended after this time, with exit code 124 (default: wait for ever)"
    parser.add_argument("--timeout", type=float, default=None, metavar="SECONDS", help=limit)
    rule = (
        f"send bytes between two hosts and print the rate measured; exit code 1 where it is off by over {TOLERANCE:.0%}"
    )
    parser.add_argument("--check", action="store_true", help=rule.replace("%", "%%"))
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what each rank runs")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.check and command:
        parser.error("--check takes no command")
    if not (command or options.check):
        parser.error("a command is missing: -- python my_training.py")
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        parser.error(f"--timeout must be positive and finite; got {options.timeout:g}. Leave it out to wait for ever.")
    try:
        lab = Lab(options.ranks, options.rate)
    except ValueError as error:
        parser.error(str(error))
    try:
        if options.check:
            sys.exit(not check(options.rate))
        with lab:
            begin = time.monotonic()
            code = lab.run_command(command, options.timeout)
            seconds = time.monotonic() - begin
            sent = [counters.sent_bytes / 1e6 for counters in lab.run(_sent, timeout=60)]
    except LabError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    each = ", ".join(f"{megabytes:,.2f}" for megabytes in sent)
    print(f"{options.rate}: {seconds:.1f} s; MB sent by each rank, by its network device: {each}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
