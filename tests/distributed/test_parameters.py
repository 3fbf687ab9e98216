"""Parameters that train later, get no gradient, or are not row-major in memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.basis.layout import Layout, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.schedules import Schedule
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import Compressor, PayloadError, SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, Gather, PlainExchange
from lightning_sparsecomm.methods import dense, gradient_dropping
from lightning_sparsecomm.sharing import GradientSync, Method
from lightning_sparsecomm.sharing.gradients import write_gradients
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES
from tests import laws
from tests.distributed.launch import run_ranks
from tests.distributed.recording import recorded
from tests.distributed.scenarios import CLASSES, FEATURES, SCENARIOS, RecordingSGD, Scenario, fit

# Long together, and seldom touched: `pytest -m slow` has them.
pytestmark = pytest.mark.slow


class Finetuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RecordingSGD([(n, p) for n, p in self.named_parameters() if n.startswith("head")], lr=0.1)


class RecordUnfrozen(BackboneFinetuning):
    """Also lets the recording optimizer see the gradients of unfrozen parameters."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        super().finetune_function(pl_module, epoch, optimizer)
        if epoch == self.unfreeze_backbone_at_epoch:
            for name, parameter in pl_module.named_parameters():
                if name.startswith("backbone"):
                    parameter.register_hook(lambda gradient, name=name: optimizer._take(name, gradient))


@pytest.mark.parametrize(
    "method",
    [
        dense(),
        dense("bfloat16"),
        recorded(gradient_dropping(0.05, follow_rate=False)),
        recorded(gradient_dropping(0.05, exclude=["*.bias"], follow_rate=False)),
    ],
)
def test_unfrozen_parameters_join_on_all_ranks(tmp_path: Path, method: Method) -> None:
    finetuning = RecordUnfrozen(unfreeze_backbone_at_epoch=1, verbose=False, backbone_initial_lr=0.05)
    scenario = Scenario(Finetuned, {"max_epochs": 3, "max_steps": -1})
    ranks = fit(tmp_path, scenario, 2, method, callbacks=(finetuning,))
    start = Finetuned().state_dict()
    assert not torch.equal(start["backbone.0.weight"], ranks[0]["weights"]["backbone.0.weight"])
    laws.replicas_are_equal(ranks)
    if not isinstance(method, dense):
        laws.shared_is_bit_equal(ranks)
        residuals = ranks[0]["syncs"][0][0]["state"][0]["residual"]
        assert {"backbone.0.weight", "head.weight"} <= residuals.keys()
        if len(ranks[0]["syncs"]) == 1:
            # The layout has grown after the first epoch, and with it what is sent.
            assert {len(sent.dense()) for sent in ranks[0]["syncs"][0][0]["sent"]} == {85, 85 + 208}


LAYOUT = Layout([("used", (40,)), ("sometimes", (8, 5)), ("never", (7,))])


def _missing(rank: int, exchange: Exchange) -> dict[str, Any]:
    wire = Wire()
    channel = Channel(exchange, [ErrorFeedback()])
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    consumed, sent_sum = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    result: dict[str, Any] = {"present": [], "kept": True}
    for step in range(6):
        parts: list[Any] = [torch.randn(40, generator=generator), torch.randn(8, 5, generator=generator), None]
        if step in (2, 3) and (rank == 1 or step == 3):
            parts[1] = None
            before = channel.memories[0].state_dict()["residual"]["sometimes"].clone()
        for view, part in zip(LAYOUT.views(consumed), parts):
            if part is not None:
                view += part
        context = Round(LAYOUT, step, rank=rank, world_size=wire.world_size)
        exchanged = channel.reduce(parts, context, wire)
        sent = exchanged.sent
        sent_sum += sent if isinstance(sent, Tensor) else sent.dense()
        result["present"].append(list(exchanged.present))
        if parts[1] is None:
            result["kept"] &= torch.equal(before, channel.memories[0].state_dict()["residual"]["sometimes"])
            assert not (sent if isinstance(sent, Tensor) else sent.dense())[40:80].any()
    residual = torch.cat([t.flatten() for t in channel.memories[0].state_dict()["residual"].values()])
    torch.testing.assert_close(sent_sum + residual, consumed, rtol=0, atol=1e-5)
    return result


@pytest.mark.parametrize("exchange", [Gather(SparseCodec(TopK(0.1))), DenseAllReduce(), DenseAllReduce("float16")])
def test_a_missing_gradient_keeps_its_residual(tmp_path: Path, exchange: Exchange) -> None:
    for result in run_ranks(tmp_path, 3, _missing, exchange):
        assert result["kept"]
        assert result["present"] == [[True, step != 3, False] for step in range(6)]


class OneScale(Compressor):
    """A sign for each element and one scale for all. It decodes a zero to the scale."""

    def encode(self, x: Vector, context: Round) -> Tensor:
        scale = x.values.abs().mean().float().view(1)
        return torch.cat([scale.view(torch.uint8), (x.values >= 0).to(torch.uint8)])

    def decode(self, payload: Tensor, size: int) -> Tensor:
        if payload.numel() != 4 + size:
            raise PayloadError(f"length is {payload.numel()}, expected {4 + size}")
        return payload[:4].view(torch.float32) * (payload[4:].float() * 2 - 1)


class Shifted(Compressor):
    """Everything, with an error. Longer than an all-reduce of the vector, which `Gather` then makes instead."""

    def encode(self, x: Vector, context: Round) -> Tensor:
        return (x.values + 0.41).double().view(torch.uint8)

    def decode(self, payload: Tensor, size: int) -> Tensor:
        if payload.numel() != 8 * size:
            raise PayloadError(f"length is {payload.numel()}, expected {8 * size}")
        return payload.view(torch.float64)


class Approximation(PlainExchange):
    """Shares the signs of the mean. As in PowerSGD, memories forget what is shared: one tensor serves as both."""

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        mean = wire.all_reduce_(x.values / wire.world_size)
        shared = mean.abs().mean() * torch.where(mean >= 0, 1.0, -1.0)
        return shared, shared


DENSE: dict[str, Exchange] = {
    "one scale": Gather(OneScale()),
    "reduced": Gather(Shifted()),
    "plain": Approximation(),
}


def _absent(rank: int, exchange: Exchange) -> dict[str, Any]:
    """Six rounds, in which one rank or another has no gradient for `sometimes`, and none has one for `never`."""
    wire = Wire()
    channel = Channel(exchange, [ErrorFeedback()])
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    held = channel.memories[0].state_dict()["residual"]
    consumed, sent_sum = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    result: dict[str, Any] = {"shared": [], "sent": [], "present": []}
    for step in range(6):
        absent = step % 3 == rank or step == 4
        own = [torch.randn(40, generator=generator), torch.randn(8, 5, generator=generator), None]
        parts = [own[0], None if absent else own[1], None]
        before = held["sometimes"].clone()
        for view, part in zip(LAYOUT.views(consumed), parts):
            if part is not None:
                view += part
        exchanged = channel.reduce(parts, Round(LAYOUT, step, rank=rank, world_size=wire.world_size), wire)
        shared, sent = (x if isinstance(x, Tensor) else x.dense() for x in (exchanged.shared, exchanged.sent))
        assert sent[:40].all(), "the compressor sends nothing of its own"
        if absent:
            assert not sent[40:80].any()
            assert torch.equal(held["sometimes"], before)
        assert not sent[80:].any() and not shared[80:].any()
        sent_sum += sent
        result["shared"].append(shared.numpy().copy())
        result["sent"].append(sent.numpy().copy())
        result["present"].append(list(exchanged.present))
    residual = torch.cat([held[segment.name].flatten() for segment in LAYOUT.segments])
    torch.testing.assert_close(sent_sum + residual, consumed, rtol=0, atol=1e-5)
    return result


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_decoding_sends_nothing_for_a_missing_gradient(tmp_path: Path, name: str) -> None:
    ranks = run_ranks(tmp_path, 3, _absent, DENSE[name])
    for step in range(6):
        # In step 4 no rank has it.
        assert [rank["present"][step] for rank in ranks] == [[True, step != 4, False]] * 3
        for rank in ranks:
            assert rank["shared"][step].tobytes() == ranks[0]["shared"][step].tobytes(), "not bit-equal"
        assert ranks[0]["shared"][step][40:80].any() == (step != 4)
        if name != "plain":
            # A rank without a gradient counts as zero.
            mean = np.mean([rank["sent"][step] for rank in ranks], axis=0)
            np.testing.assert_allclose(ranks[0]["shared"][step], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_decoding_obeys_the_laws(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS["unused_on_one_rank"]
    method = Method([GradientSync(Channel(DENSE[name], [ErrorFeedback(follow_rate=False)]))])
    ranks = fit(tmp_path, scenario, 3, recorded(method))
    laws.trained(scenario.model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    laws.shared_is_bit_equal(ranks)
    for rank in ranks:
        laws.sent_plus_residual_is_compensated(rank)


def _missing_weights(rank: int) -> list[Any]:
    """Adam with weight decay moves a parameter whose gradient is zero, but not one whose gradient is None."""
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    if rank == 0:
        parameters[0].grad = torch.ones(4)
    layout = Layout([("a", (4,)), ("b", (4,))])
    channel = Channel(Gather(SparseCodec(TopK(1.0))))
    channel.bind(layout, torch.float32, torch.device("cpu"))
    wire = Wire()
    context = Round(layout, rank=rank, world_size=wire.world_size)
    exchanged = channel.reduce([p.grad for p in parameters], context, wire)
    write_gradients(
        [("a", parameters[0]), ("b", parameters[1])], exchanged, layout, LOCAL_MODES["none"], wire.world_size
    )
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_a_gradient_on_one_rank_reaches_all_and_one_on_none_stays_none(tmp_path: Path) -> None:
    for gradients in run_ranks(tmp_path, 2, _missing_weights):
        assert gradients == [[0.5] * 4, None]


@dataclass(frozen=True)
class LessAfterTheFirstEpoch(Schedule):
    def at(self, step: int, epoch: float) -> float:
        assert epoch == pytest.approx(step / 10)
        return 0.5 if epoch < 1 else 0.01


def test_a_schedule_sees_steps_and_epochs_with_fraction(tmp_path: Path) -> None:
    ranks = fit(
        tmp_path, Scenario(Finetuned), 2, recorded(gradient_dropping(LessAfterTheFirstEpoch(), follow_rate=False))
    )
    assert [sent.indices.numel() for sent in ranks[0]["syncs"][0][0]["sent"]] == [42] * 10 + [1] * 10


class Wrapping(torch.optim.Optimizer):
    """Wraps another optimizer, as Lightning's wrappers do, and is stepped itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self._optimizer.step()
        return loss


class Wrapped(Finetuned):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Wrapping(torch.optim.SGD(self.parameters(), lr=0.1))


def test_an_optimizer_inside_another_is_exchanged_once(tmp_path: Path) -> None:
    scenario = Scenario(Wrapped, {"gradient_clip_val": 0.05})
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "ours", scenario, 2, gradient_dropping(1.0))
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)
    assert ours[0]["ledger"].steps == 20


class ChannelsLast(pl.LightningModule):
    """Gradients of channels-last weights are not row-major in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, CLASSES, 1), nn.Flatten())
        self.net.to(memory_format=torch.channels_last)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0].view(-1, 3, 2, 2).to(memory_format=torch.channels_last)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return RecordingSGD(list(self.named_parameters()), lr=0.1)


def test_channels_last_gradients(tmp_path: Path) -> None:
    scenario = Scenario(ChannelsLast)
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "full", scenario, 2, gradient_dropping(1.0))
    laws.trained(ChannelsLast().state_dict(), ddp[0])
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)
    ranks = fit(tmp_path / "sparse", scenario, 2, recorded(gradient_dropping(0.1, follow_rate=False)))
    laws.replicas_are_equal(ranks)
    for rank in ranks:
        laws.sent_plus_residual_is_compensated(rank)


@pytest.mark.parametrize(("wire_dtype", "tolerance"), [("float32", 0.0), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_dense_on_a_narrow_wire(tmp_path: Path, wire_dtype: Any, tolerance: float) -> None:
    scenario = Scenario(Finetuned)
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "ours", scenario, 2, dense(wire_dtype))
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], tolerance)
    ledger = ours[0]["ledger"]
    assert ledger.compression_ratio() == (1.0 if wire_dtype == "float32" else 2.0)
    if tolerance:
        assert any(not torch.equal(ddp[0]["weights"][n], t) for n, t in ours[0]["weights"].items())
