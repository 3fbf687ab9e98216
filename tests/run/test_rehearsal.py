"""Steps on stand-ins compile what a training needs, and touch nothing of it."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.caching import CacheImpl

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.commands import main
from lightning_sparsecomm.commands.warm import _defined, _kinds
from lightning_sparsecomm.kernels.numba_jit import announcing, compiled
from lightning_sparsecomm.run.rehearsal import _stand_ins, _take_steps, rehearse_method
from lightning_sparsecomm.testing import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.few(12)
@pytest.mark.filterwarnings("ignore:one process")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16))],
)
@pytest.mark.parametrize("name", ["default", *methods.RECIPES])
def test_every_method_can_be_rehearsed_with_every_optimizer_that_it_is_for(name: str, dtype: torch.dtype) -> None:
    method = getattr(methods, name)()
    kinds = [kind for kind in _kinds(dtype) if _defined(method, kind[0])]
    assert kinds
    for kind in kinds:
        _take_steps(method, [kind], 1000)


def test_nothing_is_touched() -> None:
    kinds = _kinds(torch.float32)[1:4]
    method, random = methods.default(), torch.get_rng_state()
    described = str(method)
    rehearse_method(method, kinds, [math.inf])
    assert torch.equal(torch.get_rng_state(), random)
    assert str(method) == described
    for optimizer, parameters in kinds:
        assert not optimizer.state
        assert all(parameter.grad is None and not parameter.any() for _, parameter in parameters)


def test_what_fails_is_left_to_the_run() -> None:
    class Broken(methods.dgc):
        @property
        def syncs(self) -> Any:
            raise RuntimeError("broken")

        @syncs.setter
        def syncs(self, value: Any) -> None:
            pass

    rehearse_method(Broken(), _kinds(torch.float32)[:1], [math.inf])


def test_stand_ins_are_small_and_of_the_same_kinds() -> None:
    shapes = {"a": (5000, 3000), "b": (7,), "c": (64, 3, 9, 9), "d": (), "e": (0, 4)}
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    named += [("f", torch.nn.Parameter(torch.zeros(300, 300, dtype=torch.float64), requires_grad=False))]
    made = dict(_stand_ins(named))
    assert {name: tuple(each.shape) for name, each in made.items()} == {
        **{"a": (160, 160), "b": (6,), "c": (6, 3, 3, 3), "d": (), "e": (0, 4)},
        "f": (160, 160),
    }
    assert (made["f"].dtype, made["f"].requires_grad, made["a"].requires_grad) == (torch.float64, False, True)


def _collectives(wire: Wire) -> list[Any]:
    results: list[Any] = [wire.all_reduce_(torch.tensor([1.5, 2.0])), wire.all_gather(torch.tensor([[3, 4]]))]
    results.append(wire.all_reduce_or_(torch.tensor([5, 6], dtype=torch.uint8)))
    later = torch.tensor([7.0])
    wire.all_reduce_later_(later)()
    return [each.numpy() for each in (*results, later)]


def test_the_mirror_returns_what_two_equal_ranks_get() -> None:
    expected = run_ranks(2, lambda rank: _collectives(Wire()))[0]
    for found, wanted in zip(_collectives(MirrorWire()), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_compilation_is_said_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a cache: a second run of this test would load what the first has compiled.
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    def made(offset: int) -> Any:
        def add(x: Any) -> Any:
            return x + offset

        add.__module__, add.__qualname__ = "lightning_sparsecomm.of_a_test", f"add_{offset}"
        return compiled(add)

    said: list[str] = []
    first, second = made(1), made(2)
    with announcing(lambda: said.append("compiling")) as count:
        assert (first(1), second(1.0), first(2)) == (2, 3.0, 3)
    assert (said, count()) == (["compiling"], 2)
    with announcing(lambda: said.append("compiling")) as count:
        assert first(3) == 4
    assert (said, count()) == (["compiling"], 0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["warm", "--methods", "sbc"])
    main(["warm", "--methods", "sbc"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("all kernels were compiled already: ")
    with pytest.raises(SystemExit):
        main(["warm", "--methods", "dcg"])
    assert "'dcg' is no method. Did you mean 'dgc'? Methods: adacomp, aligned_topk, " in capsys.readouterr().err


_FIRST_STEP = """
import sys, torch, pytorch_lightning as pl, lightning_sparsecomm
from numba.core import event
from torch.utils.data import DataLoader

class Listener(event.Listener):
    def on_start(self, event): print("compiled in training:", event.data["dispatcher"].py_func.__name__)
    def on_end(self, event): pass

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Tanh(), torch.nn.Linear(700, 10))
    def on_train_batch_start(self, *args): event.register("numba:compile", Listener())
    def training_step(self, batch, batch_idx): return self.network(batch).square().mean()
    def configure_optimizers(self): return getattr(torch.optim, sys.argv[2])(self.parameters(), lr=0.1)

trainer = pl.Trainer(strategy=sys.argv[1] + "_fork", accelerator="cpu", devices=2, max_steps=12, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), DataLoader(torch.randn(200, 300), batch_size=4))
"""


# Each compiles all kernels anew.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("sparsecomm", "SGD"), ("sparsecomm", "AdamW"), ("sparsecomm_sketched_sgd", "SGD")],
)
def test_no_step_compiles(name: str, optimizer: str, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", _FIRST_STEP, name, optimizer]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert "compiling kernels, once per machine" in run.stderr
    assert "compiled in training" not in run.stdout
