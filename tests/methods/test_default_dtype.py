"""torch.set_default_dtype is the user's: what is sent, and what comes of it, does not depend on it."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import AdamMoments
from lightning_sparsecomm.methods import RECIPES
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.testing import run_ranks

SMALL = {
    "every": 1,
    "fragments": 1,
    "delay": 0,
    "density": 0.1,
    "block_density": 0.5,
    "warmup_steps": 1,
    "dense_steps": 1,
    "columns": 50,
}


def recipes() -> list[Method]:
    """All that work alone in an engine, exchanging in each step."""
    found = []
    for name, recipe in RECIPES.items():
        known = inspect.signature(recipe).parameters
        if name != "auto":
            found.append(recipe(**{option: value for option, value in SMALL.items() if option in known}))
    return found


def _trained(rank: int, method: Method, default: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    module = nn.Linear(20, 10, dtype=torch.float32)
    torch.set_default_dtype(default)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(0.5)
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    weights = module.parameters()
    optimizer = torch.optim.AdamW(weights) if _wants_adam(method) else torch.optim.SGD(weights, lr=0.1)
    for _ in range(3):
        for weight in module.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            # Nothing is selected of the first rank's last rows.
            weight.grad[5:] *= rank
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    engine.close()
    return [weight.detach() for weight in module.parameters()]


def _wants_adam(method: Method) -> bool:
    averages = any(isinstance(sync, DeltaSync) and sync.moments for sync in method.syncs)
    return averages or any(parts_in(method, AdamMoments))  # type: ignore[type-abstract]


@pytest.mark.few(11)
@pytest.mark.parametrize("method", recipes(), ids=repr)
@pytest.mark.filterwarnings("ignore:.*")
def test_the_default_dtype_changes_no_bit(method: Method) -> None:
    dtypes = torch.float32, torch.float64, torch.bfloat16
    for usual, *others in run_ranks(2, lambda rank: [_trained(rank, method, dtype) for dtype in dtypes]):
        for other in others:
            assert all(torch.equal(*pair) for pair in zip(usual, other))
