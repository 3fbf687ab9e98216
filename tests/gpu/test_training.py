"""The laws of training on GPUs with NCCL. A slow test runs the same code on CPUs with Gloo."""

from pathlib import Path

import pytest
import torch

from tests.gpu.training import METHODS, OPTIMIZERS, started, suits, trained, weights_in

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


@pytest.mark.gpu(1)
@pytest.mark.parametrize("more", [[], ["--compile"]], ids=["plain", "compiled"])
def test_full_density_is_ddps(more: list[str], tmp_path: Path) -> None:
    check_full_density(tmp_path, "gpu", *more)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_full_density_is_ddps_in_mixed_precision(precision: str, tmp_path: Path) -> None:
    # Half-precision activations turn round-off of the weights into more.
    check_full_density(tmp_path, "gpu", f"--precision={precision}", tolerance=1e-2)


# NCCL adds in an order that depends on DDP's buckets, and a resumed run has others in its first step, as with ddp.
TO_ROUND_OFF = "dense"


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("method", "optimizer"), [(m, o) for m in METHODS for o in OPTIMIZERS if suits(m, o)])
def test_replicas_are_equal_and_resume_to_the_bit(method: str, optimizer: str, tmp_path: Path) -> None:
    # Three, since two numbers have one sum in any order.
    ranks = trained(tmp_path / "run", method, "gpu", 3, "--resume", f"--optimizer={optimizer}")
    check_replicas(ranks)
    check_equal(weights_in(tmp_path / "run" / "resumed", 3), ranks, 1e-6 if method == TO_ROUND_OFF else 0.0)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "method",
    [
        "default",
        "default with local steps",
        "dgc",
        "sbc",
        "sketched_sgd",
        "s2_reducer",
        "sparse_loco",
        "powersgd",
    ],
)
def test_replicas_are_equal_in_other_precisions(method: str, precision: str, tmp_path: Path) -> None:
    check_replicas(trained(tmp_path / "run", method, "gpu", 2, f"--precision={precision}"))


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    "method",
    [
        "default",
        "full density",
        "full density with local steps",
        "dgc",
        "sbc",
        "s2_reducer",
        "sparse_loco",
        "powersgd",
    ],
)
def test_gpus_train_as_cpus(method: str, tmp_path: Path) -> None:
    ours = trained(tmp_path / "gpu", method, "gpu", 2)
    check_equal(ours, trained(tmp_path / "cpu", method, "cpu", 2), 1e-3)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("method", ["default", "default with local steps", "sparse_loco two steps late"])
def test_a_lost_rank_ends_the_others(method: str, tmp_path: Path) -> None:
    *others, lost = started(tmp_path / "run", method, "gpu", 2, "--dies")
    assert lost.returncode == -9
    for done in others:
        # With NCCL, torch's watchdog ends the process, as it does with ddp, and says why.
        assert done.returncode not in (0, -9) and "remote process exited" in done.stdout, done.stdout


@pytest.mark.gpu(1)
def test_one_gpu_trains(tmp_path: Path) -> None:
    for tensor in trained(tmp_path / "run", "default", "gpu", 1)[0].values():
        assert bool(tensor.isfinite().all())
