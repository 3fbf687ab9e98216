"""Memory that ranks of one machine share."""

import os
from pathlib import Path

import pytest
import torch

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run import node_memory
from lightning_sparsecomm.run.node_memory import NodeMemory
from lightning_sparsecomm.testing import run_ranks

CPU = torch.device("cpu")


def exchanged(rank: int) -> tuple[list[float], list[list[str]]]:
    """Sums and results of some rounds, of sizes that grow and shrink; and the files that stay."""
    memory, found, files = NodeMemory(Wire.apart()), [], []
    for number, size in enumerate((3, 3, 5000, 2, 70_000)):
        rows = memory.to_sum(size, torch.float32, CPU)
        assert rows is not None
        assert rows.shape == (3, size)
        rows[rank] = 10.0**rank + number
        memory.meet(to_sum=True)
        total = float(rows[:, -1].sum())
        for dtype in (torch.float32, torch.float64):
            results = memory.for_results(3 * size, dtype, CPU)
            assert results is not None
            results[rank * size : (rank + 1) * size] = total + rank
            memory.meet()
            found.append(float(results.view(3, size)[:, 0].sum()))
        files.append(os.listdir(node_memory.FOLDER))
        # Before another rank makes the next one.
        memory.meet()
    return found, files


def test_ranks_read_what_others_have_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_memory, "FOLDER", str(tmp_path))
    expected = [3 * (111.0 + 3 * number) + 3 for number in range(5) for _ in range(2)]
    for found, files in run_ranks(3, exchanged):
        assert found == expected
        # Nothing is left of them, even while they are used.
        assert files == [[]] * 5


def without(rank: int) -> list[bool]:
    memory = NodeMemory(Wire.apart())
    return [memory.to_sum(8, torch.float32, CPU) is None, memory.for_results(8, torch.float32, CPU) is None]


def test_where_one_rank_does_not_find_it_all_go_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def blind(rank: int) -> list[bool]:
        if rank == 1:
            node_memory._mapped = lambda path, size: None  # as on another machine
        return without(rank)

    assert run_ranks(3, blind) == [[True, True]] * 3

    def full(file: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_memory, "FOLDER", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert run_ranks(2, without) == [[True, True]] * 2
    assert not list(tmp_path.iterdir())


def test_elsewhere_than_on_cpus_there_is_none() -> None:
    def on_meta(rank: int) -> bool:
        return NodeMemory(Wire.apart()).to_sum(8, torch.float32, torch.device("meta")) is None

    assert run_ranks(1, on_meta) == [True]
