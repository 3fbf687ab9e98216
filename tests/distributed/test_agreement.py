"""Where ranks were set up differently, all raise the same error before anything is exchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

import lightning_sparsecomm
from lightning_sparsecomm.basis.ledger import OURS, SETUP
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import Gather
from lightning_sparsecomm.methods import RECIPES, default, dense, dgc, gradient_dropping, split
from lightning_sparsecomm.run import agreement
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from tests.distributed.launch import run_ranks
from tests.distributed.scenarios import Classifier, Scenario, fit


class Setup:
    """What a rank is set up with."""

    def __init__(self) -> None:
        self.method: Method = dgc(density=0.01)
        self.seed = 0
        self.scaler: torch.amp.GradScaler | None = None
        self.every: int | None = None
        self.module: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda module: [
            torch.optim.SGD(module.parameters(), lr=0.1)
        ]


Change = Callable[[Setup], None]


def _set(name: str, value: Any) -> Change:
    return lambda setup: setattr(setup, name, value)


def _freeze(setup: Setup) -> None:
    setup.module[0].bias.requires_grad = False  # type: ignore[index]


def _two_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    first, second = module.children()
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]


def _newer(setup: Setup) -> None:
    lightning_sparsecomm.__version__ = "9.9"


def _newer_torch(setup: Setup) -> None:
    torch.__version__ = "9.9"  # type: ignore[assignment]


def _newer_format(setup: Setup) -> None:
    agreement.FORMAT_VERSION = 9


REORDERED = nn.ModuleDict({"1": nn.BatchNorm1d(4), "0": nn.Linear(3, 4)})
ADAM = _set("optimizers", lambda module: [torch.optim.Adam(module.parameters())])
STRATEGY = "Make the strategy with the same arguments on all ranks."
MODEL = "Build the same model, and freeze the same parameters, on all ranks."
OPTIMIZERS = "Give the same parameters to the same optimizers, in the same order, on all ranks."
INSTALL = "Install the same version on all ranks."

DIFFERENCES: dict[str, tuple[Change, str, str]] = {
    "density": (
        _set("method", dgc(density=0.02)),
        "got dgc(density=0.01) on ranks 0, 2; dgc(density=0.02) on rank 1",
        STRATEGY,
    ),
    "method": (
        _set("method", dense()),
        "method must be equal on all ranks; got dgc(density=0.01) on ranks 0, 2; dense() on rank 1",
        STRATEGY,
    ),
    "patterns": (_set("method", dgc(density=0.01, exclude=["*.bias"])), "exclude=['*.bias']", STRATEGY),
    "fallback": (
        _set("method", Method(dgc(density=0.01).syncs, fallback=gradient_dropping())),
        "fallback=gradient_dropping(density=0.01)",
        STRATEGY,
    ),
    "seed": (_set("seed", 7), "seed must be equal on all ranks; got 0 on ranks 0, 2; 7 on rank 1. ", STRATEGY),
    "scaler": (
        _set("scaler", torch.amp.GradScaler("cpu")),
        "the loss scaler must be equal on all ranks; got none on ranks 0, 2; one on rank 1. ",
        "Train with the same precision on all ranks.",
    ),
    "every": (
        _set("every", 5),
        "check_replicas_every must be equal on all ranks; got None on ranks 0, 2; 5 on rank 1. ",
        STRATEGY,
    ),
    "parameter_more": (
        _set("module", nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.PReLU())),
        "parameter '2.weight' must be equal on all ranks; got none on ranks 0, 2;"
        " torch.float32 of shape (1,), trained on rank 1. ",
        MODEL,
    ),
    "parameter_less": (
        _set("module", nn.Sequential(nn.Linear(3, 4))),
        "parameter '1.weight' must be equal on all ranks; got torch.float32 of shape (4,), trained on ranks 0, 2;"
        " none on rank 1. ",
        MODEL,
    ),
    "no_parameters": (_set("module", nn.Identity()), "parameter '0.weight' must be equal on all ranks; got", MODEL),
    "shape": (
        _set("module", nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))),
        "parameter '0.weight' must be equal on all ranks; got torch.float32 of shape (4, 3), trained on ranks 0, 2;"
        " torch.float32 of shape (4, 5), trained on rank 1. ",
        MODEL,
    ),
    "dtype": (
        _set("module", nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()),
        "parameter '0.weight' must be equal on all ranks; got torch.float32 of shape",
        MODEL,
    ),
    "frozen": (
        _freeze,
        "parameter '0.bias' must be equal on all ranks; got torch.float32 of shape (4,), trained on ranks 0, 2;"
        " torch.float32 of shape (4,), frozen on rank 1. ",
        MODEL,
    ),
    "order": (
        _set("module", REORDERED),
        "the order of parameters must be equal on all ranks; got parameter '0.weight' earlier on ranks 0, 2;"
        " parameter '1.weight' earlier on rank 1. ",
        MODEL,
    ),
    "version": (
        _newer,
        f"the version of lightning_sparsecomm must be equal on all ranks; got {lightning_sparsecomm.__version__} on",
        INSTALL,
    ),
    "torch": (_newer_torch, "9.9 on rank 1. ", INSTALL),
    "format": (_newer_format, "the version of the payload format must be equal on all ranks; got 1 on", INSTALL),
    "optimizer": (ADAM, "the list of optimizers must be equal on all ranks; got SGD on ranks 0, 2; Adam", OPTIMIZERS),
    "split_optimizers": (
        _set("optimizers", _two_optimizers),
        "got SGD on ranks 0, 2; SGD, SGD on rank 1. ",
        OPTIMIZERS,
    ),
    "held": (
        _set("optimizers", lambda module: [torch.optim.SGD(module[0].parameters(), lr=0.1)]),
        "the optimizer of parameter '1.weight' must be equal on all ranks; got number 0 (SGD) on ranks 0, 2;"
        " none on rank 1. ",
        OPTIMIZERS,
    ),
}


def _agree(setup: Setup) -> Wire:
    engine = Engine(setup.method, Wire(), setup.seed, setup.every, setup.scaler)
    engine.registry.add_module(setup.module)
    engine.agreement.on_setup()
    engine.agreement.on_optimizers(setup.optimizers(setup.module))
    return engine.wire


def _differing(rank: int) -> dict[str, str]:
    messages = {}
    versions = lightning_sparsecomm.__version__, torch.__version__, agreement.FORMAT_VERSION
    for name, (change, _, _) in DIFFERENCES.items():
        setup = Setup()
        if rank == 1:
            change(setup)
        with pytest.raises(ValueError, match="must be equal on all ranks") as raised:
            _agree(setup)
        messages[name] = str(raised.value)
        lightning_sparsecomm.__version__, torch.__version__, agreement.FORMAT_VERSION = versions  # type: ignore[assignment]
    return messages


def test_all_ranks_say_what_differs(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path, 3, _differing)
    assert ranks[0] == ranks[1] == ranks[2]
    for name, (_, text, remedy) in DIFFERENCES.items():
        message = ranks[0][name]
        assert text in message and message.endswith(remedy), message
        # Long descriptions are shortened to where they differ.
        assert len(message) < 900


class Nameless(Gather):
    """Its repr is Python's default, which holds its address."""

    __repr__ = object.__repr__


def _outer(anchors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchors, lr=0.7)


def _equal(rank: int, elsewhere: bool) -> list[dict[str, int]]:
    # Moves what is made from here on to other addresses than on the other ranks.
    ballast = [bytearray(4096) for _ in range(100 * rank if elsewhere else 0)]
    methods: list[Method] = [recipe() for recipe in RECIPES.values()]
    methods += [
        gradient_dropping(Stages([0.1, 0.01], steps=[0, 9])),
        split(["0.*"], gradient_dropping(1.0), dgc()),
        Method([GradientSync(Channel(Nameless(SparseCodec(TopK()))))]),
        Method([DeltaSync(Channel(Nameless(SparseCodec(TopK()))), outer=_outer)]),
    ]
    bytes_by_row = []
    for method in methods:
        setup = Setup()
        setup.method = method
        ledger = _agree(setup).ledger
        bytes_by_row.append({row: ledger.handed_bytes(row) for row in ledger.rows})
    del ballast
    return bytes_by_row


def test_equal_ranks_pass_and_hand_over_two_digests_and_a_number(tmp_path: Path) -> None:
    for rows in run_ranks(tmp_path, 2, _equal, True):
        assert rows == [{SETUP: 64 + 8}] * (len(RECIPES) + 4)


def test_a_lone_process_asks_nobody(tmp_path: Path) -> None:
    (rows,) = run_ranks(tmp_path, 1, _equal, False)
    assert rows == [{}] * (len(RECIPES) + 4)


def _expected(rank: int) -> tuple[float, bool]:
    engine = Engine(default(), Wire())
    engine.registry.add_module(nn.Linear(3, 4))
    engine.expect(1e6 - rank, may_end_sooner=rank == 1)
    return engine.follow_length(), engine.may_end_sooner


def test_ranks_expect_the_same_length(tmp_path: Path) -> None:
    """The shortest, and all may end sooner if one may."""
    assert run_ranks(tmp_path, 3, _expected) == [(5000, True)] * 3


def _other_density(strategy: Any, model: Any) -> None:
    strategy.method = gradient_dropping(0.02)


def _other_seed(strategy: Any, model: Any) -> None:
    strategy.seed = 7


def _more(strategy: Any, model: Any) -> None:
    model.more = nn.Linear(2, 2)


def _frozen(strategy: Any, model: Any) -> None:
    model.head.bias.requires_grad = False


class Changed(Classifier):
    """Changes itself, or the strategy, on rank 1 while a Trainer sets it up."""

    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.change = change

    def setup(self, stage: str) -> None:
        if self.global_rank == 1:
            self.change(self.trainer.strategy, self)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            _other_density,
            "method must be equal on all ranks; got .*density=0.01.* on rank 0; .*density=0.02.* on rank 1",
        ),
        (_other_seed, "seed must be equal on all ranks; got 0 on rank 0; 7 on rank 1"),
        (_more, "parameter 'more.weight' must be equal on all ranks; got none on rank 0"),
        (_frozen, "parameter 'head.bias' must be equal on all ranks; got .*trained on rank 0; .*frozen on rank 1"),
    ],
)
def test_a_trainer_refuses(tmp_path: Path, change: Callable[[Any, Any], None], text: str) -> None:
    with pytest.raises(Exception, match=text):
        fit(tmp_path, Scenario(lambda: Changed(change)), 2, gradient_dropping(0.01))


def test_steps_send_nothing_more(tmp_path: Path) -> None:
    for rank in fit(tmp_path, Scenario(Classifier), 2, gradient_dropping(0.01)):
        calls = rank["ledger"].rows[SETUP]
        assert {kind: (traffic.calls, traffic.handed_bytes) for kind, traffic in calls.items()} == {
            "all_gather": (5, 64 + 8 + 8 + 16)
        }
        assert SETUP not in OURS


def _fabric(rank: int) -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(gradient_dropping(0.5)))
    model = nn.Linear(3, 2)
    chosen = model.parameters() if rank == 0 else [model.weight]
    fabric.strategy._begin(torch.device("cpu"), None)
    module = fabric.strategy._wrap(model)
    fabric.strategy.setup_optimizer(torch.optim.SGD(chosen, lr=0.1))
    with pytest.raises(ValueError, match="must be equal on all ranks") as raised:
        fabric.strategy.backward(module(torch.ones(1, 3)).sum(), module)
    return str(raised.value)


def test_fabric_refuses_at_the_first_backward(tmp_path: Path) -> None:
    for message in run_ranks(tmp_path, 2, _fabric):
        assert message.startswith("the optimizer of parameter 'bias' must be equal on all ranks; got number 0 (SGD) on")


def _fabric_of_another_length(rank: int) -> str:
    strategy = FabricStrategy(gradient_dropping(0.5), length=100 + rank)
    Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(ValueError, match="must be equal on all ranks") as raised:
        strategy.setup_module(nn.Linear(3, 2))
    return str(raised.value)


def test_fabric_refuses_another_length(tmp_path: Path) -> None:
    """As of `len(loader)` where ranks have differently many batches."""
    text = f"length must be equal on all ranks; got 100 on rank 0; 101 on rank 1. {STRATEGY}"
    assert run_ranks(tmp_path, 2, _fabric_of_another_length) == [text, text]
