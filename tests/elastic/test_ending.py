"""The end of a run, and those that were away then, or in doubt, or not done by themselves."""

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from lightning_sparsecomm import methods
from lightning_sparsecomm.commands.replay import FAILED, replay
from lightning_sparsecomm.elastic.last_word import find
from lightning_sparsecomm.elastic.record import Ended, Met
from lightning_sparsecomm.elastic.replay import REPLICA, STORE, end_key, place_key
from lightning_sparsecomm.elastic.script import scripts_of
from lightning_sparsecomm.frontends.progress import LeastLimits, plain
from tests.elastic.replicas import lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import DILOCO, together
from tests.elastic.test_replay import check_same, replayed
from tests.elastic.training import Model, doubt_in_round, slowed

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("answer", [b"\0\0\0\4\0\0\0\0\0", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nrun"])
def test_a_lighthouse_that_answers_otherwise_tells_nothing(answer: bytes) -> None:
    """As behind a proxy that speaks HTTP/2 only."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert find("abc", f"http://127.0.0.1:{server.getsockname()[1]}/") is None
        thread.join()
    assert find("abc", "http://127.0.0.1:9") is None


def test_limits_are_lifted_until_the_fit_is_over() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, min_epochs=3, min_steps=7, max_epochs=9, logger=False)
    limits = LeastLimits()
    limits.lift(trainer)
    limits.lift(trainer)
    assert (trainer.min_epochs, trainer.min_steps) == (None, None)
    limits.restore()
    limits.restore()
    assert (trainer.min_epochs, trainer.min_steps) == (3, 7)


def test_schedules_with_numpys_numbers_can_be_loaded_elsewhere(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 10)))
    torch.save(plain(schedule.state_dict()), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True)["_last_lr"] == [0.1]


def test_a_replica_that_failed_by_itself_may_fail_again_in_a_replay() -> None:
    both = ("A", "B")
    entries = [
        *(Met(name, 1, both, "s0", 0, "s1", "counts") for name in both),
        Met("A", 2, ("A",), "s1", 1, "s2", "counts"),
        Ended("A", 2, "digest"),
    ]
    scripts = scripts_of(entries)
    first = scripts[0].scenes[0].name
    for place, of_a, of_b in ((first, "same", FAILED), ("another", "stopped", "broke off with exit code 1")):
        assert replay(scripts, lambda environment, place=place: Played(environment, place)) == {"A": of_a, "B": of_b}


class Played:
    """A process that tells where it is, and ends: A as it should, after B, and B by an error."""

    ended_b = False

    def __init__(self, environment: dict[str, str], place: str) -> None:
        self.name, (host, _, port) = environment[REPLICA], environment[STORE].rpartition(":")
        store = TCPStore(host, int(port), is_master=False)
        store.set(place_key(self.name), place)
        store.set(end_key(self.name), "same")
        Played.ended_b = False

    def poll(self) -> int | None:
        if self.name == "B":
            Played.ended_b = True
            return 1
        return 0 if Played.ended_b else None

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> None: ...


class Masked(Model):
    """Most of it is a buffer that is in no state_dict."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mask", torch.zeros(6_000_000), persistent=False)


@needs_torchft
@pytest.mark.slow
def test_buffers_that_are_not_saved_reach_a_replica_that_joins() -> None:
    with lighthouse() as address, replicas() as start:
        started = together(start, address, DILOCO, {}, "ab", kind=Masked, max_epochs=1)
        assert [each.hear()["steps"] for each in started] == [10, 10]


@needs_torchft
@pytest.mark.slow
def test_one_in_doubt_about_the_last_exchange_learns_it_from_the_lighthouse(tmp_path: Path) -> None:
    """In its replay, too."""
    log = tmp_path / "members.jsonl"
    with lighthouse() as address, replicas() as start:
        doubt = {"a": doubt_in_round(3)}
        both = together(start, address, DILOCO, doubt, "ab", max_epochs=1, membership_log=str(log))
        results = [each.hear() for each in both]
    assert '"ended"' in log.read_text()
    check_same(results, results[1:] * 2)
    ends, made = replayed(log, DILOCO, {"a": [0], "b": [1]}, max_epochs=1)
    assert sorted(ends.values()) == ["same", "same"]
    check_same(results, made)


@needs_torchft
@pytest.mark.slow
def test_all_end_together_whatever_each_one_has_to_make_at_least() -> None:
    slow = {"a": slowed(0.02), "b": slowed(0.08)}
    method = methods.diloco(every=6, outer_lr=0.5)
    with lighthouse() as address, replicas() as start:
        both = together(start, address, method, slow, "ab", max_epochs=4, min_epochs=4, adapt_steps=True)
        first, second = (each.hear() for each in both)
    assert first["steps"] == 40 > second["steps"]
    assert first["round"] == second["round"]
