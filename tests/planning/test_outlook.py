"""What is learned of a far link's rate from ddp's steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.methods.auto import BASELINE
from lightning_sparsecomm.planning import MeasuredLink, Network, Rehearsed, Work, predict
from lightning_sparsecomm.planning.outlook import Outlook


@pytest.mark.parametrize(("rate", "exactly"), [(50e6, True), (10e9, False)])
def test_a_step_tells_a_rate_or_where_round_trips_explain_it_a_bound(rate: float, exactly: bool) -> None:
    named = [("weight", torch.zeros(1))]
    engine: Any = SimpleNamespace(wire=MirrorWire(2), registry=SimpleNamespace(named=named, few_rows=SimpleNamespace()))
    network, sizes = Network(rate, rtt=0.1, call=0.0), (256.0, 131_072.0)
    points: Any = {kind: [(s, network.seconds(kind, s, 2)) for s in sizes] for kind in ("all_reduce", "all_gather")}
    outlook = Outlook(engine, 1.0)
    # The first step, which is ddp's, tells which tables have few rows, for methods to come.
    assert engine.registry.few_rows.wanted
    outlook.link = MeasuredLink(2, points, around=0.2)
    cost = Rehearsed("ddp", 2, {"update": 0.0}, (("all_reduce", 44e6, 1.0),), 0.0, overlaps=True)
    vars(outlook)["_costs"] = {BASELINE: cost}
    step = predict(cost, network, Work(0.2)).seconds
    assert outlook.learn_rate(step, Work(0.2))
    assert outlook.link.rate is not None
    if exactly:
        assert outlook.link.rate == pytest.approx(rate, rel=0.05)
    else:
        assert 50e6 < outlook.link.rate < rate
        assert predict(cost, outlook.link, Work(0.2)).seconds < 1.2 * step


def test_a_rank_that_could_not_rehearse_ddp_agrees_with_the_others_all_the_same() -> None:
    """Else they would wait for it."""
    wire = MirrorWire(2)
    registry = SimpleNamespace(named=[("weight", torch.zeros(1))], few_rows=SimpleNamespace())
    engine: Any = SimpleNamespace(wire=wire, registry=registry)
    outlook = Outlook(engine, 1.0)
    outlook.link = MeasuredLink(2, {"all_reduce": [(256.0, 0.2)], "all_gather": [(256.0, 0.1), (1e5, 0.3)]}, around=0.2)
    wire.calls.clear()
    assert not outlook.learn_rate(1.0, Work(0.2))
    assert [kind for kind, _ in wire.calls] == ["all_gather"]
