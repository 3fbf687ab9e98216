"""Weights that ranks should share are compared, to the bit, at the end of training and every few steps if asked."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_sparsecomm import ReplicaError
from lightning_sparsecomm.basis.ledger import COMPARISON, OURS
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import AdamMoments
from lightning_sparsecomm.methods import RECIPES, dense, dgc, federated_averaging, gradient_dropping, sbc, split
from lightning_sparsecomm.run.agreement import CHECK_REPLICAS_EVERY
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import run_ranks
from tests.frontends.fitting import Model, refusals
from tests.frontends.fitting import fit as train


class Network(nn.Module):
    """Parameters of several dtypes, shapes and memory formats."""

    def __init__(self, ignored: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 2))
        self.last = nn.Linear(4, 2).bfloat16()
        if ignored:
            self._ddp_params_and_buffers_to_ignore = ["scale"]


class Run:
    """One rank's training. Each rank draws gradients of its own."""

    def __init__(self, rank: int, method: Method, every: int | None = None, ignored: bool = False) -> None:
        self.module = Network(ignored)
        self.engine = Engine(copy.deepcopy(method), Wire(), check_replicas_every=every)
        self.engine.registry.add_module(self.module)
        self.engine.agreement.on_setup()
        kind = torch.optim.Adam if any(parts_in(method, AdamMoments)) else torch.optim.SGD
        self.optimizer = kind(self.module.parameters(), lr=0.1)
        self.engine.register(self.optimizer)
        self.generator = torch.Generator().manual_seed(rank)

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=self.generator).to(parameter)
            if self.engine.hook is not None:
                # Instead of DDP's hook.
                Wire().all_reduce_(parameter.grad)
        with self.engine.stepping(self.optimizer):
            self.engine.closure(self.optimizer, lambda: None)()
            self.optimizer.step()

    def change(self, name: str) -> None:
        kind, _, name = name.rpartition(" ")
        tensor = self.module.get_parameter(name).detach()
        if kind == "anchor":
            (share,) = self.engine.registry.optimizers[0].shares.values()
            assert isinstance(share, DeltaShare)
            tensor = share.anchors[name].detach()
        tensor[(-1,) * tensor.dim()] += 1

    def compared(self) -> int:
        """How often weights were compared, at 32 bytes each."""
        rows = self.engine.wire.ledger.rows.get(COMPARISON, {})
        assert all(traffic.handed_bytes == 32 * traffic.calls for traffic in rows.values())
        return sum(traffic.calls for traffic in rows.values())


def local(average_every: int | None) -> Method:
    return gradient_dropping(0.5, local="partial", average_every=average_every)


# Method, check_replicas_every, what is changed, on which of three ranks, after which step, and after which it is found.
CAUGHT: list[tuple[Method, int, str, tuple[int, ...], int, int]] = [
    (dgc(0.5, warmup_steps=0), 1, "first.weight", (1,), 2, 3),
    (dgc(0.5, warmup_steps=0), 5, "first.bias", (0,), 2, 5),
    (gradient_dropping(0.5), 2, "last.weight", (1, 2), 4, 6),
    (dense(), 3, "scale", (2,), 0, 3),
    (federated_averaging(every=4), 3, "anchor last.weight", (1,), 2, 3),
    # Until the exchange makes them equal again, a rank may change its own weights.
    (federated_averaging(every=4), 3, "last.weight", (1,), 2, 0),
    (local(4), 3, "last.weight", (1,), 2, 0),
]
WHO = {(0,): " 0; {} on ranks 1, 2", (1,): "s 0, 2; {} on rank 1", (2,): "s 0, 1; {} on rank 2"}
WHO[1, 2] = WHO[0,]


def _catch(rank: int) -> list[str]:
    # Where a rank may change its own weights, the exchange finds that they were set.
    warnings.filterwarnings("ignore", "other code than the optimizer has changed")
    messages = []
    for method, every, name, ranks, after, _ in CAUGHT:
        run, message = Run(rank, method, every), ""
        for step in range(8):
            if step == after and rank in ranks:
                run.change(name)
            try:
                run.step()
            except ReplicaError as error:
                message = f"{step + 1}: {error}"
                break
        messages.append(message)
        run.engine.close()
    return messages


def test_a_change_on_some_ranks_is_caught(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 3, _catch)
    assert results[0] == results[1] == results[2]
    digest = "digest [0-9a-f]{8}"
    for message, (_, _, name, ranks, _, seen) in zip(results[0], CAUGHT, strict=True):
        words = (
            rf"{seen}: parameter '{name.split()[-1]}' after optimizer step {seen} must be equal on all ranks;"
            rf" got {digest} on rank{WHO[ranks].format(digest)}\. Look for .* on some ranks only.*"
        )
        assert re.fullmatch(words, message) if seen else not message, message


def _with_rates(rank: int) -> str:
    run = Run(rank, gradient_dropping(0.5), every=2)
    run.step()
    run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank // 2)
    with pytest.raises(ReplicaError) as raised:
        run.step()
    run.engine.close()
    return str(raised.value)


def test_a_rate_that_differs_is_named_first(tmp_path: Path) -> None:
    """As where a scheduler follows each rank's own metric."""
    assert set(run_ranks(tmp_path, 3, _with_rates)) == {
        "the learning rate of optimizer 0's group 0 must be equal on all ranks; got 0.1 on ranks 0, 1; 0.05 on rank 2."
        " If a scheduler follows a metric, log that with sync_dist=True."
    }


EQUAL: dict[str, tuple[Method, int, int]] = {name: (recipe(), 1, 12) for name, recipe in RECIPES.items()}
EQUAL |= {
    "every third": (dgc(0.5, warmup_steps=0), 3, 4),
    "two methods": (split(["first.*"], sbc(0.5, every=2), gradient_dropping(0.5)), 1, 12),
    # Averages follow steps 4, 8 and 12. The first one after every third, or sixth, step is compared.
    "average after third": (local(4), 3, 3),
    "average after sixth": (local(4), 6, 2),
    "never averaged": (split(["nothing"], dense(), local(100)), 1, 12),
}


def _stay_equal(rank: int) -> dict[str, list[int]]:
    counts = {}
    for name, (method, every, _) in EQUAL.items():
        run = Run(rank, method, every)
        for _ in range(12):
            run.step()
        during = run.compared()
        run.engine.settle()
        counts[name] = [during, run.compared() - during]
        assert COMPARISON not in OURS
        run.engine.close()
    return counts


def test_every_recipe_passes(tmp_path: Path) -> None:
    for counts in run_ranks(tmp_path, 2, _stay_equal):
        for name, (_, _, often) in EQUAL.items():
            assert counts[name] == [often, 1], name


def test_a_lone_process_compares_nothing(tmp_path: Path) -> None:
    (counts,) = run_ranks(tmp_path, 1, _stay_equal)
    assert all(each == [0, 0] for each in counts.values())


def _only_at_the_end(rank: int) -> str:
    run = Run(rank, dgc(0.5, warmup_steps=0))
    run.step()
    if rank == 1:
        run.change("first.weight")
    run.step()
    assert run.compared() == 0
    with pytest.raises(ReplicaError) as raised:
        run.engine.settle()
    run.engine.close()
    # DDP is told to ignore this one.
    run = Run(rank, gradient_dropping(0.5), 1, ignored=True)
    run.step()
    run.change("scale")
    run.engine.settle()
    assert run.compared() == 2
    run.engine.close()
    return str(raised.value)


def test_only_the_end_is_compared(tmp_path: Path) -> None:
    for message in run_ranks(tmp_path, 2, _only_at_the_end):
        assert message.startswith("parameter 'first.weight' after optimizer step 2 must be equal on all ranks; got ")


def _by_default(rank: int) -> tuple[int, str]:
    """In its third step, rank 1 gets another sum than the others. Returns when that is found."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(dense()))
    fabric.strategy._begin(torch.device("cpu"), None)
    network = nn.Linear(3, 2)
    nn.init.ones_(network.weight)
    nn.init.ones_(network.bias)
    module = fabric.strategy._wrap(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    step = 0
    with pytest.raises(ReplicaError) as raised:  # noqa: PT012
        while True:
            step += 1
            optimizer.zero_grad()
            fabric.strategy.backward(module(torch.ones(1, 3)).sum(), module)
            if step == 3 and rank == 1:
                network.bias.grad[0] += 1e-2
            fabric.strategy.optimizer_step(optimizer)
    fabric.strategy._end()
    return step, str(raised.value)


def test_a_sum_that_was_altered_is_found_by_default(tmp_path: Path) -> None:
    for step, message in run_ranks(tmp_path, 2, _by_default):
        assert step == CHECK_REPLICAS_EVERY
        assert message.startswith(f"parameter 'bias' after optimizer step {step} must be equal on all ranks; got ")


def _with_fabric(rank: int) -> list[str]:
    messages = []
    for every in (None, 2):
        strategy = FabricStrategy(gradient_dropping(0.5), check_replicas_every=every)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.strategy._begin(torch.device("cpu"), None)
        network = nn.Linear(3, 2)
        nn.init.ones_(network.weight)
        nn.init.ones_(network.bias)
        module = fabric.strategy._wrap(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        with pytest.raises(ReplicaError) as raised:  # noqa: PT012
            for step in range(3):
                network.bias.data += step * rank
                optimizer.zero_grad()
                fabric.strategy.backward(module(torch.ones(1, 3)).sum(), module)
                fabric.strategy.optimizer_step(optimizer)
            fabric.strategy.settle()
        fabric.strategy._end()
        messages.append(str(raised.value))
    return messages


def test_fabric(tmp_path: Path) -> None:
    for messages in run_ranks(tmp_path, 2, _with_fabric):
        for message, step in zip(messages, (3, 2), strict=True):
            assert message.startswith(f"parameter 'bias' after optimizer step {step} must be equal on all ranks; got")


class Meddles(pl.Callback):
    """Changes a weight on rank 1 after the second step, and may raise an error after the third."""

    def __init__(self, folder: Path, meddles: bool = True, raises: bool = False) -> None:
        self.folder, self.meddles, self.raises = folder, meddles, raises

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1 and self.meddles:
            module.network[2].bias.data[0] += 1
        if trainer.global_step == 3 and self.raises:
            raise KeyError("an error of the user's own")

    def _note(self, trainer: pl.Trainer, _: Any) -> None:
        rows = trainer.strategy.ledger.rows  # type: ignore[attr-defined]
        calls = sum(traffic.calls for traffic in rows.get(COMPARISON, {}).values())
        (self.folder / f"{trainer.global_rank}").write_text(str(calls))

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self._note(trainer, module)

    def on_fit_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._note(trainer, module)


# check_replicas_every, whether an error comes first, the step after which the difference is found, and how many gathers
# that takes: one for each check, and two more where something differs.
@pytest.mark.parametrize(
    ("every", "raises", "seen", "calls"),
    [(None, False, 4, 3), (1, False, 3, 2 + 3), (3, False, 3, 3), (4, True, None, 0)],
)
def test_a_trainer(tmp_path: Path, every: int | None, raises: bool, seen: int | None, calls: int) -> None:
    strategy = SparseCommStrategy(gradient_dropping(0.1), check_replicas_every=every)
    for message in refusals(tmp_path, Model(), strategy, callbacks=[Meddles(tmp_path, raises=raises)]):
        if raises:
            assert message.startswith("KeyError")
        else:
            assert message.startswith(
                f"ReplicaError: parameter 'network.2.bias' after optimizer step {seen} must be eq"
            )
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == [str(calls)] * 2


def test_a_trainer_that_finds_nothing(tmp_path: Path) -> None:
    for every, calls in ((None, 1), (3, 2)):
        strategy = SparseCommStrategy(gradient_dropping(0.1), check_replicas_every=every)
        train(tmp_path, Model(), strategy, callbacks=[Meddles(tmp_path, meddles=False)])
        assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == [str(calls)] * 2
