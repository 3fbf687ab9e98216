"""CompressionRatio against figures worked out by hand, in one process and in two."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm import CompressionRatio, Ledger
from tests.distributed.launch import run_ranks

# What four steps sent, and what ddp would have: by rank, then by step.
SENT = [[100.0, 50.0, 50.0, 300.0], [200.0, 100.0, 0.0, 200.0]]
DDP = [[1000.0, 1000.0, 1000.0, 1000.0], [1000.0, 1000.0, 0.0, 2000.0]]


def test_one_process() -> None:
    metric = CompressionRatio()
    for index, (sent, ddp) in enumerate(zip(SENT[0], DDP[0], strict=True), 1):
        # Each call gives its own ratio and adds to the whole.
        assert metric(sent, ddp).item() == ddp / sent
        assert metric.compute().item() == sum(DDP[0][:index]) / sum(SENT[0][:index])
    assert metric.compute().item() == 4000 / 500


def test_it_takes_what_a_ledger_counts() -> None:
    ledger = Ledger(3)
    ledger.record("gradients", "all_gather", 1_000)
    ledger.record("DDP buffers", "broadcast", 50_000)
    ledger.ddp_bytes = 30_000
    metric = CompressionRatio()
    metric.update(ledger.link_bytes(), ledger.ddp_link_bytes)
    # 4/3 of 30,000 by a ring of three; 1,000 to each of two others.
    assert metric.compute().item() == ledger.compression_ratio() == 40_000 / 2_000


def test_nothing_sent() -> None:
    metric = CompressionRatio()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert math.isnan(metric.compute())
    metric.update(0, 1000)
    assert math.isnan(metric.compute())


def test_reset() -> None:
    metric = CompressionRatio()
    metric.update(10, 100)
    assert metric.compute().item() == 10
    metric.reset()
    metric.update(50, 100)
    assert metric.compute().item() == 2


def test_negative_bytes_are_refused() -> None:
    metric = CompressionRatio()
    metric.update(10, 100)
    with pytest.raises(ValueError, match=r"sent_bytes must not be negative; got -1.*since the last update"):
        metric.update(-1, 100)
    with pytest.raises(ValueError, match="ddp_bytes must not be negative; got -2"):
        metric.update(1, -2)
    assert metric.compute().item() == 10


def test_petabytes_are_counted_exactly() -> None:
    metric = CompressionRatio()
    for _ in range(3):
        metric.update(2.0**51, 1)
        metric.update(1, 2.0**51)
    assert metric.sent_bytes.item() == metric.ddp_bytes.item() == 3 * (2**51 + 1)
    # Lightning casts modules to the Trainer's precision; a count must not follow.
    assert metric.half().sent_bytes.dtype == torch.float64


def test_its_state_can_be_saved() -> None:
    metric = CompressionRatio()
    metric.persistent(True)
    metric.update(10, 100)
    module = nn.ModuleDict({"ratio": metric})
    again = nn.ModuleDict({"ratio": CompressionRatio()})
    again["ratio"].persistent(True)
    again.load_state_dict(module.state_dict())
    again["ratio"].update(10, 300)
    assert again["ratio"].compute().item() == 20


def _on_two_ranks(rank: int) -> list[float]:
    metric = CompressionRatio()
    for sent, ddp in zip(SENT[rank], DDP[rank], strict=True):
        metric.update(sent, ddp)
    found = [metric.compute().item()]
    # What was synchronized for compute() is this rank's own again.
    metric.update(0, 0)
    return [*found, metric.sent_bytes.item(), metric.compute().item()]


def test_two_processes(tmp_path: Path) -> None:
    whole = (sum(DDP[0]) + sum(DDP[1])) / (sum(SENT[0]) + sum(SENT[1]))
    assert run_ranks(tmp_path, 2, _on_two_ranks) == [[whole, sum(SENT[rank]), whole] for rank in range(2)]
