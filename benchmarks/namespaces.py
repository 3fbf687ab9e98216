"""Network namespaces, for root and for other users: these get a user namespace first, in which they are root.

A process enters a user namespace only while it has a single thread, so the work is done in forked processes.
"""

import ctypes
import multiprocessing
import os
import pickle
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

FORK = multiprocessing.get_context("fork")

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_FILES_AT_ONCE = 200  # the kernel passes 253 at most

_SYSTEM = Path("/proc/sys")
_SETTINGS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user/max_user_namespaces": ("0", "10000"),
    "user/max_net_namespaces": ("0", "10000"),
}
"""What forbids namespaces, with the values that do and that do not."""


class LabError(RuntimeError):
    """The lab cannot be set up here, or was not what was asked for; the message says why."""


class Namespaces(NamedTuple):
    """Files that keep namespaces alive.

    Attributes:
        user: The user namespace; None for root.
        networks: The network namespaces.
        devices: TAP devices in them, if any.
        own_processes: Whether a PID namespace may have a /proc of its own.
    """

    user: int | None
    networks: list[int]
    devices: list[int]
    own_processes: bool

    def enter(self, network: int) -> None:
        """Moves this process, which must have a single thread, to one of the networks."""
        if self.user is not None:
            system_call("setns", self.user, _NEW_USER)
        enter_network(self.networks[network])

    def close(self) -> None:
        for file in (*([] if self.user is None else [self.user]), *self.networks, *self.devices):
            os.close(file)


def make(count: int, build: Callable[[list[int]], list[int]]) -> Namespaces:
    """Makes new network namespaces.

    Args:
        count: How many.
        build: Sets them up, in a process that may enter them, and returns the files of devices.

    Raises:
        LabError: They are not allowed here, or `build` failed.
    """
    here, there = socket.socketpair()
    process = FORK.Process(target=_make, args=(there, count, build))
    process.start()
    there.close()
    files: list[int] = []
    with here, here.makefile("rb") as answers:
        # A byte with each batch of files, then the outcome.
        while True:
            kind, batch, _, _ = socket.recv_fds(here, 1, _FILES_AT_ONCE)
            files += batch
            if kind != b"f":
                break
        outcome = pickle.load(answers) if kind else LabError("the network lab's set-up was killed.")
    process.join()
    if isinstance(outcome, BaseException):
        for file in files:
            os.close(file)
        raise outcome
    has_user, own_processes = outcome
    user = files.pop(0) if has_user else None
    return Namespaces(user, files[:count], files[count:], own_processes)


def _make(there: socket.socket, count: int, build: Callable[[list[int]], list[int]]) -> None:
    outcome: object
    files: list[int] = []
    try:
        user = _become_root()
        networks = [_new_network() for _ in range(count)]
        files = [*([] if user is None else [user]), *networks, *build(networks)]
        outcome = user is not None, user is None or _may_mount()
    except OSError as error:
        outcome = LabError(f"network namespaces are not allowed here: {error}. {remedy()}")
    except BaseException as error:
        outcome = error
    for begin in range(0, len(files), _FILES_AT_ONCE):
        socket.send_fds(there, [b"f"], files[begin : begin + _FILES_AT_ONCE])
    there.sendall(b"o" + pickle.dumps(outcome))
    # The exit handlers are those of the process that forked.
    os._exit(0)


def _become_root() -> int | None:
    """Enters a new user namespace where this process may not make networks; the namespace's file, or None."""
    try:
        system_call("unshare", _NEW_NETWORK)
        return None
    except PermissionError:
        pass
    user, group = os.geteuid(), os.getegid()
    system_call("unshare", _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return os.open("/proc/self/ns/user", os.O_RDONLY)


def _new_network() -> int:
    system_call("unshare", _NEW_NETWORK)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _may_mount() -> bool:
    """False in many containers, where a part of /proc is hidden."""
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return tried.returncode == 0


def remedy(system: Path = _SYSTEM) -> str:
    """What to change so that namespaces are allowed, settings of the kernel that forbid them included."""
    wrong = []
    for name, (forbids, allows) in _SETTINGS.items():
        file = system / name
        if file.exists() and file.read_text().strip() == forbids:
            wrong.append(f"{name.replace('/', '.')}={allows}")
    ways = ["Run it with sudo"]
    if wrong:
        ways.append(f"allow user namespaces (sudo sysctl -w {' '.join(wrong)})")
    ways.append("in a container, start that with --privileged")
    return f"{', or '.join(ways)}."


def enter_network(file: int) -> None:
    """Moves this process, and the commands that it starts, to a network namespace."""
    system_call("setns", file, _NEW_NETWORK)


def run_commands(commands: Sequence[str], files: Sequence[int] = ()) -> None:
    """Runs commands one after another; they inherit files.

    Raises:
        LabError: A command failed.
    """
    for command in commands:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, pass_fds=files)
        if done.returncode:
            refused = f" {remedy()}" if "not permitted" in done.stderr or "denied" in done.stderr else ""
            raise LabError(f"{command!r} failed: {done.stderr.strip()}.{refused}")


def system_call(name: str, *arguments: int) -> None:
    """Calls a function of the C library that returns 0, or -1 with an error.

    Raises:
        OSError: It failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends."""
    parent = os.getppid()
    system_call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
