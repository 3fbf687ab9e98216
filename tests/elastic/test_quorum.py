"""Addresses, and the parts that torchft gets from us."""

import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.elastic import quorum
from lightning_sparsecomm.elastic.quorum import address_towards
from lightning_sparsecomm.elastic.spare_parts import DaemonExecutor, NoTransport
from tests.elastic.replicas import lighthouse, needs_torchft, replicas


def has_ipv6() -> bool:
    """Whether this machine can listen at ::1: Python may know IPv6 where the kernel has it switched off."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("lighthouse", ["http://127.0.0.1:29510", "http://127.0.0.1:29510/", "http://localhost:1"])
def test_the_address_is_that_of_the_card_on_the_way(lighthouse: str) -> None:
    assert address_towards(lighthouse) in ("127.0.0.1", "::1")


def test_a_name_of_this_machine_that_stands_for_its_loopback_is_not_told_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /etc/hosts of Debian has the machine's own name."""
    asked: list[tuple[str, int]] = []

    class Probe(socket.socket):
        def connect(self, address: Any) -> None:
            asked.append(address)
            super().connect(("127.0.0.1", address[1]) if address[0] == "192.0.2.1" else address)

        def getsockname(self) -> Any:
            return ("10.1.2.3", 5) if asked[-1][0] == "192.0.2.1" else super().getsockname()

    known = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29510))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: [known])
    monkeypatch.setattr(socket, "socket", Probe)
    assert address_towards("http://desk:29510") == "10.1.2.3"
    # Whoever says localhost means this machine alone.
    assert address_towards("http://localhost:29510").startswith("127.")


@pytest.mark.parametrize("lighthouse", ["", "127.0.0.1:29510", "http://127.0.0.1", "http://127.0.0.1:x", "http://:-1"])
def test_what_is_no_address_is_refused(lighthouse: str) -> None:
    with pytest.raises(ValueError, match=r"lighthouse must be an address such as http://host:29510"):
        address_towards(lighthouse)


def test_work_in_a_thread_that_nobody_waits_for() -> None:
    executor, found = DaemonExecutor(), []

    def work(number: int) -> int:
        found.append(threading.current_thread().daemon)
        return 1 // number

    future: Future[object] = executor.submit(work, number=1)
    assert future.result(10) == 1
    assert found == [True]
    with pytest.raises(ZeroDivisionError):
        executor.submit(work, number=0).result(10)
    executor.shutdown(wait=True)


def test_no_state_is_served() -> None:
    transport = NoTransport()
    assert transport.metadata() == ""
    transport.disallow_checkpoint()
    transport.shutdown(wait=True)


def meet_early(pipe: Connection, address: str, patience: timedelta) -> int:
    quorum.CONNECTING = timedelta(seconds=0.5)
    with pytest.warns(UserWarning, match=r"no quorum yet with the lighthouse at .*; trying on: failed to connect"):
        return meet(pipe, address, patience)


def meet(pipe: Connection, address: str, patience: timedelta) -> int:
    made = quorum.Quorum("a", address, timedelta(seconds=60), patience, lambda words: None)
    made.form()
    made.close()
    return made.size


@needs_torchft
@pytest.mark.slow
def test_a_replica_that_starts_before_the_lighthouse_waits_for_it() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with replicas() as start:
        early, late = (start(meet_early, address, timedelta(seconds=seconds)) for seconds in (60, 1))
        with pytest.raises(AssertionError, match=rf"{PeerError.__name__}: no quorum has formed for 0:00:01 with"):
            late.hear()
        with lighthouse(port):
            assert early.hear() == 1


@needs_torchft
@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address ::1, so nobody can listen there")
def test_replicas_meet_by_ipv6() -> None:
    with lighthouse(least=2, host="[::1]") as address, replicas() as start:
        both = [start(meet, address, timedelta(seconds=60)) for _ in range(2)]
        assert [replica.hear() for replica in both] == [2, 2]
