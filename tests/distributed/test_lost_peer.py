"""A rank dies or hangs: the others say what they waited for and how long, and rank 0 still writes its checkpoint."""

import inspect
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.multiprocessing import ProcessExitedException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import PeerError
from lightning_sparsecomm.basis import wire as wires
from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import dense, dgc, diloco, federated_averaging, gradient_dropping, sbc
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests import laws
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.scenarios import CLASSES, FEATURES, Classifier

SAVER = inspect.signature(ModelCheckpoint).parameters

# Lightning's advice on workers and checkpoints is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

PATIENCE = timedelta(seconds=2)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(60)


# What each of three ranks calls on a wire, and how an error names it.
CALLS: dict[str, tuple[Callable[[Wire], Any], str]] = {
    "all_reduce": (lambda wire: wire.all_reduce_(torch.ones(9)), "all_reduce of 36 bytes (weight updates)"),
    "all_reduce, later": (
        lambda wire: wire.all_reduce_later_(torch.ones(9))(),
        "all_reduce of 36 bytes (weight updates)",
    ),
    "or": (
        lambda wire: wire.all_reduce_or_(torch.ones(9, dtype=torch.uint8), "parameters"),
        "all_reduce of 9 bytes (parameters)",
    ),
    "all_gather": (lambda wire: wire.all_gather(torch.ones(3, 4)), "all_gather of 48 bytes (weight updates)"),
    "far, all_reduce": (lambda wire: wire.all_reduce_(torch.ones(9)), "all_gather of 36 bytes (weight updates)"),
    "far, all_reduce of pieces": (
        lambda wire: wire.all_reduce_(torch.ones(300_000)),
        "all_to_all of 1,200,000 bytes (weight updates)",
    ),
    "far, all_gather": (lambda wire: wire.all_gather(torch.ones(3, 4)), "all_gather of 48 bytes (weight updates)"),
}


WORDS = (
    r"rank {rank} waited (\d+\.\d) s in vain for its {call} {when}\. Another rank is gone, or did not answer within the"
    r" process group's timeout: look for the first error in the logs of all ranks\. If a rank is only slow at times,"
    r" give the strategy a longer timeout=datetime\.timedelta\(hours=1\)\."
)


def _call(wire: Wire, name: str) -> tuple[str, str, float]:
    begin = time.monotonic()
    with pytest.raises(PeerError) as raised:
        CALLS[name][0](wire)
    assert wire.failures == [raised.value]
    return str(raised.value), str(raised.value.__cause__), time.monotonic() - begin


def _reduced(wire: Wire, tensor: Tensor) -> "torch.futures.Future[list[Tensor]]":
    """A sum whose future raises in another thread, as in DDP's hook."""
    waiting, work = wire.start_sum(tensor)

    def received(future: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        with waiting:
            return future.value()

    return work.get_future().then(received)


def _lose_in_calls(rank: int, lose: Callable[[], None], patience: timedelta) -> dict[str, tuple[str, str, float]]:
    # Each call needs a group of its own, since a connection is lost only once.
    wires = {
        name: FarWire(group=dist.new_group(timeout=patience)).under("weight updates") for name in (*CALLS, "future")
    }
    for name, wire in wires.items():
        wire.all_reduce_(torch.zeros(1))
        wire.far = 0.128 if name.startswith("far") else 0.0
    if rank == 2:
        lose()
    with ThreadPoolExecutor(len(CALLS)) as pool:
        found = dict(zip(CALLS, pool.map(lambda name: _call(wires[name], name), CALLS)))
    wire, begin = wires["future"], time.monotonic()
    # torch only quotes errors of a hook.
    with pytest.raises(PeerError) as raised, Engine(dense(), wire).guards.backward():
        _reduced(wire, torch.ones(9)).wait()
    assert wire.failures == [raised.value]
    found["future"] = str(raised.value), str(raised.value.__cause__), time.monotonic() - begin
    with pytest.raises(RuntimeError, match="PeerError: rank"):
        _reduced(wire, torch.ones(9)).wait()
    return found


@pytest.mark.parametrize("lose", [kill, pytest.param(hang, marks=pytest.mark.slow)])
def test_every_call_says_what_it_waited_for(tmp_path: Path, lose: Callable[[], None]) -> None:
    # Long where a connection is closed: a busy machine may be late to notice.
    patience = PATIENCE if lose is hang else timedelta(seconds=60)
    results = run_ranks(tmp_path, 3, _lose_in_calls, lose, patience, timeout=90, patience=patience, lost=[2])
    for rank, found in enumerate(results):
        for name, (message, cause, seconds) in found.items():
            call = "all_reduce of 36 bytes (weight updates)" if name == "future" else CALLS[name][1]
            when = "in optimizer step 0" if name == "future" else "before the first optimizer step"
            waited = re.fullmatch(WORDS.format(rank=rank, call=re.escape(call), when=when), message)
            assert waited, message
            # No upper bound, since a busy machine may be late. run_ranks ends a rank that waits for ever.
            assert float(waited[1]) <= seconds + 0.05
            assert ("closed" in cause or "reset" in cause) == (lose is kill), cause
            if lose is hang:
                assert float(waited[1]) > 1.5


def _wait_by_a_clock(rank: int) -> list[str]:
    messages = []
    for seconds in (0.0, 2.34, 1800.0):
        wire, times = Wire(row="weight updates"), iter([10.0, 10.0 + seconds])
        clock = SimpleNamespace(monotonic=lambda times=times: next(times))
        with patch.object(wires, "time", clock), pytest.raises(PeerError) as raised, wire.calling("all_reduce", 36):
            raise RuntimeError("Connection closed by peer")
        messages.append(str(raised.value))
    return messages


def test_an_error_says_how_long_it_waited(tmp_path: Path) -> None:
    (messages,) = run_ranks(tmp_path, 1, _wait_by_a_clock)
    for message, seconds in zip(messages, ("0.0", "2.3", "1800.0"), strict=True):
        call, when = re.escape("all_reduce of 36 bytes (weight updates)"), "before the first optimizer step"
        waited = re.fullmatch(WORDS.format(rank=0, call=call, when=when), message)
        assert waited and waited[1] == seconds, message


class Loses(Classifier):
    """The last rank dies or hangs at one point of the fourth step."""

    def __init__(self, point: str, lose: Callable[[], None]) -> None:
        super().__init__(batch_norm=point == "forward")
        self.point, self.lose = point, lose

    def _at(self, point: str) -> None:
        last = self.global_rank == self.trainer.world_size - 1
        if last and point == self.point and self.global_step == 3 and not self.trainer.sanity_checking:
            self.lose()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._at("forward")

    def on_before_backward(self, loss: Tensor) -> None:
        self._at("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._at("step")

    def on_train_batch_end(self, *_: Any) -> None:
        self._at("batch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self._at("saving")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._at("validation")
        self.log("loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


def data(world_size: int) -> DataLoader[Any]:
    x = torch.randn(8 * world_size * 6, FEATURES, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, torch.arange(len(x)) % CLASSES), batch_size=8)


def _train(rank: int, world_size: int, method: Method | None, model: Loses, folder: Path) -> dict[str, Any]:
    """Trains in processes that are joined already, as under torchrun, so that each rank's own error can be seen."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(world_size)})
    # Lightning 2.5.0 has no such option.
    options: dict[str, Any] = {"save_on_exception": True} if "save_on_exception" in SAVER else {}
    saver = ModelCheckpoint(folder, "saved-{step}", save_last=True, **options)
    if model.point == "saving":
        saver = ModelCheckpoint(folder, "saved-{step}", every_n_train_steps=3, save_top_k=-1, **options)
    trainer = pl.Trainer(
        strategy=DDPStrategy() if method is None else SparseCommStrategy(method),
        devices=world_size,
        max_epochs=1,
        callbacks=[OnExceptionCheckpoint(folder), saver],
        val_check_interval=3 if model.point == "validation" else None,
        num_sanity_val_steps=0,
        plugins=[TorchElasticEnvironment()],
        **QUIET,
    )
    try:
        trainer.fit(model, data(world_size), data(world_size) if model.point == "validation" else None)
    except Exception as error:
        causes: list[BaseException | None] = [error]
        while causes[-1] is not None:
            causes.append(causes[-1].__cause__ or causes[-1].__context__)
        return {
            "errors": [(type(each).__name__, str(each)) for each in causes if each is not None],
            "step": trainer.global_step,
        }
    return {}


METHODS: dict[str, Callable[[], Method]] = {
    "gradient_dropping": lambda: gradient_dropping(0.1),
    "dense": dense,
    "federated_averaging": lambda: federated_averaging(every=2),
    "local mode": lambda: gradient_dropping(0.1, local="partial", average_every=2),
    "sbc": lambda: sbc(0.1, every=1),
    "dgc, late": lambda: dgc(0.1, delay=1),
    "dgc, local steps": lambda: dgc(0.1, every=2),
    "diloco, late": lambda: diloco(every=2, delay=1),
}
POINTS = ("forward", "backward", "step", "batch_end", "saving", "validation")
QUICK = [("gradient_dropping", "backward", kill), ("federated_averaging", "step", kill)]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(METHODS, POINTS, (kill, hang))
    if case[2] is kill or case[0] in ("gradient_dropping", "dense")
]


def survivors(folder: Path, world_size: int, method: Method | None, point: str, lose: Callable[[], None]) -> Any:
    """How the surviving ranks end, and the checkpoints they have written."""
    folder.mkdir(parents=True)
    model, last = Loses(point, lose), world_size - 1
    found = run_ranks(
        folder, world_size, _train, world_size, method, model, folder, timeout=25, patience=PATIENCE, lost=[last]
    )
    return found, {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.ckpt")}


def assert_lost(found: list[dict[str, Any]], point: str, name: str = "") -> None:
    """Every survivor raises PeerError, and no other kind of error came before it. run_ranks ends whoever hangs."""
    for rank, each in enumerate(found):
        kind, message = each["errors"][0]
        assert kind == "PeerError"
        call = r"(all_reduce|all_gather|broadcast) of [\d,]+ bytes \([\w ,]+\)|barrier \(Trainer\.save_checkpoint\)"
        when = r"in validation, after 3 optimizer steps" if point == "validation" else r"in optimizer step [34]"
        if name.endswith(", late"):
            # That of the exchange which was in flight, perhaps of an earlier step.
            when = r"in (optimizer step [234]|validation, after 3 optimizer steps)"
        assert re.fullmatch(WORDS.format(rank=rank, call=f"({call})", when=when), message), message
        assert all(kind == "RuntimeError" for kind, _ in each["errors"][1:])


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "point", "lose"), CASES)
def test_rank_0_saves_as_often_as_under_ddp(tmp_path: Path, name: str, point: str, lose: Callable[[], None]) -> None:
    ddp, theirs = survivors(tmp_path / "ddp", 2, None, point, lose)
    found, ours = survivors(tmp_path / "ours", 2, METHODS[name](), point, lose)
    assert ddp[0]["errors"] and theirs
    assert_lost(found, point, name)
    assert theirs.keys() <= ours.keys()
    # Only the first failure waits, so the second callback saves too, except in validation, where it reduces a metric.
    assert len(ours) == (2 if "save_on_exception" in SAVER else 1) or point == "validation"
    for file, checkpoint in theirs.items():
        # An exchange after a step fails before Lightning has counted that step.
        uncounted = name in ("federated_averaging", "sbc", "local mode")
        # One that is in flight, or due in the next step, fails after another step.
        sooner = name.endswith((", late", ", local steps")) and point in ("backward", "step", "batch_end")
        assert checkpoint["global_step"] - ours[file]["global_step"] in (0, uncounted, -sooner)
        if name == "dense":
            laws.bit_equal({"weights": ours[file]["state_dict"]}, {"weights": checkpoint["state_dict"]})


THREE = [
    pytest.param(*case, marks=() if case == ("sbc", "backward") else pytest.mark.slow)
    for case in itertools.product(("sbc", "dense", "local mode"), ("backward", "step", "saving"))
]


@pytest.mark.parametrize(("name", "point"), THREE)
def test_of_three_ranks_two_are_left(tmp_path: Path, name: str, point: str) -> None:
    found, saved = survivors(tmp_path / "three", 3, METHODS[name](), point, kill)
    assert len(found) == 2
    assert_lost(found, point)
    assert "on_exception.ckpt" in saved


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [DDPStrategy, SparseCommStrategy])
def test_a_launcher_does_not_wait_for_the_killed(tmp_path: Path, strategy: Any) -> None:
    """Lightning's launcher ends the others as soon as one is gone, whatever they are doing.

    Otherwise they would wait for the process group's half an hour, which is beyond pytest's timeout.
    """
    trainer = pl.Trainer(
        strategy=strategy(start_method="fork"),
        devices=2,
        max_epochs=1,
        enable_checkpointing=False,
        **QUIET,
    )
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        trainer.fit(Loses("backward", kill), data(2))


def _not_a_peers(rank: int) -> None:
    wire = Wire()
    with pytest.raises(RuntimeError, match="Invalid scalar type") as raised:
        wire.all_reduce_(torch.ones(9, dtype=torch.int16))
    assert raised.type is RuntimeError
    with pytest.raises(RuntimeError, match="BOR") as raised:
        wire.all_reduce_or_(torch.ones(9))
    assert raised.type is RuntimeError
    engine = Engine(dense(), wire)
    with pytest.raises(RuntimeError, match="of the model's own") as raised, engine.guards.backward():
        raise RuntimeError("of the model's own")
    assert raised.type is RuntimeError
    assert not wire.failures
    # The wire still works.
    assert wire.all_reduce_(torch.ones(1)).item() == 2


def test_other_errors_are_not_dressed_up(tmp_path: Path) -> None:
    run_ranks(tmp_path, 2, _not_a_peers)
