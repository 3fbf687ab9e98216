"""What all four strategies have in common: their arguments, and the devices and backends that they run on."""

import importlib
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_sparsecomm.basis import wire as basis_wire
from lightning_sparsecomm.methods import gradient_dropping
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import run_ranks


def construction(text: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=re.escape(text))


EVERY_STRATEGY = ["pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"]


@pytest.mark.parametrize("package", EVERY_STRATEGY)
def test_strategy(package: str) -> None:
    strategy: Any = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    with construction(
        "method must be a Method, such as lightning_sparsecomm.methods.dgc(density=0.001); got"
        " 'gradient_dropping'. Did you mean lightning_sparsecomm.methods.gradient_dropping()?",
        TypeError,
    ):
        strategy(method="gradient_dropping")
    # The function itself, not what it returns.
    with construction("Did you mean lightning_sparsecomm.methods.gradient_dropping()?", TypeError):
        strategy(method=gradient_dropping)
    with construction("Did you mean lightning_sparsecomm.methods.sbc1()?", TypeError):
        strategy(method="sbc1")
    with construction("got 'Channel'.", TypeError) as caught:
        strategy(method="Channel")
    assert "Did you mean" not in str(caught.value)
    for seed in ("0", 1.0, True, None):
        with construction(f"seed must be a whole number, equal on all ranks; got {seed!r}. Leave it out", TypeError):
            strategy(seed=seed)
    with construction("method must be a Method", TypeError):
        strategy(method="gossip")
    with construction("method must be a Method", TypeError):
        strategy(0.01)
    for every in (0, -1, True, 2.0, "3"):
        with construction(
            f"check_replicas_every must be a whole number of optimizer steps, at least 1; got {every!r}. Use None"
            " to compare replicas at the end of training only."
        ):
            strategy(check_replicas_every=every)
    assert strategy(check_replicas_every=3).check_replicas_every == 3
    for timeout in (5, timedelta(0)):
        with construction(f"timeout must be a positive timedelta; got {timeout!r}. Leave it out"):
            strategy(timeout=timeout)
    assert strategy().check_replicas_every == 1000
    if "fabric" not in package:
        with construction("uneven_inputs must be True or False, equal on all ranks; got 1.", TypeError):
            strategy(uneven_inputs=1)
        with construction("ddp_comm_hook cannot be combined with a method, which takes the place of DDP's"):
            strategy(ddp_comm_hook=fp16_compress_hook)
    with pytest.raises(RuntimeError, match="no model is set up for training yet"):
        strategy().engine  # noqa: B018
    assert strategy().ledger is None


def _begin_elsewhere(rank: int, device_type: str) -> str:
    strategy = SparseCommStrategy()
    try:
        strategy._begin(torch.device(device_type), None)
    except ValueError as error:
        return str(error)
    return ""


def test_other_devices(tmp_path: Path) -> None:
    for device_type in ("mps", "xla"):
        (found,) = run_ranks(tmp_path, 1, _begin_elsewhere, device_type)
        text = f"accelerator must be 'cpu' or 'cuda', where our collectives are tested; got '{device_type}'."
        assert found.startswith(text)
        assert found.endswith("Use accelerator='cpu'.")
    assert run_ranks(tmp_path, 1, _begin_elsewhere, "cpu") == [""]


def test_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, text in (
        ("mpi", "process_group_backend must be one of gloo, nccl, on which the collectives are tested; got 'mpi'."),
        ("nccl", "process_group_backend must be 'gloo' on CPUs; got 'nccl'."),
    ):
        monkeypatch.setattr(basis_wire.dist, "get_backend", lambda group=None, backend=backend: backend)
        (found,) = run_ranks(tmp_path, 1, _begin_elsewhere, "cpu")
        assert found.startswith(text)
