"""A slow network on one machine: each rank has its own host, and all hosts are on one switch.

Runs a command once per rank, with torchrun's environment variables. A Lightning script needs
`Trainer(devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]))`. Hosts are network
namespaces: nothing outside them changes, and the kernel removes them with the last process in them, however it ends.
Needs Linux, the commands ip, tc and unshare (packages iproute2 and util-linux), and for a network with length or losses
/dev/net/tun. Root is not needed where user namespaces are allowed.

    --rate 50mbit --rtt 100ms --jitter 10ms --loss 0.1%          the internet
    --up 20mbit --down 200mbit --rtt 20ms                        cables that are slower from the hosts than to them
    --ranks 4 --rate 1gbit --rank 3:rate=10mbit,rtt=200ms        one slow rank of four
    --nodes 2x2 --rate 100mbit --rtt 20ms                        two hosts of two ranks: fast inside, slow between
    --rate 1gbit --then 60s:50mbit                               a network that becomes slow after a minute

Between two hosts, the worse of their two cables counts: the slower rate, the longer round-trip time (rtt), the larger
jitter, the larger loss.

`--check` runs no command: it measures the lab's rates, round-trip times, jitter and losses through sockets, and fails
where they are not those that were asked for.
"""

import argparse
import array
import contextlib
import fcntl
import functools
import multiprocessing.connection
import os
import queue
import re
import shutil
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

# Its neighbours, also where this is imported as benchmarks.network.
sys.path.append(str(Path(__file__).resolve().parent))
from cable import UNLIMITED as UNLIMITED
from cable import Cable, exception, seconds
from cable import bits_per_second as bits_per_second
from namespaces import FORK as FORK
from namespaces import LabError as LabError
from namespaces import Namespaces, die_with_parent, enter_network, make, remedy, run_commands
from switch import Report, Switch, Trip, open_device

DEVICE = "eth0"  # of each host
_PORT = 4000  # free on each host, which is new
_HARDWARE_ADDRESS = "02:00:00:00:00:01"
_ETHTOOL, _SET_RECEIVE_OFFLOAD = 0x8946, 0x2C  # SIOCETHTOOL, ETHTOOL_SGRO
_WIRE_BYTES = 1514  # of the largest packet

# The token bucket holds what the rate carries in this time. A smaller bucket is refilled too rarely to reach the rate,
# and a larger one lets short messages pass at once.
BURST_SECONDS = 0.002

# A packet that would wait longer is dropped, as by a switch with a full buffer. All flows share one queue, first come,
# first served: beside a large message, a small one waits about 15 ms at each cable of 100 Mbit instead of 1 ms. Fair
# queues (fq_codel, sfq) are modules that many kernels lack, and results must not depend on them.
QUEUE_SECONDS = 0.4

# Ethernet 14, IPv4 20, TCP 20, its timestamps 12.
HEADER_BYTES = 66

# What Gloo adds to each message: about 185 bytes in an all-reduce or an all-gather, 90 to 150 in a broadcast.
MESSAGE_BYTES = 185

# A switch in user space is always a little late. These are what the lab lets pass: as a share of a trip, half the
# round-trip time, or in seconds where the trip is short.
LATE_SHARE, LATE_SECONDS = 0.05, 0.00025


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


def machine() -> dict[str, int | str]:
    """What all hosts share: processors, and TCP's congestion control, which a namespace cannot choose freely."""
    file = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cores": os.cpu_count() or 1,
        "congestion control": file.read_text().strip() if file.exists() else "unknown",
    }


def messages_of(collective: str, ranks: int) -> float:
    """Messages that a rank sends, averaged over W ranks: 2 (W-1) in a ring all-reduce, W-1 in an all-gather or an
    all-to-all, (W-1) / W in a broadcast."""
    others = ranks - 1
    return {
        "all_reduce": 2 * others,
        "all_gather": others,
        "all_to_all": others,
        "send": others,
        "broadcast": others / ranks,
    }[collective]


def patience_seconds(exchanges: int, floats: int, rate: str, computing_seconds: float) -> float:
    """A timeout for `Lab.run` that only a rank that hangs exceeds.

    Args:
        exchanges: Exchanges of gradients, warm-up included.
        floats: Elements of a gradient. A rank sends nearly two gradients in a ring all-reduce; six are allowed for.
        rate: Rate of each cable, or the cable's text.
        computing_seconds: The most that a rank computes between two exchanges.
    """
    cable = Cable.of(rate)
    rates = [bits for bits in (cable.up_bits, cable.down_bits) if bits is not None]
    sending_seconds = 6 * 32 * floats / min(rates) if rates else 0.0
    if cable.needs_switch:
        # Some messages, of which each may wait for the windows of TCP to open, and for what was lost.
        sending_seconds = 2 * sending_seconds + 100 * (cable.rtt_seconds + cable.jitter_seconds)
    # Ten minutes to import, compile, read data and connect.
    return 600 + exchanges * (computing_seconds + sending_seconds)


class Lab:
    """Hosts on a switch, each with a cable. Use it in a `with` statement: that makes the hosts, and the constructor
    only checks its arguments.

    Args:
        ranks: Number of ranks; one runs on each host, or `ranks_per_node`.
        rate: Rate of each cable in both directions: `100mbit`, `1gbit`, ..., or `unlimited`. Or all that a cable is, as
            a `Cable` or as its text: `100mbit, rtt 20ms, loss 0.1%`.
        exceptions: Cables that differ, by host.
        ranks_per_node: Ranks on each host. They share its cable, and talk to each other over its loopback.
        inside: Rate of the loopback.
        seed: Of jitter and losses.

    Raises:
        ValueError: Too many or too few ranks, or not a rate.
        LabError: Not Linux, namespaces or /dev/net/tun are not allowed, or a command is missing.
    """

    def __init__(
        self,
        ranks: int,
        rate: str | Cable,
        exceptions: Mapping[int, Cable] | None = None,
        ranks_per_node: int = 1,
        inside: str = UNLIMITED,
        seed: int = 0,
    ) -> None:
        if ranks_per_node < 1 or ranks % ranks_per_node:
            raise ValueError(f"ranks must be a multiple of ranks_per_node, {ranks_per_node}; got {ranks}.")
        if not 1 <= ranks <= 250:
            raise ValueError(f"ranks must be from 1 to 250; got {ranks}.")
        self.ranks, self.ranks_per_node, self.hosts = ranks, ranks_per_node, ranks // ranks_per_node
        cable = rate if isinstance(rate, Cable) else Cable.of(rate)
        self.cables = [(exceptions or {}).get(host, cable) for host in range(self.hosts)]
        self.inside = inside
        self._inside = _shaping("lo", bits_per_second(inside, "inside"))
        # One cable with length takes all through the switch.
        self.has_length = any(each.needs_switch for each in self.cables)
        for each in self.cables:
            if self.has_length:
                each.require_slow()
        self._seed = seed
        self._namespaces: Namespaces | None = None
        self._switch: BaseProcess | None = None
        self._changer: BaseProcess | None = None

    def __enter__(self) -> "Lab":
        if not sys.platform.startswith("linux"):
            raise LabError(f"the network lab needs Linux, for its network namespaces; this is {sys.platform}.")
        # Where Debian keeps ip and tc, and an ordinary user's path does not lead.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
        missing = [command for command in ("ip", "tc", "unshare") if shutil.which(command) is None]
        if missing:
            raise LabError(f"commands are missing: {', '.join(missing)}. Install the packages iproute2 and util-linux.")
        if self.has_length:
            self._namespaces = make(self.hosts, self._build_devices)
            self._start_switch()
        else:
            # The switch is the last. Its namespace is kept open too, or the kernel would remove it with all cables.
            self._namespaces = make(self.hosts + 1, self._build_bridge)
        return self

    def _build_bridge(self, networks: list[int]) -> list[int]:
        """Without length, the kernel carries everything."""
        *hosts, switch = networks
        enter_network(switch)
        run_commands(["ip link add switch type bridge", "ip link set switch addrgenmode none up"])
        for number, (host, cable) in enumerate(zip(hosts, self.cables)):
            port = f"port{number}"
            enter_network(switch)
            run_commands(
                [
                    f"ip link add {port} type veth peer name {DEVICE} netns /proc/self/fd/{host}",
                    f"ip link set {port} master switch addrgenmode none up",
                    *_shaping(port, cable.down_bits),
                ],
                [host],
            )
            _keep_order(port)
            enter_network(host)
            run_commands([*self._host_commands(number), *_shaping(DEVICE, cable.up_bits)])
            _keep_order(DEVICE)
        return []

    def _build_devices(self, networks: list[int]) -> list[int]:
        devices = []
        for number, (host, cable) in enumerate(zip(networks, self.cables)):
            enter_network(host)
            try:
                devices.append(open_device(DEVICE))
            except OSError as error:
                raise LabError(f"a network with rtt or loss needs TAP devices, but {_why_no_device(error)}") from None
            # A large packet that the token bucket cannot hold would be cut by tbf, and the switch had all its pieces.
            most = max(1, _burst_bytes(cable.up_bits or 0) // _WIRE_BYTES)
            run_commands(
                [
                    # All have the same address, and ask nobody for another's: the switch goes by IP addresses.
                    f"ip link set {DEVICE} address {_HARDWARE_ADDRESS} arp off gso_max_segs {most}",
                    *self._host_commands(number),
                    *_shaping(DEVICE, cable.up_bits),
                ]
            )
        return devices

    def _host_commands(self, host: int) -> list[str]:
        return [
            # IPv6 would look for routers, and add to the ranks' own traffic.
            f"ip link set {DEVICE} addrgenmode none",
            "ip link set lo up",
            *self._inside,
            f"ip address add {address(host)}/16 dev {DEVICE}",
            f"ip link set {DEVICE} up",
        ]

    def _start_switch(self) -> None:
        assert self._namespaces is not None
        self._control, there = FORK.Pipe()
        self._switch = FORK.Process(target=self._carry, args=(there,), daemon=True)
        self._switch.start()
        there.close()

    def _carry(self, control: multiprocessing.connection.Connection) -> None:
        assert self._namespaces is not None
        die_with_parent()
        with contextlib.suppress(PermissionError):
            # Before the ranks, which compute on the same processors; it needs little of them.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        Switch(
            self._namespaces.devices,
            [socket.inet_aton(address(host)) for host in range(self.hosts)],
            {(a, b): self.trip(a, b) for a in range(self.hosts) for b in range(self.hosts) if a != b},
            [cable.up_bits for cable in self.cables],
            [cable.down_bits for cable in self.cables],
            QUEUE_SECONDS,
            self._seed,
        ).carry(control)

    def change_rate(self, rate: str, when: Callable[[], object]) -> None:
        """Gives all cables another rate, in both directions, while ranks run.

        Args:
            rate: The rate.
            when: Returns when it is time; called in a process of its own, which starts now.

        Raises:
            ValueError: Not a rate that they can change to.
        """
        self._changer = FORK.Process(target=self._change, args=(self.next_bits(rate), when), daemon=True)
        self._changer.start()

    def next_bits(self, rate: str) -> int:
        """Bits a second, for a rate that cables can change to.

        Raises:
            ValueError: They cannot.
        """
        bits = bits_per_second(rate)
        if bits is None:
            raise ValueError(f"cables cannot change to {rate}, which nothing shapes. Try 100gbit.")
        if self.has_length:
            Cable(rate).require_slow()
        return bits

    def _change(self, bits: int, when: Callable[[], object]) -> None:
        assert self._namespaces is not None
        die_with_parent()
        when()
        if self.has_length:
            self._control.send(bits)
        self._namespaces.enter(0)
        *hosts, switch = self._namespaces.networks if not self.has_length else (*self._namespaces.networks, 0)
        for host in hosts:
            enter_network(host)
            run_commands(_shaping(DEVICE, bits))
        if not self.has_length:
            enter_network(switch)
            run_commands([command for host in range(self.hosts) for command in _shaping(f"port{host}", bits)])
        os._exit(0)

    @property
    def has_changed(self) -> bool:
        """Whether `change_rate` has done it.

        Raises:
            LabError: It has failed.
        """
        if self._changer is None or self._changer.exitcode is None:
            return False
        if self._changer.exitcode:
            raise LabError("the cables' rate could not be changed: the error is above.")
        return True

    def trip(self, sender: int, receiver: int) -> Trip:
        """What packets from one host to another meet."""
        cables = [self.cables[sender], self.cables[receiver]]
        return Trip(
            max(cable.rtt_seconds for cable in cables) / 2,
            max(cable.jitter_seconds for cable in cables),
            max(cable.loss_fraction for cable in cables),
        )

    def rates(self, sender: int, receiver: int) -> tuple[int | None, int | None]:
        """Bits a second from the sender, and to the receiver; None where unlimited."""
        return self.cables[sender].up_bits, self.cables[receiver].down_bits

    def _judge(self) -> None:
        """Raises a LabError where the switch was too slow in what has run."""
        if self._switch is None:
            return
        report = self.report()
        most = LATE_SECONDS
        delays = [self.trip(a, b).delay_seconds for a in range(self.hosts) for b in range(a)]
        if delays:
            most = max(most, LATE_SHARE * min(delays))
        if report.late_by > most:
            raise LabError(
                f"the switch could not keep up: its {report.writes:,} packets were {1000 * report.late_by:.2f} ms late"
                f" on average, at most {1000 * report.worst_seconds:.1f} ms; {1000 * most:.2f} ms on average are"
                " allowed. Take fewer ranks, a lower rate or a longer rtt, or a machine that is less busy."
            )

    def report(self) -> Report:
        """What the switch has done since it was asked last.

        Raises:
            LabError: It has ended, or there is none in a network without rtt and loss.
        """
        if self._switch is None:
            raise LabError("a network without rtt and loss has no switch that could report.")
        try:
            self._control.send(None)
            report = self._control.recv()
        except (EOFError, OSError):
            raise LabError("the switch has ended: its error is above.") from None
        assert isinstance(report, Report)
        return report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changer is not None:
            self._changer.kill()
            self._changer.join()
            self._changer = None
        if self._switch is not None:
            self._switch.kill()
            self._switch.join()
            self._control.close()
            self._switch = None
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun would set for this rank if each host were a machine."""
        return {
            "RANK": str(rank),
            "GROUP_RANK": str(rank // self.ranks_per_node),
            "LOCAL_RANK": str(rank % self.ranks_per_node),
            "WORLD_SIZE": str(self.ranks),
            "GROUP_WORLD_SIZE": str(self.hosts),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": "29500",  # free: the host is new
            "TORCHELASTIC_RUN_ID": "lab",
            "GLOO_SOCKET_IFNAME": DEVICE,
            # Each host looks like a whole machine: torch and Lightning would give every rank all cores.
            "OMP_NUM_THREADS": "1",
        }

    def move_to(self, rank: int) -> None:
        """Moves this process, which must have a single thread, to a rank's host. It then dies with its parent."""
        assert self._namespaces is not None
        self._namespaces.enter(rank // self.ranks_per_node)
        die_with_parent()
        os.environ.update(self.environment(rank))

    def _mount_proc(self) -> list[str]:
        assert self._namespaces is not None
        return ["--mount-proc"] if self._namespaces.own_processes else []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Runs `function(rank, *args)` on each host, in a forked process.

        Returns:
            What each rank returned.

        Raises:
            RuntimeError: A rank failed (the message has its traceback), died, or was not done within `timeout`
                seconds. All ranks are killed.
            LabError: The switch could not keep up, so what was measured is not of the network that was asked for.
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
        self._judge()
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

        Raises:
            LabError: The switch could not keep up.
        """
        # Each runs in a PID namespace whose first process is a shell. When the shell ends, or is killed because this
        # process is gone, the kernel kills all others in the namespace. The command itself gets signals as usual.
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        command = ["unshare", "--pid", "--fork", "--kill-child", *self._mount_proc(), *shell, *command]
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
                    self._judge()
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


def address(host: int) -> str:
    """The address of a host: of a rank's, where each rank has one."""
    return f"10.99.0.{host + 1}"


def _why_no_device(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            "/dev/net/tun is missing. Load the kernel's module (sudo modprobe tun), or start a container with the"
            " option --device /dev/net/tun."
        )
    return f"/dev/net/tun cannot be used: {error}. {remedy()}"


def _burst_bytes(bits: int) -> int:
    return max(3000, int(bits / 8 * BURST_SECONDS))


def _shaping(device: str, bits: int | None) -> list[str]:
    """The commands that shape a device."""
    if bits is None:
        return []
    latency = f"{QUEUE_SECONDS * 1000:.0f}ms"
    return [f"tc qdisc replace dev {device} root tbf rate {bits}bit burst {_burst_bytes(bits)} latency {latency}"]


def _keep_order(device: str) -> None:
    """Makes one processor receive all packets of a flow, in this process's namespace.

    Otherwise the sender's processor receives them. When the sender moves to another, packets overtake each other, and
    TCP takes the late ones for lost.
    """
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    steer = f"echo {status['Cpus_allowed'].strip()} > /sys/class/net/{device}/queues/rx-0/rps_cpus"
    try:
        # Only a new mount shows the namespace's own devices.
        run_commands([f"unshare --mount sh -c 'mount -t sysfs sysfs /sys && {steer}'"])
    except LabError:
        # Root of a user namespace may not steer. With receive offload, all packets of a device go through one queue.
        value = array.array("I", [_SET_RECEIVE_OFFLOAD, 1])
        request = struct.pack("16sP16x", device.encode(), value.buffer_info()[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _ETHTOOL, request)


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


def _sent(rank: int) -> Counters:
    return Counters.read(DEVICE)


def parse() -> tuple[argparse.Namespace, list[str], Lab]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] (-- command ... | --check)",
    )
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="hosts, with one rank on each (default: 2)")
    add("--nodes", metavar="NxM", help="instead of --ranks: N hosts with M ranks on each, such as 2x2")
    rate = f"rate of each host's cable, in both directions: 100mbit, 1gbit, or {UNLIMITED} (default: 100mbit)"
    add("--rate", default="100mbit", help=rate)
    add("--up", metavar="RATE", help="rate from each host, where it differs")
    add("--down", metavar="RATE", help="rate to each host, where it differs")
    add("--rtt", default="0ms", metavar="TIME", help="round-trip time between two hosts, such as 100ms (default: 0ms)")
    add("--jitter", default="0ms", metavar="TIME", help="the rtt wanders by so much, up and down (default: 0ms)")
    add("--loss", default="0%", metavar="PERCENT", help="packets lost in each direction (default: 0%%)")
    differs = "a rank's host with a cable that differs, such as 3:rate=10mbit,rtt=200ms; may be repeated"
    add("--rank", action="append", default=[], metavar="N:NAME=VALUE,...", help=differs)
    add("--node", action="append", default=[], metavar="N:NAME=VALUE,...", help="the same, with --nodes")
    add("--inside", metavar="RATE", help=f"rate between the ranks of a node (default: {UNLIMITED})")
    add("--seed", type=int, default=0, metavar="N", help="of jitter and losses (default: 0)")
    add("--then", metavar="TIME:RATE", help="change all cables to this rate after this time, such as 60s:50mbit")
    limit = "kill ranks that have not ended after this time, with exit code 124 (default: wait for ever)"
    add("--timeout", type=float, default=None, metavar="SECONDS", help=limit)
    rule = "measure the network; exit code 1 where it is not what was asked for"
    add("--check", action="store_true", help=rule)
    add("command", nargs=argparse.REMAINDER, help="what each rank runs")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.check and command:
        parser.error("--check takes no command")
    if not (command or options.check):
        parser.error("a command is missing: -- python my_training.py")
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        parser.error(f"--timeout must be positive and finite; got {options.timeout:g}. Leave it out to wait for ever.")
    if options.then is not None and options.check:
        parser.error(f"--check measures a network that stays as it is; got --then {options.then} too. Leave it out.")
    try:
        lab = lab_of(options)
        options.then = None if options.then is None else then(options.then, lab)
        return options, command, lab
    except ValueError as error:
        parser.error(str(error))


def then(text: str, lab: Lab) -> tuple[float, str]:
    """The seconds and the rate in a text such as `60s:50mbit`.

    Raises:
        ValueError: It has not both, or the lab cannot have that rate.
    """
    time, colon, rate = text.partition(":")
    if not colon:
        raise ValueError(f"--then must be a time, a colon and a rate; got {text!r}. Try 60s:50mbit.")
    lab.next_bits(rate)
    return seconds(time, "--then"), rate


def lab_of(options: argparse.Namespace) -> Lab:
    """The lab that the command line asks for.

    Raises:
        ValueError: Options that do not fit together, or not a cable.
    """
    hosts, each = 2 if options.ranks is None else options.ranks, 1
    if options.nodes is not None:
        if options.ranks is not None:
            raise ValueError(f"--nodes says how many ranks there are; got --ranks {options.ranks} too. Leave it out.")
        match = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", options.nodes)
        if match is None:
            raise ValueError(f"--nodes must be hosts x ranks on each; got {options.nodes!r}. Try 2x2.")
        hosts, each = int(match[1]), int(match[2])
    name, other = ("rank", "node") if options.nodes is None else ("node", "rank")
    if getattr(options, other):
        wrong = f"--{other} {getattr(options, other)[0]}"
        because = "needs --nodes" if other == "node" else "is for hosts with one rank: those of a node share a cable"
        raise ValueError(f"{wrong} {because}. Try --{name} {getattr(options, other)[0]}.")
    if options.inside is not None and options.nodes is None:
        raise ValueError(f"--inside {options.inside} needs --nodes, since it is between the ranks of a node. Try 2x2.")
    cable = Cable(options.rate, options.up, options.down, options.rtt, options.jitter, options.loss)
    exceptions = dict(exception(text, cable, hosts, name) for text in getattr(options, name))
    return Lab(hosts * each, cable, exceptions, each, options.inside or UNLIMITED, options.seed)


def main() -> None:
    options, command, lab = parse()
    try:
        if options.check:
            # It is written with this module.
            from network_check import check

            sys.exit(not check(lab))
        with lab:
            begin = time.monotonic()
            if options.then is not None:
                later, rate = options.then
                lab.change_rate(rate, functools.partial(time.sleep, later))
            code = lab.run_command(command, options.timeout)
            if options.then is not None and not lab.has_changed:
                print(f"the command ended before --then {later:g}s:{rate}", file=sys.stderr)
            seconds = time.monotonic() - begin
            sent = lab.run(_sent, timeout=60)[:: lab.ranks_per_node]
    except LabError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    each = ", ".join(f"{counters.sent_bytes / 1e6:,.2f}" for counters in sent)
    cables = "; ".join(dict.fromkeys(map(str, lab.cables)))
    what = "rank" if lab.ranks_per_node == 1 else "node"
    print(f"{cables}: {seconds:.1f} s; MB sent by each {what}, by its network device: {each}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
