"""A small module with an engine in one process, and an exchange that counts its rounds."""

import torch
from torch import Tensor, nn

from lightning_sparsecomm.basis.layout import Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.exchange import DenseAllReduce, Exchanged
from lightning_sparsecomm.run.engine import Engine


class Halving(DenseAllReduce):
    """Shares half of what it is given, so that a gradient shared twice is seen; notes names and steps."""

    rounds: list[tuple[list[str], int]] = []  # noqa: RUF012

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        self.rounds.append(([segment.name for segment in context.layout.segments], context.step))
        exchanged = super().exchange(x, context, wire)
        return exchanged._replace(shared=exchanged.shared / 2, sent=exchanged.sent / 2)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))


def backward(engine: Engine, module: nn.Module) -> None:
    with engine.guards.backward():
        module(torch.ones(1, 2)).sum().backward()


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters()]


def ready(engine: Engine) -> tuple[nn.Sequential, torch.optim.SGD, list[Tensor]]:
    """A module whose gradients are computed but not yet shared; the optimizer; the gradients once shared."""
    module = chain()
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.register(optimizer)
    backward(engine, module)
    return module, optimizer, [gradient / 2 for gradient in gradients(module)]


def step(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step, as a front end makes it."""
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
