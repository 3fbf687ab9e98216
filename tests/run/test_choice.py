"""Which method an optimizer gets: its own, the one for all others, or a refusal with the reason."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.channel.adam_moments import AdamMoments
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.methods import default, demo, dgc, gradient_dropping, local_adam, signsgd
from lightning_sparsecomm.run.choice import advice_on_signs, method_for, takeover_for
from lightning_sparsecomm.sharing import GradientSync, Method
from tests import laws
from tests.distributed.scenarios import Classifier, Scenario, fit


class Adam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Twice(torch.optim.SGD):
    """Evaluates its closure twice, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Sharp(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Twice(self.parameters(), lr=0.01, momentum=0.9)


class Ignoring(Classifier):
    _ddp_params_and_buffers_to_ignore = ("head.bias",)


class Steep(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=1.5)


class Bodies(pl.Callback):
    """Which memories each optimizer's gradients pass through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        optimizers = strategy.engine.registry.optimizers
        used = [[any(parts_in(sync, Velocity)) for sync, _ in tracked.parts] for tracked in optimizers]
        torch.save(used, self.folder / "used.pt")


@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
@pytest.mark.parametrize(("model", "corrects"), [(Classifier, [[True, True]]), (Adam, [[False, False]])])
def test_sparsecomm_corrects_momentum_for_sgd_only(tmp_path: Path, model: Any, corrects: Any) -> None:
    ranks = fit(tmp_path, Scenario(model, steps=3), 2, default(), (Bodies(tmp_path),))
    assert torch.load(tmp_path / "used.pt") == corrects
    assert ranks[0]["ledger"].density() == pytest.approx(0.67, rel=0.2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Adam, "the method is not defined for Adam: momentum correction takes .*torch.optim.SGD"),
        (Sharp, r"Twice.step\(\) evaluates its closure more than once.*methods.dense\(\)"),
        (Ignoring, "an optimizer that also holds parameters which DDP is told to ignore"),
        (Steep, r"the momentum of SGD must be in \[0, 1\].*; got 1.5"),
    ],
)
def test_dgc_refuses(tmp_path: Path, model: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        fit(tmp_path, Scenario(model, steps=3), 2, dgc())


@pytest.mark.parametrize("method", [gradient_dropping(0.1), dgc(0.1, momentum_correction=False)], ids=repr)
def test_no_residual_takes_in_the_gradients_of_two_evaluations(tmp_path: Path, method: Method) -> None:
    with pytest.raises(Exception, match=r"Twice.step\(\) evaluates its closure more than once.*methods.dense\(\)"):
        fit(tmp_path, Scenario(Sharp, steps=3), 2, method)


def test_dgc_without_momentum_correction_takes_any_optimizer(tmp_path: Path) -> None:
    method = dgc(0.1, warmup_steps=0, momentum_correction=False)
    ranks = fit(tmp_path, Scenario(Adam, steps=3), 2, method)
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in ranks[1]["weights"].items())


def sparse(*memories: Any, **options: Any) -> GradientSync:
    return GradientSync(Channel(Gather(SparseCodec(TopK(0.1))), memories), **options)


def test_momentum_is_taken_over_for_all_parameters_or_none(tmp_path: Path) -> None:
    """Where one sync corrects momentum, the others apply it to what they share, as if they had been told to."""
    corrected = sparse(MomentumCorrection(), ErrorFeedback(), min_dimensions=2)
    ends = []
    for i, memories in enumerate(([], [Momentum()])):
        method = Method([corrected, GradientSync(Channel(DenseAllReduce(), memories), rest=True)])
        ends.append(fit(tmp_path / str(i), Scenario(Classifier, steps=5), 2, method)[0])
    laws.bit_equal(*ends)
    drifting = GradientSync(Channel(DenseAllReduce()), rest=True, local="partial")
    with pytest.raises(Exception, match=r"takes over the momentum of RecordingSGD, which also holds '.*bias': a sync"):
        fit(tmp_path, Scenario(Classifier, steps=3), 2, Method([corrected, drifting]))


def held(*optimizers: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return [(str(index), parameter) for index, parameter in enumerate(parameters)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))]


def test_the_first_method_that_is_defined_is_chosen() -> None:
    methods = [dgc(), gradient_dropping()]
    sgd, adam = torch.optim.SGD(parameters(), lr=0.1), torch.optim.Adam(parameters())
    assert len(method_for(sgd, methods, held(sgd)).syncs) == 2
    assert len(method_for(adam, methods, held(adam)).syncs) == 1
    with pytest.raises(TypeError, match="the method is not defined for Adam: "):
        method_for(adam, methods[:1], held(adam))


class Decaying(torch.optim.SGD):
    """Decays weights apart from the gradient, and then steps as SGD."""

    def step(self, closure: Any = None) -> Any:
        self.decay()
        return super().step(closure)

    def decay(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 1 - group["lr"] * 0.1)


class Centered(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        means = [each.grad.mean() for group in self.param_groups for each in group["params"]]
        return super().step(closure), means


class Counting(torch.optim.SGD):
    """Only calls SGD's step; that it reads its groups when it is made does not matter."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rate, self.steps = self.param_groups[0]["lr"], 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        return super().step(closure)


class Derived(Decaying):
    """Inherits a rule through a step that hides it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Naming(torch.optim.SGD):
    """Has torch's own step, which torch wraps in this class once an object of it is made."""

    sum = math.fsum
    half = partial(max, 0.5)

    def describe(self) -> str:
        return type(self).__name__


@pytest.mark.parametrize(
    ("kind", "alone", "drops"),
    [
        (Decaying, dgc(), True),
        (Clipping, dgc(), True),
        (Derived, dgc(), True),
        (Naming, dgc(), False),
        (Centered, local_adam(), True),
        (Counting, dgc(), False),
        (torch.optim.SGD, dgc(), False),
        (torch.optim.AdamW, local_adam(), False),
    ],
)
def test_a_rule_of_the_users_own_is_left_to_the_optimizer(
    kind: Any, alone: Method, drops: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Momentum and moments are torch's rule. Who asks for a method by name is told."""
    optimizer = kind(parameters(), lr=0.1)
    method = method_for(optimizer, default().chain, held(optimizer))
    assert takeover_for(optimizer, method, held(optimizer), set()) is None or not drops
    assert any(any(parts_in(method, each)) for each in (Velocity, AdamMoments)) is not drops
    assert not recwarn.list
    takeover = takeover_for(optimizer, method_for(optimizer, [alone], held(optimizer)), held(optimizer), set())
    assert takeover is not None
    assert [str(each.message)[: len(kind.__name__) + 8] for each in recwarn.list] == [
        f"{kind.__name__} changes"
    ] * drops


def test_what_one_sync_takes_over_all_do_that_hold_parameters_of_the_optimizer() -> None:
    clipped = sparse(ClipLocalNorm(2.0), MomentumCorrection(), ErrorFeedback(), min_dimensions=2)
    plain = GradientSync(Channel(DenseAllReduce()), rest=True)
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    method = method_for(optimizer, [Method([clipped, plain])], held(optimizer))
    assert method.syncs[0] is clipped
    joined = method.syncs[1]
    assert isinstance(joined, GradientSync)
    assert [type(memory) for memory in joined.channel.memories] == [ClipLocalNorm, Momentum]
    # Alone, the other sync stays what it is.
    alone = torch.optim.SGD(parameters()[1:], lr=0.1)
    assert method_for(alone, [Method([clipped, plain])], held(alone)).syncs[1] is plain


def test_momentum_is_taken_over_from_sgd_only_and_only_where_a_method_applies_it() -> None:
    sgd, adam = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(parameters())
    takeover = takeover_for(sgd, dgc(), held(sgd), set())
    assert takeover is not None
    assert takeover.optimizer is sgd
    takeover.close()
    assert takeover_for(sgd, gradient_dropping(), held(sgd), set()) is None
    assert takeover_for(adam, dgc(momentum_correction=False), held(adam), set()) is None


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (partial(torch.optim.SGD, lr=1e-3), None),
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), "averaging them by momentum once more"),
        (torch.optim.AdamW, "averaging them by the moments of AdamW once more"),
    ],
)
def test_advice_where_an_optimizer_would_average_signs(optimizer: Any, words: str | None) -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    found = advice_on_signs(optimizer(weights), demo())
    assert [words in line and "momentum=0" in line for line in found] == ([True] if words else [])
    assert advice_on_signs(optimizer(weights), signsgd()) == []
