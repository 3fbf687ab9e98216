"""`sparsecomm replay`: a run of replicas that came and went, made again from their logs."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol

from torch._C._distributed_c10d import TCPStore

from lightning_sparsecomm.elastic.local_state import FOLDER
from lightning_sparsecomm.elastic.membership import short
from lightning_sparsecomm.elastic.record import read
from lightning_sparsecomm.elastic.replay import REPLICA, STORE, end_key, place_key, script_key
from lightning_sparsecomm.elastic.script import Script, scripts_of

_LOOKING_SECONDS = 0.1

_ENDING_SECONDS = 10.0
"""For replicas to end by themselves once another has failed."""

# The second one comes when the terminal is closed.
_ENDING = signal.SIGTERM, signal.SIGHUP

STOPPED, FAILED, BROKEN = "stopped", "failed", "broke off"

_ENDS = {
    "same": "ended with the same bits as in the log",
    "differs": "ended with OTHER BITS than in the log",
    "ended": "ended; the log does not say with which weights",
    "lost": "was lost, as in the log",
    FAILED: "failed, as in the log, which ends there too",
    STOPPED: "was stopped, or not started, since another one did not do what its log says",
    "": "ended BEFORE its log does",
}


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="a run of replicas that came and went, made again to the same bits",
        usage="sparsecomm replay LOG [LOG ...] -- COMMAND ...",
        description=(
            f"{__doc__} Runs the command once for each replica that took part, on this machine, each until it ends or"
            " was lost then. The command is what each replica was started with, such as `python train.py`; its"
            " strategy finds out that it replays. No lighthouse is needed."
        ),
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="of all replicas, as membership_log has written them")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Replays, and exits with 1 unless all replicas ended as in the logs."""
    command = options.after
    if not command:
        raise ValueError("COMMAND must be what starts a replica; got none. Add it, such as: -- python train.py")
    scripts = scripts_of([entry for log in options.logs for entry in read(log)])
    # As an interrupt: replicas are not left behind.
    for number in _ENDING:
        signal.signal(number, signal.default_int_handler)
    try:
        ends = replay(scripts, lambda environment: _start(environment, command))
    except KeyboardInterrupt:
        sys.exit("sparsecomm: the replay was stopped")
    for script in scripts:
        print(f"{script.replica} {_ENDS.get(ends[script.replica], ends[script.replica])}")
    if not all(end in ("same", "ended", "lost", FAILED) for end in ends.values()):
        sys.exit(
            "sparsecomm: not the run of the logs; start it with the same script, arguments, seeds, data and versions,"
            " without checkpoints of the run"
        )


class Process(Protocol):
    """A replica that runs, as `subprocess.Popen` has it."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> object: ...


def replay(scripts: Sequence[Script], start: Callable[[dict[str, str]], Process]) -> dict[str, str]:
    """Runs all replicas, each from when it came; returns how each has ended, by name.

    Args:
        scripts: Of all replicas.
        start: Starts a replica, given what its environment must have.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for script in scripts:
        store.set(script_key(script.replica), script.to_json())
    by_name = {script.replica: script for script in scripts}
    waiting, running = list(scripts), dict[str, Process]()
    ends = dict.fromkeys((script.replica for script in scripts), STOPPED)
    folder = tempfile.TemporaryDirectory(prefix="sparsecomm-replay-")
    try:
        while waiting or running:
            for script in [each for each in waiting if _is_due(each, store)]:
                waiting.remove(script)
                said = {STORE: f"127.0.0.1:{store.port}", REPLICA: script.replica, FOLDER: folder.name}
                running[script.replica] = start(said)
            for name, code in [(name, process.poll()) for name, process in running.items()]:
                if code is not None:
                    # With what it has left running.
                    running.pop(name).kill()
                    ends[name] = _end_of(by_name[name], code, store)
            # Others would wait for one that has failed before its log ends.
            if any(end.startswith(BROKEN) for end in ends.values()) or (waiting and not running):
                return ends
            time.sleep(_LOOKING_SECONDS)
    finally:
        with _undisturbed():
            for process in running.values():
                process.terminate()
            deadline = time.monotonic() + _ENDING_SECONDS
            for process in running.values():
                # Lightning only notes SIGTERM, and one that waits for another replica never comes to look.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.wait()
            folder.cleanup()
    return ends


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which an impatient user's signals do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Group:
    """A process and all that it has started, such as what a shell script runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.poll, self.wait = process.poll, process.wait

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # It is the leader of a process group, which may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _end_of(script: Script, code: int, store: TCPStore) -> str:
    """How a replica has ended. Its own error comes again in a replay: it was lost by that in the run, too."""
    if code == 0:
        return _text(store, end_key(script.replica))
    last = next((scene.name for scene in reversed(script.scenes) if scene.counts), None)
    at_its_end = not script.weights and _text(store, place_key(script.replica)) == last
    return FAILED if at_its_end else f"{BROKEN} with exit code {code}"


def _is_due(script: Script, store: TCPStore) -> bool:
    """Whether others wait for a replica in its first meeting."""
    return all(_text(store, place_key(name)) == script.first for name in script.follows)


def _text(store: TCPStore, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _start(environment: dict[str, str], command: Sequence[str]) -> Process:
    try:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"COMMAND must be what starts a replica; got {command[0]!r}: {error}") from error
    threading.Thread(target=_pass_on, args=(process.stdout, short(environment[REPLICA])), daemon=True).start()
    return _Group(process)


def _pass_on(output: IO[str], name: str) -> None:
    """Prints what a replica prints, with its name."""
    with output:
        for line in output:
            print(f"{name} | {line}", end="", flush=True)
