"""16-mixed with its loss scaler: where one rank overflows, all skip the step. Memories see no scaled gradient."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.methods import RECIPES, dense, dgc, gradient_dropping
from tests import laws
from tests.distributed.scaled import (
    METHODS,
    WITHOUT_MEMORY,
    Overflowing,
    diaries,
    finite,
    needs_adam,
    same,
    scaled,
    scales,
    scales_in,
    tensors,
    with_diary,
)
from tests.distributed.scenarios import Classifier, Scenario, Training, fit_several


def training(
    method: str | None, model: Callable[[], Any], diary: bool = True, steps: int = 10, **options: Any
) -> Training:
    found = METHODS[method] if method is not None else None
    return Training(Scenario(model, steps=steps), found, with_diary if diary else lambda folder: (), options)


SHARING = [name for name, method in METHODS.items() if all(sync.shares_gradients for sync in method.syncs)]
# In step 4, where memories hold something, and in step 0, where nothing is set up yet.
OVERFLOWS = [*((name, 4) for name in RECIPES), ("dgc", 0), ("sbc", 0)]
MORE = [("partial", 4), ("split", 4), ("dense", 0), ("split", 0)]


@pytest.mark.parametrize(
    ("sharing", "overflows"),
    [
        (True, OVERFLOWS[::3]),
        pytest.param(True, OVERFLOWS, marks=pytest.mark.slow),
        pytest.param(False, OVERFLOWS, marks=pytest.mark.slow),
        pytest.param(True, MORE, marks=pytest.mark.slow),
    ],
)
def test_what_overflows_on_one_rank_is_skipped_by_all(tmp_path: Path, sharing: bool, overflows: Any) -> None:
    """Where ranks share gradients. Where each steps by itself, the other ranks make their steps."""
    cases = {f"{name}-{at}": (name, at) for name, at in overflows if (name in SHARING) == sharing}
    trainings = {
        case: training(name, partial(Overflowing, at, False, needs_adam(METHODS[name])), **scaled())
        for case, (name, at) in cases.items()
    }
    for case, ranks in fit_several(tmp_path, 2, trainings).items():
        laws.replicas_are_equal(ranks)
        name, at = cases[case]
        both = diaries(tmp_path / case)
        for rank, diary in enumerate(both):
            _assert_skipped(name, at, diary, skips=sharing or rank == 1)
        if sharing and name != "partial":
            assert same(*([page["weights"] for page in diary] for diary in both))


def _assert_skipped(name: str, at: int, diary: list[dict[str, Any]], skips: bool) -> None:
    nothing = {"memories": [], "optimizers": [], "sent": 0, "ddp": 0}
    start = {**nothing, "weights": list(Overflowing().parameters())}
    pages = [start, *diary]
    assert [not same(a["weights"], b["weights"]) for a, b in pairwise(pages)] == [
        not skips or step != at for step in range(len(diary))
    ]
    before, skipped = pages[at], pages[at + 1]
    if skips:
        assert same(before["optimizers"], skipped["optimizers"])
    if at:
        assert same(before["memories"], skipped["memories"])
    else:
        assert not any(bool(tensor.any()) for tensor in tensors(skipped["memories"]))
    assert bool(tensors(diary[-1]["memories"])) == (name not in WITHOUT_MEMORY)
    assert finite(diary)
    assert scales_in(diary) == scales(at if skips else None)
    # ddp sends gradients before it finds the overflow. We send 4 bytes in that step, or none where ranks step alone.
    of_ddp, ours = skipped["ddp"] - before["ddp"], skipped["sent"] - before["sent"]
    assert of_ddp == 4 * sum(parameter.numel() for parameter in start["weights"])
    assert ours == (of_ddp if name == "dense" else 4 if name in SHARING else 0)


WHOLE = {
    "dense": dense(),
    "gradient_dropping": gradient_dropping(density=1.0),
    "dgc": dgc(density=1.0, warmup_steps=0, momentum_masking=False),
}


def test_full_density_equals_ddp(tmp_path: Path) -> None:
    """Also with a step that overflows, and with scales that change."""
    scenario = Scenario(lambda: Overflowing(4), {"accumulate_grad_batches": 2}, steps=8)
    methods = {"ddp": None, **WHOLE}
    trainings = {name: Training(scenario, method, options=scaled()) for name, method in methods.items()}
    found = fit_several(tmp_path, 2, trainings)
    ddp = found.pop("ddp")
    laws.trained(Overflowing().state_dict(), ddp[0])
    laws.bit_equal(found["dense"][1], ddp[1])
    for ours in found.values():
        laws.replicas_are_equal(ours)
        laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


@pytest.mark.parametrize(
    "names",
    [
        ("gradient_dropping", "dgc", "sbc"),
        pytest.param(("sketched_sgd", "s2_reducer", "split"), marks=pytest.mark.slow),
    ],
)
def test_memories_are_those_of_an_unscaled_training(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Bit for bit, also where each rank clips its own gradient: by the norm of the unscaled one."""
    trainings = {}
    for name in names:
        options = {"gradient_clip_val": 0.01} if name in ("dgc", "sketched_sgd") else {}
        trainings[f"{name}-unscaled"] = training(name, Overflowing, diary=False, **options)
        trainings[name] = training(name, Overflowing, **options, **scaled())
    found = fit_several(tmp_path, 2, trainings)
    for name in names:
        for rank, diary in enumerate(diaries(tmp_path / name)):
            assert scales_in(diary) == scales(None)
            both = found[name][rank], found[f"{name}-unscaled"][rank]
            laws.bit_equal(*both)
            states = [[each["state"] for sync in ending["syncs"] for each in sync.values()] for ending in both]
            assert same(*states)
            assert tensors(states), "no memory was looked at"


class Fused(Overflowing):
    def __init__(self, at: int, fused: bool) -> None:
        super().__init__(at)
        self.fused = fused

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=self.fused)


def test_fused_optimizers_skip_too(tmp_path: Path) -> None:
    """Also in the first step, after which torch's fused optimizers hold uninitialized momentum.

    Also with clipping, which Lightning refuses where an optimizer unscales by itself.
    """
    options = {"gradient_clip_val": 0.5}
    trainings = {
        f"{name}-{fused}": training(name, lambda fused=fused: Fused(0, fused), **options, **scaled())
        for name in ("gradient_dropping", "dgc")
        for fused in (True, False)
    }
    found = fit_several(tmp_path, 2, trainings)
    for name in ("gradient_dropping", "dgc"):
        laws.replicas_are_equal(found[f"{name}-True"])
        laws.equal_to_round_off(found[f"{name}-True"][0], found[f"{name}-False"][0], 2e-6)
        for diary in diaries(tmp_path / f"{name}-True"):
            # No step, no weight decay, and momentum has not begun.
            assert same(diary[0]["weights"], list(Fused(0, True).parameters()))
            assert not tensors(diary[0]["optimizers"])
            assert tensors(diary[1]["optimizers"])


class Thawing(Overflowing):
    """Unfreezes a layer that is in none of DDP's buckets. Only its gradient overflows."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.side.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.side.requires_grad_(True)
        self.overflows = (self.global_rank, batch_idx) == (1, self.at)
        return Classifier.training_step(self, batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.overflows:
            self.side.weight.grad.fill_(torch.inf)


def test_parameters_that_ddp_does_not_know(tmp_path: Path) -> None:
    found = fit_several(tmp_path, 2, {"dense": training("dense", lambda: Thawing(4), **scaled())})
    laws.replicas_are_equal(found["dense"])
    for diary in diaries(tmp_path / "dense"):
        assert scales_in(diary) == scales(4)
        assert same(diary[3]["weights"], diary[4]["weights"])


class WithoutResult(Overflowing):
    """The user's own step, whose closure returns None on one rank: Lightning makes no step there."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            return loss if self.global_rank == 0 else None

        optimizer.step(closure=closure)


def test_all_ranks_step_or_none(tmp_path: Path) -> None:
    trainings = {
        "without": training("dgc", lambda: WithoutResult(4), **scaled()),
        "with": training("dgc", lambda: Overflowing(4), **scaled()),
    }
    found = fit_several(tmp_path, 2, trainings)
    laws.replicas_are_equal(found["without"])
    laws.bit_equal(found["without"][1], found["with"][1])
    for diary in diaries(tmp_path / "without"):
        assert scales_in(diary) == scales(4)


def test_a_scaler_that_is_switched_off_is_none(tmp_path: Path) -> None:
    trainings = {
        "off": training("dgc", Overflowing, diary=False, **scaled(enabled=False)),
        "none": training("dgc", Overflowing, diary=False),
    }
    off, none = fit_several(tmp_path, 2, trainings).values()
    laws.bit_equal(off[0], none[0])
