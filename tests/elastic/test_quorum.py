"""Addresses, and the parts that torchft gets from us."""

import threading
from concurrent.futures import Future

import pytest

from lightning_sparsecomm.elastic.quorum import address_towards
from lightning_sparsecomm.elastic.spare_parts import DaemonExecutor, NoTransport


@pytest.mark.parametrize("lighthouse", ["http://127.0.0.1:29510", "http://127.0.0.1:29510/", "http://localhost:1"])
def test_the_address_is_that_of_the_card_on_the_way(lighthouse: str) -> None:
    assert address_towards(lighthouse) in ("127.0.0.1", "::1")


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
