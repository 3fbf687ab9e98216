"""Precisions without a loss scaler: methods train, replicas stay equal, and memories are float32 or wider."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.methods import RECIPES
from tests import laws
from tests.distributed.scaled import METHODS, WITHOUT_MEMORY, diaries, finite, needs_adam, same, tensors, with_diary
from tests.distributed.scenarios import Classifier, Scenario, Training, fit_several

# The dtype of weights, that of memories, and one that is too narrow for what memories hold.
DTYPES = {
    "bf16-mixed": (torch.float32, torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, torch.float32, torch.bfloat16),
    "64-true": (torch.float64, torch.float64, torch.float32),
}


class WithAdam(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


# Other tests compile the float64 kernels of these too. Those of sketches take long to compile.
COMPILED = ("dense", "gradient_dropping", "dgc", "federated_averaging")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16-true", tuple(RECIPES)[::3]),
        pytest.param("bf16-true", tuple(RECIPES), marks=pytest.mark.slow),
        ("64-true", COMPILED),
        pytest.param("64-true", tuple(name for name in METHODS if name not in COMPILED), marks=pytest.mark.slow),
        pytest.param("bf16-mixed", tuple(METHODS), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_every_method_trains_with_memories_that_are_wide(tmp_path: Path, precision: Any, names: Any) -> None:
    of_weights, of_memories, narrower = DTYPES[precision]
    models = {name: WithAdam if needs_adam(METHODS[name]) else Classifier for name in names}
    trainings = {
        name: Training(Scenario(model, steps=7), METHODS[name], with_diary, {"precision": precision})
        for name, model in models.items()
    }
    for name, ranks in fit_several(tmp_path, 2, trainings).items():
        laws.replicas_are_equal(ranks)
        laws.trained(Classifier().to(of_weights).state_dict(), ranks[0])
        both = diaries(tmp_path / name)
        for diary in both:
            assert finite(diary)
            assert {tensor.dtype for tensor in tensors([page["weights"] for page in diary])} == {of_weights}
            memories = tensors([page["memories"] for page in diary])
            # Learning rates are saved in float64, and Adam's counts of steps, as torch has them, in float32. Positions
            # are whole numbers.
            values = [tensor for tensor in memories if tensor.dim() and tensor.is_floating_point()]
            wide = {tensor.dtype for tensor in values} - {torch.float64} | {of_memories}
            assert wide == {of_memories} and bool(memories) == (name not in WITHOUT_MEMORY)
            assert name in WITHOUT_MEMORY or any(bool((m != m.to(narrower)).any()) for m in memories)
        if all(not sync.drifts for sync in METHODS[name].syncs):
            assert same(*([page["weights"] for page in diary] for diary in both))
