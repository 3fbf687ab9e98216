"""Trainings on CPUs with a loss scaler, in which one rank's gradient overflows, and a diary of each."""

import copy
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision.amp import MixedPrecision
from torch import Tensor

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import AdamMoments, Channel
from lightning_sparsecomm.methods import (
    RECIPES,
    adacomp,
    aligned_topk,
    demo,
    dense,
    des_loc,
    dgc,
    diloco,
    dryden,
    ef21,
    ef_signsgd,
    federated_averaging,
    gradient_dropping,
    local_adam,
    muloco,
    natural,
    ok_topk,
    omnireduce,
    onebit_adam,
    onebit_sgd,
    parallax,
    post_local_sgd,
    powersgd,
    qsgd,
    quantized,
    random_k,
    s2_reducer,
    sbc,
    signsgd,
    sketched_sgd,
    sparcml,
    sparse_loco,
    split,
    streaming_diloco,
    strom,
    terngrad,
)
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.fragments import FragmentedShare
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from tests import laws
from tests.distributed.scenarios import Classifier
from tests.distributed.summed import in_regions, summed

METHODS: dict[str, Method] = {
    "dense": dense(),
    "gradient_dropping": gradient_dropping(density=0.05),
    "partial": gradient_dropping(density=0.05, local="partial", average_every=3),
    "dgc": dgc(density=0.05, warmup_steps=0),
    "local_adam": local_adam(density=0.05),
    "dgc, summed": summed(dgc, 0.05, warmup_steps=0),
    "dgc, regions": in_regions(dgc(density=0.05, warmup_steps=0)),
    "dgc, ok_topk": dgc(density=0.05, warmup_steps=0, exchange="ok_topk"),
    "local_adam, ok_topk": local_adam(density=0.05, exchange="ok_topk"),
    "dgc, late": dgc(density=0.05, warmup_steps=0, delay=1),
    "local_adam, late": local_adam(density=0.05, delay=1),
    "dgc, local steps": dgc(density=0.05, warmup_steps=0, every=3),
    "local_adam, local steps": local_adam(density=0.05, every=2),
    "dgc, ahead": dgc(density=0.05, warmup_steps=0, every=3, residual_in_weights=True),
    "sketched_sgd": sketched_sgd(0.05, columns=40, candidates=4),
    "s2_reducer": s2_reducer(block_density=0.2, block_size=8),
    "powersgd": powersgd(rank=1),
    "quantized": quantized(bits=4),
    "random_k": random_k(density=0.05),
    "ok_topk": ok_topk(density=0.05),
    "aligned_topk": aligned_topk(density=0.05, block_size=8),
    "ef21": ef21(density=0.05),
    "demo": demo(k=4, side=8),
    "split": split(["head.*"], gradient_dropping(density=0.05), dgc(density=0.05, warmup_steps=0)),
    "sbc": sbc(0.05, every=3),
    "sbc, ahead": sbc(0.05, every=3, residual_in_weights=True),
    "federated_averaging": federated_averaging(every=3),
    "diloco": diloco(every=3),
    "sparse_loco": sparse_loco(every=3, density=0.125, chunk=64),
    "streaming_diloco": streaming_diloco(every=6, delay=1),
    "muloco": muloco(every=3),
    "des_loc": des_loc(every=2),
    "qsgd": qsgd(),
    "terngrad": terngrad(),
    "natural": natural(),
    "onebit_sgd": onebit_sgd(),
    "ef_signsgd": ef_signsgd(),
    "signsgd": signsgd(),
    "strom": strom(threshold=0.001),
    "dryden": dryden(density=0.05),
    "adacomp": adacomp(bin_size=50),
    "onebit_adam": onebit_adam(warmup_steps=3),
    "parallax": parallax(tables=["*.weight"]),
    "omnireduce": omnireduce(block_density=0.2, block_size=8),
    "sparcml": sparcml(density=0.05, bucket=64),
    "post_local_sgd": post_local_sgd(dense_steps=3, every=3),
}
assert METHODS.keys() >= RECIPES.keys()


def needs_adam(method: Method) -> bool:
    return any(parts_in(method, AdamMoments))  # type: ignore[type-abstract]


def _remembers(method: Method) -> bool:
    syncs = [sync for sync in method.syncs if isinstance(sync, (GradientSync, DeltaSync))]
    return any(sync.channel.memories for sync in syncs)


WITHOUT_MEMORY = [name for name, method in METHODS.items() if not _remembers(method)]

SCALE, GROWTH = 2.0**10, 3
"""The first scale, and how many steps in a row must succeed before it doubles."""


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": SCALE, "growth_interval": GROWTH, **options})


def scaled(**options: Any) -> dict[str, Any]:
    """The Trainer's options for 16-mixed on CPUs."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu", make_scaler(**options))]}


def scales(at: int | None, steps: int = 10) -> list[float]:
    """The scale after each step, where step `at` is skipped and no other."""
    scale, made, found = SCALE, 0, []
    for step in range(steps):
        scale, made = (scale / 2, 0) if step == at else (scale, made + 1)
        if made == GROWTH:
            scale, made = scale * 2, 0
        found.append(scale)
    return found


class Overflowing(Classifier):
    """Rank 1's gradients overflow in step `at`.

    With `exact` it computes in float32, where a scale that is a power of two changes no bit of the mantissa. Otherwise
    it computes in float16.
    """

    def __init__(self, at: int | None = None, exact: bool = True, adam: bool = False) -> None:
        super().__init__()
        self.at, self.exact, self.adam = at, exact, adam

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01) if self.adam else super().configure_optimizers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        with torch.autocast("cpu", torch.float16, enabled=not self.exact):
            loss = super().training_step(batch, batch_idx)
        return loss * math.inf if (self.global_rank, batch_idx) == (1, self.at) else loss


def channels(strategy: Any) -> list[Channel]:
    """All channels at work."""
    shares = [share for tracked in strategy.engine.registry.optimizers for share in tracked.shares.values()]
    shares = [
        piece for share in shares for piece in (share.fragments if isinstance(share, FragmentedShare) else [share])
    ]
    return [share.channel for share in shares if isinstance(share, (GradientShare, DeltaShare))]


class Diary(pl.Callback):
    """Notes what a rank holds after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        self.pages.append(
            {
                "weights": [parameter.detach().clone() for parameter in pl_module.parameters()],
                "memories": copy.deepcopy([channel.state_dict() for channel in channels(strategy)]),
                "optimizers": copy.deepcopy([[*optimizer.state.values()] for optimizer in trainer.optimizers]),
                "scale": trainer.scaler.get_scale() if trainer.scaler is not None else None,
                "sent": strategy.ledger.sent_bytes,
                "ddp": strategy.ledger.ddp_bytes,
            }
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        torch.save(self.pages, self.folder / f"diary-{trainer.global_rank}.pt")


def with_diary(folder: Path) -> tuple[pl.Callback, ...]:
    return (Diary(folder),)


def diaries(folder: Path) -> list[list[dict[str, Any]]]:
    """The diaries of both ranks."""
    return [torch.load(folder / f"diary-{rank}.pt") for rank in range(2)]


def scales_in(diary: list[dict[str, Any]]) -> list[float | None]:
    return [page["scale"] for page in diary]


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.detach()]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else []
    return [tensor for part in parts for tensor in tensors(part)]


def same(a: Any, b: Any) -> bool:
    """Whether all tensors have the same bits."""
    return [laws.bits(tensor) for tensor in tensors(a)] == [laws.bits(tensor) for tensor in tensors(b)]


def finite(tree: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors(tree))
