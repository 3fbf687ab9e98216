"""Whether a change of the code changes any bit of any training: hashes of many short trainings, recorded and compared.

    python benchmarks/same_bits.py record old.json --package ../old-checkout
    python benchmarks/same_bits.py record new.json
    python benchmarks/same_bits.py compare old.json new.json

For each configuration and rank a file holds the hash of every loss, of the weights after every batch, of the weights
and the optimizers' state at the end, of what the rank files beside a checkpoint hold, and of every tensor that the rank
hands to a collective of `torch.distributed`; and the ledger's rows.

Left out is what may differ between equal trainings: collectives before the first step, and the content (not the size)
of the digests with which ranks compare how they were set up. Collectives that DDP makes in C++ are seen only in the
ledger and in what they do to weights and buffers. All else is compared to the bit, so both files must be recorded on
the same machine with the same versions of torch and Lightning.

Rank files of an earlier version are resumed from by two more commands, whose outputs `compare` takes as well:

    python benchmarks/same_bits.py save FOLDER --package ../old-checkout
    python benchmarks/same_bits.py resume-old FOLDER old.json --package ../old-checkout
    python benchmarks/same_bits.py resume-old FOLDER new.json
"""

import argparse
import fnmatch
import hashlib
import inspect
import json
import logging
import math
import multiprocessing
import os
import platform
import queue
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from lightning_sparsecomm import Ledger, Method

# lightning_sparsecomm itself is imported in functions: only `main` knows where from.

CHECKOUT = Path(__file__).resolve().parent.parent
FEATURES, WORDS, CLASSES, BATCH, BATCHES = 12, 60, 5, 8, 10
STEPS, STOP = 12, 5
SECONDS = 120
"""The deadline of each configuration; most take half a second. The first may wait for compiled kernels."""

Items = dict[str, Any]
"""What is compared, by name: hashes, lists of them, or mappings to them."""

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FORK = multiprocessing.get_context("fork")


def short_hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    """Dtype and elements, in row-major order."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce()
        return b"sparse" + bytes_of(tensor.indices()) + bytes_of(tensor.values())
    data = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {len(data)} ".encode() + data


def hash_of(tensor: Tensor) -> str:
    return short_hash(f"{tuple(tensor.shape)} ".encode() + bytes_of(tensor))


def leaves(item: object, path: str = "") -> Iterator[tuple[str, object]]:
    """All that a nested state holds, by path."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(item, (list, tuple)):
        for index, value in enumerate(item):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, item


def hash_of_state(state: object) -> str:
    """Of all tensors and numbers in it."""
    texts = [
        f"{path} {hash_of(leaf) if isinstance(leaf, Tensor) else repr(leaf)}"
        for path, leaf in sorted(leaves(state), key=lambda pair: pair[0])
    ]
    return short_hash("\n".join(texts).encode())


# What each collective calls the tensors that a rank hands over.
INPUTS = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor",
    "all_gather_single": "input_tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_coalesced": "input_tensor_list",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "broadcast": "tensor",
    "reduce": "tensor",
    "gather": "tensor",
    "scatter": "scatter_list",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "send": "tensor",
    "isend": "tensor",
    "batch_isend_irecv": "p2p_op_list",
}
# Names, digests of texts and numbers of runs are gathered under these rows of the ledger.
NOT_OF_TRAINING = ("set-up", "comparison of replicas", "checkpoints")


class Collectives:
    """Hashes what this process hands to the functions of `torch.distributed`, while a training is watched."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._rolling = hashlib.blake2b()
        self._ledger: Callable[[], Ledger | None] | None = None
        self._counted = 0
        isend = dist.isend
        for name, argument in INPUTS.items():
            if hasattr(dist, name):
                setattr(dist, name, self._watched(getattr(dist, name), name, argument))
        # torch compares the operation with its own function.
        make = dist.P2POp
        watched = dist.isend
        dist.P2POp = lambda op, *args, **kwargs: make(isend if op is watched else op, *args, **kwargs)  # type: ignore[assignment,misc]

    def begin(self, ledger: Callable[[], "Ledger | None"]) -> None:
        """From now on calls are hashed, until `end`. `ledger` gives that of the strategy at work."""
        self.calls, self._rolling, self._ledger = [], hashlib.blake2b(), ledger
        self._counted = self._count()

    def end(self) -> list[str]:
        """A line for each call, the last word of which is a hash of all that was handed over so far."""
        self._ledger = None
        return self.calls

    def _count(self) -> int:
        ledger = self._ledger() if self._ledger is not None else None
        rows = ledger.rows if ledger is not None else {}
        return sum(traffic.calls for row in NOT_OF_TRAINING for traffic in rows.get(row, {}).values())

    def _watched(self, function: Callable[..., Any], name: str, argument: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._ledger is not None:
                self._enter(name, signature.bind(*args, **kwargs).arguments.get(argument))
            return function(*args, **kwargs)

        return call

    def _enter(self, name: str, handed: Any) -> None:
        tensors: list[Any] = [handed] if isinstance(handed, Tensor) else list(handed or [])
        if name == "batch_isend_irecv":
            tensors = [each.tensor for each in tensors if each.op.__name__ == "isend"]
        # Whether rank 0 was told to stop, as often as a second or so allows, and for how many steps that is.
        if name == "broadcast" and [(each.numel(), each.dtype) for each in tensors] == [(2, torch.int64)]:
            return
        count, counted = self._count(), self._counted
        self._counted = count
        size = sum(each.numel() * each.element_size() for each in tensors)
        self._rolling.update(f"{name} {size} ".encode())
        if count == counted:
            for tensor in tensors:
                self._rolling.update(bytes_of(tensor))
        dtypes = ",".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
        self.calls.append(f"{name} {dtypes} {size} {self._rolling.hexdigest()[:12]}")


class Network(pl.LightningModule):
    """A small classifier, with what makes trainings differ.

    Args:
        optimizer: Makes the optimizer of some parameters.
        norm: Whether there is a batch norm.
        words: None, or whether the gradients of an embedding are sparse tensors.
        unused: Whether a branch is left out of the loss in every other batch of rank 1.
        thaws: Whether this branch is frozen until the sixth batch.
        overflows: The batch in which rank 1's loss is infinite.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
        norm: bool = False,
        words: bool | None = None,
        unused: bool = False,
        thaws: bool = False,
        overflows: int | None = None,
    ) -> None:
        super().__init__()
        self.optimizer, self.unused, self.thaws, self.overflows = optimizer, unused, thaws, overflows
        self.words = nn.Embedding(WORDS, FEATURES, sparse=words) if words is not None else None
        middle = nn.BatchNorm1d(48) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(FEATURES, 48), middle, nn.Tanh(), nn.Linear(48, 32), nn.Tanh())
        self.side = nn.Linear(FEATURES, 32)
        self.head = nn.Linear(32, CLASSES)
        self.side.requires_grad_(not thaws)
        self.losses: list[str] = []
        self.batches = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.thaws and self.batches >= 5:
            self.side.requires_grad_(True)
        self.batches += 1

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.words is not None:
            x = self.words(x.float().mul(50).long().remainder(WORDS)).mean(1)
        hidden = self.body(x)
        if not (self.unused and self.global_rank == 1 and batch_idx % 2):
            hidden = hidden + self.side(x)
        loss = cross_entropy(self.head(hidden).float(), y)
        if (self.global_rank, batch_idx) == (1, self.overflows):
            loss = loss * math.inf
        self.losses.append(hash_of(loss))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Adversarial(Network):
    """Two optimizers, stepped by hand. The first one's loss gives gradients to the second's parameters too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for sign, optimizer in zip((1, -0.5), self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(sign * self.loss(batch, batch_idx).tanh())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        of_head = list(self.head.parameters())
        others = [*self.body.parameters(), *self.side.parameters()]
        return [torch.optim.SGD(others, lr=0.1, momentum=0.5), torch.optim.SGD(of_head, lr=0.05, momentum=0.9)]


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    every = list(parameters)
    of_weights = [parameter for parameter in every if parameter.dim() > 1]
    of_others = [parameter for parameter in every if parameter.dim() <= 1]
    groups = [{"params": of_weights, "weight_decay": 1e-3}, {"params": of_others, "lr": 0.05, "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Watch(pl.Callback):
    """Takes down what a rank holds after each batch, and saves a checkpoint after the last."""

    def __init__(self, collectives: Collectives, checkpoint: Path) -> None:
        self.collectives, self.checkpoint = collectives, checkpoint
        self.weights: list[str] = []
        self.scales: list[float] = []
        self.saved = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.collectives.begin(lambda: trainer.strategy.ledger)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.weights.append(hash_of_state(pl_module.state_dict()))
        if trainer.scaler is not None:
            self.scales.append(trainer.scaler.get_scale())
        if trainer.global_step >= trainer.max_steps and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.checkpoint)

    def memories(self, rank: int) -> list[str]:
        """Hashes of the tensors in this rank's file, sorted; none where the method has no file."""
        folder = Path(f"{self.checkpoint}.sparsecomm")
        held: list[str] = []
        for path in folder.glob(f"rank_{rank}_of_*.pt"):
            state = torch.load(path, weights_only=False)
            held += [hash_of(leaf) for _, leaf in leaves(state) if isinstance(leaf, Tensor) and leaf.dim()]
        return sorted(held)


@dataclass(frozen=True)
class Configuration:
    """One training. `stop` is the step of a checkpoint that a new Trainer resumes from; `after` names a configuration
    from whose checkpoint this one resumes. A method of None is the strategy's default."""

    method: Callable[[], "Method | None"]
    model: Callable[[], Network] = Network
    ranks: int = 2
    steps: int = STEPS
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    scaled: bool = False
    validated: bool = False
    stop: int | None = None
    after: str | None = None
    fabric: bool = False


def configurations() -> dict[str, Configuration]:
    """All that are trained, by name."""
    from lightning_sparsecomm import ParameterAveraging, SparsityWarmup, methods

    sgd = torch.optim.SGD
    heavy = partial(Network, partial(sgd, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True))
    damped = partial(Network, partial(sgd, lr=0.1, momentum=0.9, weight_decay=1e-3, dampening=0.1))
    adam = partial(Network, partial(torch.optim.Adam, lr=0.01))
    adam_norm = partial(Network, partial(torch.optim.AdamW, lr=0.01), norm=True)
    plain = partial(sgd, lr=0.5)
    norm = partial(Network, norm=True)

    dense, dropping, dgc, sbc = methods.dense, methods.gradient_dropping, methods.dgc, methods.sbc
    sketched, s2 = methods.sketched_sgd, methods.s2_reducer
    warm = partial(dgc, 0.02, warmup_steps=6)
    few = partial(dropping, 0.05)
    local = partial(dropping, 0.05, average_every=4)
    rarely = partial(sbc, 0.02, every=4)
    forced = partial(sketched, 0.02, columns=100, candidates=4, always_sketch=True)
    blocks = partial(s2, 0.2, block_size=8)

    validating = {"val_check_interval": 3, "limit_val_batches": 2}

    found = {
        "default": Configuration(lambda: None),
        "default-adam": Configuration(lambda: None, adam),
        "dense-embedding": Configuration(dense, partial(Network, plain, words=False)),
        "dense-unused": Configuration(dense, partial(Network, unused=True)),
        "dense-buckets": Configuration(
            dense,
            strategy={"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True},
            trainer={"gradient_clip_val": 0.3},
        ),
        "dense-16-mixed-overflow": Configuration(dense, partial(Network, overflows=4), scaled=True),
        "dense": Configuration(dense),
        "dense-bfloat16": Configuration(lambda: dense("bfloat16"), norm),
        "dense-float16-3": Configuration(lambda: dense("float16"), ranks=3),
        "dense-bf16-true": Configuration(dense, trainer={"precision": "bf16-true"}),
        "dense-accumulation": Configuration(dense, norm, steps=6, trainer={"accumulate_grad_batches": 2}),
        "dgc": Configuration(warm),
        "dgc-3": Configuration(warm, norm, ranks=3),
        "dgc-all-defaults": Configuration(dgc),
        "dgc-without-warmup": Configuration(lambda: dgc(0.02, warmup_steps=0)),
        "dgc-warmup-epochs": Configuration(lambda: dgc(0.02, warmup_epochs=2), steps=24),
        "dgc-without-masking": Configuration(lambda: warm(momentum_masking=False)),
        "dgc-nesterov-decay": Configuration(warm, heavy),
        "dgc-dampening-decay-3": Configuration(warm, damped, ranks=3),
        "dgc-model-scope": Configuration(lambda: warm(scope="model")),
        "dgc-float16": Configuration(lambda: warm(values="float16")),
        "dgc-64-true": Configuration(warm, trainer={"precision": "64-true"}),
        "dgc-groups": Configuration(warm, partial(Network, grouped)),
        "dgc-exclude": Configuration(lambda: warm(exclude=["head.*"])),
        "dgc-trainers-clipping": Configuration(warm, trainer={"gradient_clip_val": 0.3}),
        "dgc-own-clipping": Configuration(lambda: warm(clip=0.2)),
        "dgc-uncorrected-adam": Configuration(lambda: warm(momentum_correction=False), adam),
        "dgc-bf16-mixed": Configuration(warm, trainer={"precision": "bf16-mixed"}),
        "dgc-bf16-true": Configuration(warm, trainer={"precision": "bf16-true"}),
        "dgc-16-mixed-overflow": Configuration(warm, partial(Network, overflows=4), scaled=True),
        "dgc-16-mixed-overflow-at-once": Configuration(warm, partial(Network, overflows=0), scaled=True),
        "dgc-16-mixed-clipping": Configuration(
            warm, partial(Network, overflows=4), trainer={"gradient_clip_val": 0.3}, scaled=True
        ),
        "dgc-16-mixed-resumed": Configuration(warm, scaled=True, stop=STOP),
        "dgc-accumulation": Configuration(warm, norm, steps=6, trainer={"accumulate_grad_batches": 2}),
        "dgc-two-optimizers": Configuration(warm, Adversarial, steps=2 * STEPS),
        "dgc-unused": Configuration(warm, partial(Network, unused=True)),
        "dgc-unfrozen": Configuration(warm, partial(Network, thaws=True)),
        "dgc-resumed": Configuration(warm, heavy, stop=STOP),
        "dgc-resumed-by-3": Configuration(warm, heavy, ranks=3, after="dgc-resumed"),
        "dropping": Configuration(few),
        "dropping-3": Configuration(few, adam, ranks=3),
        "dropping-warmup": Configuration(lambda: few(warmup_steps=8)),
        "dropping-without-feedback": Configuration(lambda: few(error_feedback=False)),
        "dropping-tensor-scope": Configuration(lambda: few(scope="tensor"), trainer={"gradient_clip_val": 0.3}),
        "dropping-value-clipping": Configuration(
            few, trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
        ),
        "dropping-float16": Configuration(lambda: few(values="float16"), adam),
        "dropping-exclude": Configuration(lambda: few(exclude=["*.bias"])),
        "dropping-masking": Configuration(lambda: few(momentum_masking=True)),
        "dropping-masking-adam": Configuration(lambda: few(momentum_masking=True), adam),
        "dropping-nearly-dense": Configuration(lambda: dropping(0.9)),
        "dropping-64-true": Configuration(few, adam, trainer={"precision": "64-true"}),
        "dropping-checked-3": Configuration(few, ranks=3, strategy={"check_replicas_every": 3}),
        "dropping-validated": Configuration(
            lambda: local(local="partial"),
            adam,
            trainer=validating,
            strategy={"check_replicas_every": 3},
            validated=True,
        ),
        "dropping-sum": Configuration(lambda: local(local="sum"), norm),
        "dropping-partial-averaging": Configuration(
            lambda: local(local="partial", average_buffers=True, average_optimizer_state=True), adam_norm
        ),
        "dropping-partial-3": Configuration(lambda: local(local="partial"), ranks=3),
        "dropping-error": Configuration(lambda: local(local="error", average_buffers=True), norm),
        "dropping-16-mixed-overflow": Configuration(few, partial(Network, overflows=4), scaled=True),
        "dropping-bf16-mixed": Configuration(few, trainer={"precision": "bf16-mixed"}),
        "dropping-two-optimizers-3": Configuration(few, Adversarial, ranks=3, steps=2 * STEPS),
        "dropping-unused-3": Configuration(few, partial(Network, unused=True), ranks=3),
        "dropping-unfrozen": Configuration(few, partial(Network, thaws=True)),
        "dropping-partial-resumed": Configuration(lambda: local(local="partial"), adam, stop=STOP),
        "dropping-warmup-callback": Configuration(few, callbacks=lambda: [SparsityWarmup(steps=8)]),
        "dropping-warmup-shape": Configuration(few, callbacks=lambda: [SparsityWarmup(steps=8, shape="inverse_time")]),
        "dropping-averaging-callback": Configuration(
            lambda: local(local="sum"), adam_norm, callbacks=lambda: [ParameterAveraging(3, True, True)]
        ),
        "dgc-averaging-callback": Configuration(warm, norm, callbacks=lambda: [ParameterAveraging(3, buffers=True)]),
        "sbc1": Configuration(methods.sbc1),
        "sbc": Configuration(rarely, adam_norm),
        "sbc-3": Configuration(rarely, norm, ranks=3),
        "sbc-exclude": Configuration(lambda: rarely(exclude=["*.bias"])),
        "sbc-without-masking": Configuration(lambda: rarely(momentum_masking=False)),
        "sbc-without-feedback": Configuration(lambda: rarely(error_feedback=False)),
        "sbc-own-buffers": Configuration(lambda: rarely(buffers="own"), norm),
        "sbc-broadcast-buffers": Configuration(lambda: rarely(buffers="broadcast"), norm),
        "sbc-bf16-true": Configuration(rarely, trainer={"precision": "bf16-true"}),
        "sbc-16-mixed-overflow": Configuration(rarely, partial(Network, overflows=4), scaled=True),
        "sbc-16-mixed-overflow-at-once": Configuration(rarely, partial(Network, overflows=0), scaled=True),
        "sbc-validated": Configuration(
            rarely, adam_norm, trainer=validating, strategy={"check_replicas_every": 3}, validated=True
        ),
        "sbc-two-optimizers": Configuration(rarely, Adversarial, steps=2 * STEPS),
        "sbc-unused": Configuration(rarely, partial(Network, unused=True)),
        "sbc-unfrozen": Configuration(rarely, partial(Network, thaws=True)),
        "sbc-embedding": Configuration(rarely, partial(Network, plain, words=True)),
        "sbc-warmup-callback": Configuration(rarely, callbacks=lambda: [SparsityWarmup(steps=8)]),
        "sbc-resumed": Configuration(rarely, adam, stop=STOP),
        "federated": Configuration(lambda: methods.federated_averaging(4), norm),
        "federated-float16-3": Configuration(lambda: methods.federated_averaging(4, "float16"), ranks=3),
        "diloco": Configuration(lambda: methods.diloco(4), adam_norm),
        "diloco-bfloat16": Configuration(lambda: methods.diloco(4, wire_dtype="bfloat16"), adam),
        "diloco-bf16-mixed-3": Configuration(
            lambda: methods.diloco(4), adam, ranks=3, trainer={"precision": "bf16-mixed"}
        ),
        "diloco-resumed": Configuration(lambda: methods.diloco(4), adam, stop=STOP),
        "sparse-loco": Configuration(lambda: methods.sparse_loco(4, 0.125, 64), adam),
        "sparse-loco-outer-3": Configuration(lambda: methods.sparse_loco(4, 0.125, 64, outer_lr=0.7), adam, ranks=3),
        "sketched": Configuration(forced),
        "sketched-3": Configuration(forced, norm, ranks=3),
        "sketched-bfloat16": Configuration(lambda: forced(sketch_dtype="bfloat16")),
        "sketched-float16": Configuration(lambda: forced(sketch_dtype="float16")),
        "sketched-k": Configuration(lambda: sketched(k=20, columns=100, candidates=3)),
        "sketched-whole": Configuration(lambda: sketched(0.02)),
        "sketched-clipping-nesterov": Configuration(lambda: forced(clip=0.2), heavy),
        "sketched-uncorrected-adam": Configuration(lambda: forced(momentum_correction=False), adam),
        "sketched-16-mixed-overflow": Configuration(forced, partial(Network, overflows=4), scaled=True),
        "sketched-resumed": Configuration(forced, stop=STOP),
        "s2": Configuration(blocks, adam),
        "s2-3": Configuration(lambda: blocks(rows=3), ranks=3),
        "s2-embedding": Configuration(blocks, partial(Network, plain, words=True)),
        "s2-embedding-dense": Configuration(blocks, partial(Network, plain, words=False)),
        "s2-embedding-exact-3": Configuration(
            lambda: blocks(sketch_ratio=None), partial(Network, plain, words=True), ranks=3
        ),
        "s2-sized-by-rank": Configuration(lambda: blocks(sized_by="rank", always_sketch=True)),
        "s2-exact": Configuration(lambda: blocks(sketch_ratio=None)),
        "s2-exclude-without-feedback": Configuration(lambda: blocks(exclude=["head.*"], error_feedback=False)),
        "split": Configuration(lambda: methods.split(["head.*"], dropping(0.1), rarely())),
        "split-dgc": Configuration(lambda: methods.split(["head.*"], few(), warm())),
        "split-embedding": Configuration(
            lambda: methods.split(["words.*"], s2(sketch_ratio=None), few()), partial(Network, plain, words=True)
        ),
        "split-resumed": Configuration(lambda: methods.split(["head.*"], dropping(0.1), rarely()), stop=STOP),
        "fabric-dgc": Configuration(warm, heavy, fabric=True),
        "fabric-dropping-3": Configuration(few, ranks=3, fabric=True),
        "fabric-sbc": Configuration(rarely, fabric=True),
        "fabric-dense": Configuration(dense, fabric=True),
    }
    assert all(each.ranks == 2 for each in found.values() if each.stop is not None)
    return found


SAVED = ("dgc-resumed", "dropping-partial-resumed", "sbc-resumed", "diloco-resumed", "sketched-resumed")
"""Whose rank files are kept for later versions."""


def ledger_items(ledger: "Ledger") -> Items:
    # Lightning broadcasts paths, which are as long as they are.
    return {
        f"{row}, {kind}": [traffic.calls] if row.startswith("Lightning") else [traffic.calls, traffic.handed_bytes]
        for row, kinds in ledger.rows.items()
        for kind, traffic in kinds.items()
    } | {"elements": [ledger.sent_elements, ledger.elements, ledger.steps, ledger.ddp_bytes]}


def data_of(world_size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * world_size * BATCHES, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator))


def train(
    chosen: Configuration, collectives: Collectives, folder: Path, steps: int, resume: Path | None = None
) -> Items:
    """Trains with a Trainer, in processes that are joined already; saves `STEPS.ckpt` in `folder`."""
    from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy

    torch.manual_seed(7)
    model, method, watch = chosen.model(), chosen.method(), Watch(collectives, folder / f"{steps}.ckpt")
    finds_unused = model.unused or not model.automatic_optimization
    plugins: list[Any] = [TorchElasticEnvironment()]
    if chosen.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=chosen.ranks,
        strategy=SparseCommStrategy(method, find_unused_parameters=finds_unused, **chosen.strategy),
        plugins=plugins,
        max_steps=steps,
        callbacks=[watch, *chosen.callbacks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **chosen.trainer,
    )
    loader = DataLoader(data_of(chosen.ranks), batch_size=BATCH)
    trainer.fit(model, loader, loader if chosen.validated else None, ckpt_path=resume)
    calls = collectives.end()
    assert trainer.global_step == steps and watch.saved
    assert trainer.strategy.ledger is not None
    return {
        "losses": model.losses,
        "weights after batches": watch.weights,
        "scales": watch.scales,
        "collectives": calls,
        "weights": {name: hash_of(tensor) for name, tensor in model.state_dict().items()},
        "optimizers": [hash_of_state(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
        "memories": watch.memories(trainer.global_rank),
        "ledger": ledger_items(trainer.strategy.ledger),
    }


def train_fabric(chosen: Configuration, collectives: Collectives) -> Items:
    """The same in a Fabric loop, which ends without a last exchange."""
    from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy

    torch.manual_seed(7)
    strategy = SparseCommStrategy(chosen.method())
    fabric = Fabric(accelerator="cpu", devices=chosen.ranks, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    network = chosen.model()
    module = nn.Sequential(network.body, network.head)
    model, optimizer = fabric.setup(module, network.optimizer(module.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(data_of(chosen.ranks), batch_size=BATCH))
    losses, after = [], []
    collectives.begin(lambda: strategy.ledger)
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        losses.append(hash_of(loss))
        fabric.backward(loss)
        optimizer.step()
        after.append(hash_of_state(module.state_dict()))
    calls = collectives.end()
    assert strategy.ledger is not None
    items: Items = {
        "losses": losses,
        "weights after batches": after,
        "collectives": calls,
        "weights": {name: hash_of(tensor) for name, tensor in module.state_dict().items()},
        "optimizers": [hash_of_state(optimizer.state_dict()["state"])],
        "ledger": ledger_items(strategy.ledger),
    }
    strategy.teardown()
    return items


def train_all(name: str, chosen: Configuration, collectives: Collectives, folder: Path) -> Items:
    """Both parts of a training that is stopped and resumed."""
    if chosen.fabric:
        return train_fabric(chosen, collectives)
    place = folder / name
    if chosen.after is not None:
        return train(chosen, collectives, place, chosen.steps, folder / chosen.after / f"{STOP}.ckpt")
    if chosen.stop is None:
        return train(chosen, collectives, place, chosen.steps)
    first = train_first(name, chosen, collectives, folder)
    second = train(chosen, collectives, place, chosen.steps, place / f"{chosen.stop}.ckpt")
    return {f"before the stop, {item}": value for item, value in first.items()} | second


def train_first(name: str, chosen: Configuration, collectives: Collectives, folder: Path) -> Items:
    """Until the checkpoint."""
    assert chosen.stop is not None
    return train(chosen, collectives, folder / name, chosen.stop)


def resume_old(saved: Path, name: str, chosen: Configuration, collectives: Collectives, folder: Path) -> Items:
    """From a checkpoint that was saved before."""
    return train(chosen, collectives, folder / name, chosen.steps, saved / name / f"{chosen.stop}.ckpt")


Training = Callable[[str, Configuration, Collectives, Path], Items]


class Report(NamedTuple):
    """What a rank says of one configuration: what came out, or how it failed."""

    rank: int
    name: str
    items: Items | None = None
    failure: str = ""


def rank_main(
    rank: int,
    ranks: int,
    store: Path,
    package: Path,
    names: Sequence[str],
    training: Training,
    folder: Path,
    reports: Any,
) -> None:
    """What each process does: all configurations, until one fails."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    name = names[0]
    try:
        import lightning_sparsecomm

        where = Path(lightning_sparsecomm.__file__).resolve()
        assert where.is_relative_to(package), f"{where} does not lie under {package}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        collectives, found = Collectives(), configurations()
        for name in names:
            reports.put(Report(rank, name, training(name, found[name], collectives, folder)))
        dist.destroy_process_group()
    except BaseException:
        reports.put(Report(rank, name, failure=traceback.format_exc()))
    reports.close()
    reports.join_thread()
    os._exit(0)


def run_ranks(ranks: int, package: Path, names: Sequence[str], training: Training, folder: Path) -> dict[str, Items]:
    """The configurations' items by rank, trained in `ranks` processes; started anew after one that fails."""
    found: dict[str, Items] = {}
    left = list(names)
    while left:
        reports = FORK.Queue()
        store = folder / f"store-{os.urandom(6).hex()}"
        processes = [
            FORK.Process(target=rank_main, args=(rank, ranks, store, package, left, training, folder, reports))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        done: dict[str, dict[int, Items]] = {name: {} for name in left}
        failure = ""
        while not failure and any(len(each) < ranks for each in done.values()):
            try:
                report: Report = reports.get(timeout=SECONDS)
            except queue.Empty:
                failure = f"no result within {SECONDS} s"
                break
            failure = report.failure and f"rank {report.rank}: {report.failure}"
            if report.items is not None:
                done[report.name][report.rank] = report.items
        for process in processes:
            process.join(0 if failure else 10)
            if process.is_alive():
                process.kill()
                process.join()
        for name in list(left):
            if len(done[name]) == ranks:
                found[name] = {f"rank {rank}": done[name][rank] for rank in range(ranks)}
                left.remove(name)
        if failure:
            # The first that not all ranks have ended.
            failed = left.pop(0)
            print(f"{failed} failed: {failure}", file=sys.stderr, flush=True)
            found[failed] = {"failure": {"says": failure.strip().splitlines()[-1]}}
    return found


def run(package: Path, names: Sequence[str], training: Training, folder: Path) -> dict[str, Items]:
    """All configurations, by numbers of ranks."""
    known = configurations()
    found: dict[str, Items] = {}
    for ranks in sorted({known[name].ranks for name in names}):
        found |= run_ranks(ranks, package, [name for name in names if known[name].ranks == ranks], training, folder)
    return {name: found[name] for name in names}


def write(output: Path, found: Mapping[str, Items], begin: float) -> int:
    """To a file, with what the bits depend on besides; the exit status."""
    import lightning_sparsecomm

    made_with = {
        "torch": torch.__version__,
        "pytorch-lightning": version("pytorch-lightning"),
        "python": platform.python_version(),
        "architecture": platform.machine(),
    }
    output.write_text(json.dumps({"made with": made_with, "configurations": found}, indent=1) + "\n")
    failed = [name for name, ranks in found.items() if "failure" in ranks]
    print(
        f"{len(found)} configurations in {time.monotonic() - begin:.0f} s with"
        f" {Path(lightning_sparsecomm.__file__).parent}{'; failed: ' + ', '.join(failed) if failed else ''}"
    )
    return int(bool(failed))


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any pattern; all where there is none.

    Raises:
        SystemExit: A pattern matches nothing.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"--only must name configurations; got {pattern!r}. There are {', '.join(names)}.")
    return [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, each) for each in patterns)]


def record(output: Path, package: Path, only: Sequence[str]) -> int:
    begin = time.monotonic()
    known = configurations()
    names = matching(list(known), only)
    names += [name for name in {known[name].after for name in names} if name is not None and name not in names]
    with tempfile.TemporaryDirectory() as folder:
        return write(output, run(package, names, train_all, Path(folder)), begin)


def save(folder: Path, package: Path) -> int:
    """Checkpoints with their rank files, for `resume_old`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = run(package, SAVED, train_first, folder)
    for store in folder.glob("store-*"):
        store.unlink()
    for path in sorted(folder.glob("**/*.*t")):
        print(path)
    return int(any("failure" in ranks for ranks in found.values()))


def resume(saved: Path, output: Path, package: Path) -> int:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        return write(output, run(package, SAVED, partial(resume_old, saved.resolve()), Path(folder)), begin)


def differences(old: Items, new: Items) -> list[str]:
    """What differs in one rank's items, in words."""
    found = []
    for item in {**old, **new}:
        one, other = old.get(item), new.get(item)
        if one == other:
            continue
        if isinstance(one, list) and isinstance(other, list):
            first = next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))
            lengths = f", {len(one)} and {len(other)} of them" if len(one) != len(other) else ""
            both = ""
            if item.endswith("collectives") and first < min(len(one), len(other)):
                both = f" ({' '.join(one[first].split()[:-1])} -> {' '.join(other[first].split()[:-1])})"
            found.append(f"{item} from number {first}{both}{lengths}")
        elif isinstance(one, dict) and isinstance(other, dict):
            keys = [str(key) for key in {**one, **other} if one.get(key) != other.get(key)]
            found.append(f"{item} {', '.join(keys)}")
        else:
            found.append(item if one is not None and other is not None else f"{item} is in one file only")
    return found


def compare(old: Path, new: Path, only: Sequence[str]) -> int:
    """Prints a line for each configuration; 1 where anything differs."""
    contents = [json.loads(path.read_text()) for path in (old, new)]
    ones, others = (content["configurations"] for content in contents)
    if contents[0]["made with"] != contents[1]["made with"]:
        print(f"not made alike: {contents[0]['made with']} and {contents[1]['made with']}", file=sys.stderr)
    differing = 0
    names = matching(list({**ones, **others}), only)
    for name in names:
        if name not in ones or name not in others:
            said = f"only in {old if name in ones else new}"
        else:
            one, other = ones[name], others[name]
            parts = [
                f"{rank}: {'; '.join(found)}"
                for rank in {**one, **other}
                if (found := differences(one.get(rank, {}), other.get(rank, {})))
            ]
            # A failure has no bits to be equal.
            failures = {**one, **other}.get("failure")
            said = " | ".join(parts) or (f"failed in both: {failures['says']}" if failures else "")
        differing += bool(said)
        print(f"{name}: {said or 'equal'}")
    print(f"{len(names) - differing} of {len(names)} equal")
    return int(differing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    package = argparse.ArgumentParser(add_help=False)
    package.add_argument(
        "--package", type=Path, default=CHECKOUT, help="folder that holds lightning_sparsecomm (default: this checkout)"
    )
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="configurations, or patterns of their names"
    )
    command = commands.add_parser("record", parents=[package, only], help="train, and write hashes")
    command.add_argument("output", type=Path)
    command = commands.add_parser("compare", parents=[only], help="say what differs in two files")
    command.add_argument("old", type=Path)
    command.add_argument("new", type=Path)
    command = commands.add_parser("save", parents=[package], help="write checkpoints with their rank files")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("resume-old", parents=[package], help="resume from those, and write hashes")
    command.add_argument("folder", type=Path)
    command.add_argument("output", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "compare":
        return compare(chosen.old, chosen.new, chosen.only)
    where = chosen.package.resolve()
    sys.path.insert(0, str(where))
    if chosen.command == "record":
        return record(chosen.output, where, chosen.only)
    if chosen.command == "save":
        return save(chosen.folder, where)
    return resume(chosen.folder, chosen.output, where)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
