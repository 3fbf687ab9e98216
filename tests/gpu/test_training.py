"""The laws of training on GPUs with NCCL, between two of them. A slow test runs the same code on CPUs with Gloo."""

from pathlib import Path

import pytest
import torch

from tests.gpu.training import METHODS, trained

# Each of two processes imports Lightning anew, and torch.compile takes its time.
pytestmark = pytest.mark.timeout(1200)


def check_equal(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]], tolerance: float) -> None:
    for rank, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            difference = float((own[name] - tensor).abs().max())
            assert difference <= tolerance, f"{name} of rank {rank} differs by {difference:.2e}"


def check_replicas(ranks: list[dict[str, torch.Tensor]]) -> None:
    check_equal(ranks[1:], ranks[:1] * (len(ranks) - 1), 0.0)


def check_full_density(folder: Path, accelerator: str, *more: str, tolerance: float = 1e-5) -> None:
    """Full density trains as ddp does, up to round-off; replicas are equal to the bit."""
    ddp = trained(folder / "ddp", "ddp", accelerator, 2, *more)
    ours = trained(folder / "ours", "full density", accelerator, 2, *more)
    check_replicas(ours)
    check_equal(ours, ddp, tolerance)


@pytest.mark.slow
def test_on_cpus(tmp_path: Path) -> None:
    check_full_density(tmp_path, "cpu")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["plain", "compiled"])
def test_full_density_is_ddps(more: list[str], tmp_path: Path) -> None:
    check_full_density(tmp_path, "gpu", *more)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_full_density_is_ddps_in_mixed_precision(precision: str, tmp_path: Path) -> None:
    # Half-precision activations turn round-off of the weights into more.
    check_full_density(tmp_path, "gpu", f"--precision={precision}", tolerance=1e-2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_replicas_are_equal(method: str, precision: str, tmp_path: Path) -> None:
    check_replicas(trained(tmp_path / "run", method, "gpu", 2, f"--precision={precision}"))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("method", METHODS)
def test_one_gpu_trains(method: str, tmp_path: Path) -> None:
    for tensor in trained(tmp_path / "run", method, "gpu", 1)[0].values():
        assert bool(tensor.isfinite().all())
