"""How far a probe goes, on networks that are played: a clock goes on by what each collective takes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis.far import FAR_SECONDS
from lightning_sparsecomm.basis.ledger import Collective
from lightning_sparsecomm.planning import Network, probe
from lightning_sparsecomm.planning.probe import measure_link

RANKS = 4


class Open(Network):
    """A network in which TCP's window is as open as the largest message so far has left it."""

    def __init__(self, *args: float, **options: float) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        object.__setattr__(self, "largest", 1.0)

    def _ramp(self, message: float, idle: float) -> float:
        opened: float = vars(self)["largest"]
        object.__setattr__(self, "largest", max(opened, message))
        return super()._ramp(message, idle) - super()._ramp(min(message, opened), idle)


class Played:
    """A wire whose collectives take their time on a clock."""

    world_size = RANKS

    def __init__(self, network: Network) -> None:
        self.network, self.now, self.far = network, 0.0, network.rtt >= FAR_SECONDS

    def perf_counter(self) -> float:
        return self.now

    def _take(self, kind: Collective, tensor: Tensor, ring: bool = False) -> None:
        self.now += self.network.seconds(kind, tensor.nbytes, RANKS, ring)

    def start_sum(self, tensor: Tensor, row: str) -> Any:
        self._take("all_reduce", tensor, ring=True)
        work: torch.futures.Future[None] = torch.futures.Future()
        work.set_result(None)
        return nullcontext(), work

    def all_reduce_(self, tensor: Tensor, row: str) -> Tensor:
        self._take("all_reduce", tensor)
        return tensor

    def all_gather(self, tensor: Tensor, row: str) -> Tensor:
        self._take("all_gather", tensor)
        return torch.stack([tensor] * RANKS)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    def played(rate: float, rtt: float, seconds: float = 1.0) -> tuple[Any, Network, float]:
        wire: Any = Played(Open(rate, rtt, call=1e-4))
        monkeypatch.setattr(probe, "time", wire)
        # After a pause, the window opens anew.
        return measure_link(wire, seconds), Network(rate, rtt, call=1e-4), wire.now

    return played


@pytest.mark.parametrize("rtt", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("rate", [10e6, 50e6, 100e6, 1e9])
def test_the_rate_is_found_in_time_whatever_the_round_trip(play: Any, rate: float, rtt: float) -> None:
    link, network, taken = play(rate, rtt)
    # What matters is what a model's gradients take.
    sums, expected = (each.seconds("all_reduce", 44e6, RANKS) for each in (link, network))
    assert expected / 1.6 < sums < expected * 1.6
    assert rate / 1.8 < link.bandwidth < rate * 1.8
    # Where a message is under way for less than a round trip, TCP's window may hide the rate.
    assert link.rate_is_known or rtt == 0.1
    assert taken < max(4, 60 * rtt)


@pytest.mark.parametrize("size", [1e5, 1e6])
@pytest.mark.parametrize("rate", [10e6, 100e6, 1e9])
def test_over_a_long_way_a_sum_takes_what_its_gathers_do(play: Any, rate: float, size: float) -> None:
    link, network, _ = play(rate, 0.1)
    assert len(link.points["all_reduce"]) == 1
    for kind in ("all_reduce", "all_gather"):
        assert link.seconds(kind, size, RANKS) == pytest.approx(network.seconds(kind, size, RANKS), rel=0.2)


def test_a_slow_link_is_not_measured_with_large_messages(play: Any) -> None:
    link, _, taken = play(1e6, 0.0)
    assert [size for size, _ in link.points["all_reduce"]] == [256, 2**14]
    assert taken < 6
