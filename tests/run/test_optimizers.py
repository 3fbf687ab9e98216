"""What a record of one optimizer says of its parameters."""

import torch
from torch import nn

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing import DeltaSync, GradientSync

CHANNEL = Channel(DenseAllReduce())


def test_a_record_speaks_for_all_its_syncs() -> None:
    weight, bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    tracked = TrackedOptimizer(torch.optim.Adam([weight, bias]), 0)
    assert tracked.name == "Adam"
    assert (tracked.parameters, tracked.shares_gradients, tracked.drifts) == ([], False, False)
    tracked.parts = [(GradientSync(CHANNEL), [("bias", bias)])]
    assert (tracked.shares_gradients, tracked.drifts) == (True, False)
    tracked.parts.append((DeltaSync(CHANNEL), [("weight", weight)]))
    assert [name for name, _ in tracked.parameters] == ["bias", "weight"]
    assert (tracked.shares_gradients, tracked.drifts) == (True, True)
    tracked.parts = tracked.parts[1:]
    assert (tracked.shares_gradients, tracked.drifts) == (False, True)
    tracked.parts = [(GradientSync(CHANNEL, local="partial"), [("bias", bias)])]
    assert (tracked.shares_gradients, tracked.drifts) == (True, True)
