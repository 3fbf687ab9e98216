"""Weights that hooks set inside an optimizer's step, right before or after its update, stay what they were set to."""

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import diloco, sbc, sparse_loco
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.run.training import backward

EVERY, STEPS = 4, 12


@pytest.mark.filterwarnings("ignore:other code than the optimizer")
@pytest.mark.parametrize("set_at", [0, 5])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "method",
    [sbc(0.1, every=EVERY), diloco(every=EVERY), diloco(every=EVERY, delay=1), sparse_loco(every=EVERY)],
    ids=["sbc", "diloco", "diloco, delayed", "sparse_loco"],
)
def test_it_moves_the_anchor(wire: Wire, method: Method, moment: str, set_at: int) -> None:
    torch.manual_seed(0)
    engine, module = Engine(method, wire), nn.Linear(2, 64)
    engine.registry.add_module(module)
    # So small a rate that training changes little.
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    engine.register(optimizer)

    def set_now(at: str) -> None:
        if at == moment and engine.wire.step == set_at:
            with torch.no_grad():
                module.weight.fill_(3.0)

    optimizer.register_step_post_hook(lambda *_: set_now("after"))
    for _ in range(STEPS):
        optimizer.zero_grad()
        shared = engine.closure(optimizer, lambda: backward(engine, module))

        def closure() -> None:
            shared()  # noqa: B023
            # Where Lightning calls on_before_optimizer_step: gradients are shared by then.
            set_now("before")

        with engine.stepping(optimizer):
            optimizer.step(closure)
    engine.settle()
    engine.close()
    torch.testing.assert_close(module.weight, torch.full((64, 2), 3.0), atol=0.01, rtol=0)
