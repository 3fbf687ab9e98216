"""The peak of utilization.py counts what a device carries, and only while it is told to."""

import socket
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SENT = 4_000_000


@pytest.fixture
def utilization(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    module = import_module("utilization")
    monkeypatch.setattr(module, "DEVICE", "lo")
    return module


def send() -> None:
    """Some bytes over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            for _ in range(SENT // 10_000):
                sender.sendall(bytes(10_000))
                receiver.recv(10_000, socket.MSG_WAITALL)


def test_what_follows_the_end_does_not_count(utilization: ModuleType) -> None:
    with utilization.Peak() as peak:
        ends = utilization.Ends(peak, periods=2)
        for _ in range(3 * utilization.EVERY - 1):
            ends.note()
        while peak.bytes < SENT / 2:  # until it has looked
            send()
            time.sleep(utilization.LOOK_SECONDS)
        ends.note()
        counted = peak.bytes
        for _ in range(2 * counted // SENT + 2):
            send()
        time.sleep(3 * utilization.LOOK_SECONDS)
    assert peak.bytes == counted


def test_what_comes_before_the_first_period_is_forgotten(utilization: ModuleType) -> None:
    peak = utilization.Peak()
    peak.bytes = SENT
    ends = utilization.Ends(peak, periods=2)
    for _ in range(utilization.EVERY - 1):
        ends.note()
    assert peak.bytes == SENT
    ends.note()
    assert peak.bytes == 0
