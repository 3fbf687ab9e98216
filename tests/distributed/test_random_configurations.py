"""Random combinations of model, method, precision, accumulation, clipping and optimizer neither hang nor drift."""

import queue
import random
import signal
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import ParameterAveraging, SparsityWarmup, methods
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import QUIET, run_ranks
from tests.distributed.summed import summed
from tests.distributed.test_resume import outside_launcher

WORDS, WIDTH, CLASSES, BATCH, STEPS = 30, 8, 4, 4, 6
SECONDS = 40
"""Seconds after which a configuration counts as hanging. Most take half a second."""


OPTIMIZERS = [
    partial(torch.optim.SGD, lr=0.05),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    partial(torch.optim.SGD, lr=0.05, momentum=0.5, dampening=0.1, foreach=False),
    partial(torch.optim.Adam, lr=0.01),
    partial(torch.optim.AdamW, lr=0.01),
    partial(torch.optim.RMSprop, lr=0.01),
    partial(torch.optim.Adagrad, lr=0.01),
]


class Model(pl.LightningModule):
    """Classifies the mean of embedded words."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__()
        self.what = {
            "sparse": drawn.random() < 0.15,
            "norm": drawn.random() < 0.3,
            "tied": drawn.random() < 0.2,
            "unused": drawn.random() < 0.25,
            "thaws": drawn.random() < 0.2,
            "two": drawn.random() < 0.15,
        }
        self.words = nn.Embedding(WORDS, WIDTH, sparse=self.what["sparse"])
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if self.what["norm"] else nn.Tanh())
        self.more = nn.Linear(WIDTH, WIDTH)
        if self.what["tied"]:
            self.more.weight = self.body[0].weight
        self.side = nn.Linear(WIDTH, CLASSES)
        self.head = nn.Linear(WIDTH, CLASSES)
        if self.what["thaws"]:
            self.side.requires_grad_(False)
        self.make_optimizer = drawn.choice(OPTIMIZERS)
        if self.what["sparse"]:
            # Few of torch's optimizers take sparse gradients, and its clipping takes none.
            self.make_optimizer = OPTIMIZERS[0]
        self.automatic_optimization = not self.what["two"]
        self.events: set[str] = set()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "freeze" in self.events:
            self.more.requires_grad_(not 2 <= self.global_step < 4)
        if "swap" in self.events and self.global_step == 3:
            self.trainer.strategy.optimizers = [self.make_optimizer(self.parameters())]
        if "save" in self.events and self.global_step == 2:
            self.trainer.save_checkpoint(self.folder / "saved.ckpt")
        if self.what["thaws"] and self.global_step >= 3:
            self.side.requires_grad_(True)

    def on_train_batch_end(self, *_: Any) -> None:
        if "clamp" in self.events:
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.more(self.body(self.words(x).mean(1)))
        output = self.head(hidden)
        if not (self.what["unused"] and (batch_idx + self.global_rank) % 2):
            output = output + self.side(hidden)
        return cross_entropy(output.float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, batch_idx))
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.what["two"]:
            first = [*self.words.parameters(), *self.body.parameters()]
            held = {id(parameter) for parameter in first}
            return [
                self.make_optimizer(first),
                self.make_optimizer([each for each in self.parameters() if id(each) not in held]),
            ]
        return self.make_optimizer(self.parameters())


def method_of(drawn: random.Random) -> Method:
    """A recipe with random options."""
    density, every = drawn.choice([1.0, 0.3, 0.05]), drawn.choice([1, 2, 4])
    recipes = [
        lambda: methods.dense(drawn.choice(["same", "bfloat16"])),
        lambda: methods.gradient_dropping(
            density, warmup_steps=drawn.choice([0, 3]), scope=drawn.choice(["model", "tensor"])
        ),
        lambda: methods.gradient_dropping(density, local=drawn.choice(["sum", "partial", "error"]), average_every=2),
        lambda: methods.dgc(density, warmup_steps=drawn.choice([0, 4]), clip=drawn.choice([None, None, 0.5])),
        lambda: methods.dgc(density, warmup_steps=0, momentum_correction=drawn.random() < 0.5),
        lambda: methods.local_adam(density, warmup_steps=drawn.choice([0, 4])),
        lambda: methods.dgc(density, warmup_steps=0, every=every, residual_in_weights=True),
        lambda: methods.local_adam(density, every=every, residual_in_weights=True),
        lambda: summed(drawn.choice([methods.dgc, methods.local_adam]), density, warmup_steps=drawn.choice([0, 4])),
        methods.default,
        lambda: methods.sbc(density, every=every, residual_in_weights=drawn.random() < 0.5),
        lambda: methods.federated_averaging(every=every),
        lambda: methods.diloco(every=every),
        lambda: methods.sparse_loco(every=every),
        lambda: methods.sketched_sgd(density=density, columns=drawn.choice([None, 20]), candidates=2),
        lambda: methods.powersgd(drawn.choice([1, 2]), dense_steps=drawn.choice([0, 2])),
        lambda: methods.quantized(drawn.choice([8, 4])),
        lambda: drawn.choice([methods.qsgd, methods.terngrad, methods.natural, methods.signsgd])(),
        lambda: drawn.choice([methods.onebit_sgd, methods.ef_signsgd, methods.adacomp])(),
        lambda: methods.strom(drawn.choice([0.1, 0.001]), once=drawn.random() < 0.5),
        lambda: methods.dryden(density),
        lambda: drawn.choice([methods.onebit_sgd, methods.ef_signsgd])(),
        lambda: drawn.choice([methods.parallax, methods.omnireduce])(),
        lambda: methods.sparcml(density=density, bucket=drawn.choice([16, 512])),
        lambda: methods.post_local_sgd(dense_steps=2, every=every, delay=min(every - 1, drawn.choice([0, 1]))),
        lambda: methods.federated_averaging(every=every, fraction=0.5),
        lambda: methods.sketched_sgd(density=density, columns=20, recovery="heavymix"),
        lambda: methods.onebit_adam(warmup_steps=drawn.choice([1, 4])),
        lambda: methods.s2_reducer(sketch_ratio=drawn.choice([None, 0.5])),
        lambda: methods.split(["words.*"], methods.s2_reducer(), methods.gradient_dropping(density)),
        lambda: methods.split(["words.*"], methods.gradient_dropping(0.2), methods.sbc(density, every=every)),
    ]
    return drawn.choice(recipes)()


def _precision(drawn: random.Random) -> dict[str, Any]:
    precision = drawn.choice(["32-true", "32-true", "bf16-mixed", "bf16-true", "64-true", "16-mixed"])
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))]}
    return {"precision": precision}


EVENTS = ("freeze", "swap", "save", "clamp", "uneven")


def events_of(number: int, model: Model) -> set[str]:
    """What happens amid the training. The first 201 configurations have no events."""
    drawn = random.Random(f"events of {number}")
    chosen = {event for event in EVENTS if drawn.random() < 0.3} if number > 200 else set()
    # Lightning's manual optimization holds on to its optimizers.
    return chosen - {"swap"} if model.what["two"] else chosen


def _train(number: int, rank: int, world_size: int, ddp: bool = False) -> tuple[str, str, str]:
    """Trains one configuration. Returns its name, how it ended, and the bits of its weights.

    With `ddp`, without what it lacks: callbacks of ours, and uneven batches.
    """
    # All ranks draw the same.
    drawn = random.Random(number)
    torch.manual_seed(number)
    described = ""
    try:
        method, model = method_of(drawn), Model(drawn)
        sparse = model.what["sparse"]
        options = {} if sparse else _precision(drawn)
        options["accumulate_grad_batches"] = 1 if model.what["two"] else drawn.choice([1, 1, 2, 3])
        if not model.what["two"] and not sparse and drawn.random() < 0.4:
            options["gradient_clip_val"] = 0.5
            options["gradient_clip_algorithm"] = drawn.choice(["norm", "norm", "value"])
        callbacks: list[pl.Callback] = []
        if drawn.random() < 0.15:
            callbacks.append(SparsityWarmup(steps=3))
        if drawn.random() < 0.15:
            callbacks.append(ParameterAveraging(2, buffers=True))
        model.events = events_of(number, model) - ({"uneven"} if ddp else set())
        if ddp:
            callbacks = []
        described = (
            f"{number}: {method!r} {model.what} {sorted(model.events)} {model.make_optimizer} {options} {callbacks}"
        )
        strategy: Any = DDPStrategy(find_unused_parameters=True)
        if not ddp:
            strategy = SparseCommStrategy(method, find_unused_parameters=True, uneven_inputs="uneven" in model.events)
        trainer = pl.Trainer(
            devices=world_size,
            strategy=strategy,
            use_distributed_sampler="uneven" not in model.events,
            max_steps=STEPS * (2 if model.what["two"] else 1),
            enable_checkpointing=False,
            num_sanity_val_steps=1,
            val_check_interval=3,
            callbacks=callbacks,
            **options,
            **QUIET,
        )
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(WORDS, (BATCH * world_size * 12, 3), generator=generator)
        data = TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator))
        train = DataLoader(data, batch_size=BATCH)
        if "uneven" in model.events:
            train = DataLoader(TensorDataset(*data[rank * 5 * BATCH :][: (4 + rank) * BATCH]), batch_size=BATCH)
        with tempfile.TemporaryDirectory() as folder:
            model.folder = Path(folder)
            trainer.fit(model, train, DataLoader(data, batch_size=BATCH, sampler=range(8)))
    except (ValueError, TypeError) as error:
        # Refused by us, before anything was trained, and equally on all ranks.
        return described, f"refused: {type(error).__name__}: {error}", ""
    except BaseException:
        return described, "failed: " + traceback.format_exc(limit=-4), ""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert all(weight.isfinite().all() for weight in weights.values())
    assert trainer.global_step == trainer.max_steps
    bits = [weight.contiguous().view(torch.uint8).flatten() for weight in weights.values()]
    return described, "trained", torch.cat(bits).numpy().tobytes().hex()


def _configurations(rank: int, world_size: int, numbers: list[int], ddp: bool = False) -> list[tuple[str, str, str]]:
    outside_launcher(rank, world_size)
    ends = []
    for number in numbers:
        # Ends the process, since Python code does not run while a collective waits.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ends.append(_train(number, rank, world_size, ddp))
        signal.alarm(0)
        if ends[-1][1].startswith("failed"):
            break
    return ends


def _all_end_alike(tmp_path: Path, world_size: int, numbers: list[int]) -> int:
    ranks = run_ranks(tmp_path, world_size, _configurations, world_size, numbers, timeout=SECONDS * len(numbers))
    trained = 0
    for ends in zip(*ranks, strict=True):
        described, outcome, bits = ends[0]
        for other in ends[1:]:
            assert other[1] == outcome, f"{described}\n{outcome}\n{other[1]}"
            assert other[2] == bits, f"replicas differ: {described}"
        assert not outcome.startswith("failed"), f"{described}\n{outcome}"
        trained += outcome == "trained"
    return trained


def outcome_with_ddp(tmp_path: Path, world_size: int, number: int) -> str:
    """How one configuration ends with Lightning's own ddp."""
    try:
        ranks = run_ranks(tmp_path, world_size, _configurations, world_size, [number], True, timeout=SECONDS + 10)
    except queue.Empty:
        return "hung or aborted"
    ends = [end[1:] for ((*end,),) in ranks]
    if len({outcome for outcome, _ in ends}) > 1:
        return "ended differently"
    if ends[0][0] != "trained":
        return "an error, the same on all ranks"
    return "trained alike" if len({bits for _, bits in ends}) == 1 else "replicas differ, silent"


def test_some_with_ddp(tmp_path: Path) -> None:
    """So that the comparison is one."""
    found = [outcome_with_ddp(tmp_path, 2, number) for number in (0, 1)]
    assert found == ["trained alike"] * 2


def test_some(tmp_path: Path) -> None:
    assert _all_end_alike(tmp_path, 2, list(range(12))) >= 6


def test_some_with_events(tmp_path: Path) -> None:
    assert _all_end_alike(tmp_path, 2, list(range(201, 213))) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_two_hundred(world_size: int, tmp_path: Path) -> None:
    numbers = [number for number in range(201) if number % 3 == world_size - 2]
    trained = sum(_all_end_alike(tmp_path, world_size, numbers[i : i + 10]) for i in range(0, len(numbers), 10))
    # Methods refuse only a few of them.
    assert trained >= len(numbers) // 2
