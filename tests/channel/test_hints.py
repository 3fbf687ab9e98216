"""Hints that memories note while they update the residual: selection with them finds exactly the k largest."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm import kernels
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.channel import (
    Contribution,
    ErrorFeedback,
    Memory,
    MomentumCorrection,
    MomentumRule,
    StepSettings,
)
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.codecs.selectors.candidates import sample_stride
from lightning_sparsecomm.kernels.updates.cpu import Cpu
from lightning_sparsecomm.kernels.updates.reference import Reference

KINDS = ("normal", "heavy_tailed", "sparse", "constant", "sorted", "zeros", "few_values", "one_large", "strided")


def draw(kind: str, size: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(size, generator=generator)
    if kind == "heavy_tailed":
        return x**5
    if kind == "sparse":
        return x * (torch.rand(size, generator=generator) < 0.01)
    if kind == "constant":
        return torch.full((size,), -0.25)
    if kind == "sorted":
        return x.sort().values
    if kind == "zeros":
        return torch.zeros(size)
    if kind == "few_values":
        return x.round()
    if kind == "one_large":
        return torch.zeros(size).index_fill_(0, torch.tensor([size // 2]), 3.0)
    if kind == "strided":
        # The sample sees nothing but the large ones, or none of them.
        x[int(torch.randint(2, (1,), generator=generator)) :: sample_stride(size)] *= 1000
    return x


@pytest.fixture(params=[Cpu(), Reference()], ids=lambda backend: type(backend).__name__)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reference:
    def chosen(device_type: str) -> kernels._Kernels:
        return kernels._Kernels(request.param)

    monkeypatch.setattr(kernels, "_kernels", chosen)
    return request.param


def prepared(gradient: Tensor, layout: Layout, selector: TopK, context: Round, momentum: bool) -> Contribution:
    memories: list[Memory] = [MomentumCorrection(), ErrorFeedback()] if momentum else [ErrorFeedback()]
    settings = StepSettings([MomentumRule(0.9)])
    contribution = Contribution(layout.views(gradient), settings, wanted=selector.wanted(context))
    for memory in memories:
        memory.bind(layout, gradient.dtype, gradient.device)
        contribution = memory.prepare(contribution, context)
    return contribution


@pytest.mark.few(1)
def test_exactly_the_largest_of_1000_random_tensors(backend: Reference) -> None:
    generator = torch.Generator().manual_seed(0)
    noted = 0
    for number in range(1000):
        kind = KINDS[number % len(KINDS)]
        size = int(torch.randint(1, 30_000, (1,), generator=generator))
        density = 10 ** (-4 * float(torch.rand(1, generator=generator)))
        x = draw(kind, size, generator)
        selector, layout = TopK(density), Layout([("weight", (size,))])
        context = Round(layout, number)
        contribution = prepared(x, layout, selector, context, momentum=number % 2 == 0)
        assert contribution.flat is not None
        # A tensor's first step: residual and velocity are the gradient.
        assert torch.equal(contribution.flat, x)
        noted += bool(contribution.hints)
        chosen = selector.select_hinted(contribution.flat, context, contribution.hints)

        k = min(selector.count(context), int(x.count_nonzero()))
        assert chosen.numel() == k, (kind, size, density)
        assert bool((chosen.diff() > 0).all())
        expected = torch.topk(x.abs(), k).values.sort().values
        assert torch.equal(x[chosen].abs().sort().values, expected), (kind, size, density)
        # Hints change nothing but the time: the same elements are chosen without.
        assert torch.equal(chosen, selector.select(x, context))
    # They are worth noting: most selections start from them.
    assert noted > 600


@pytest.mark.parametrize("kind", ["constant", "few_values"])
def test_ties_favour_no_position(backend: Reference, kind: str) -> None:
    size, steps = 20_000, 200
    layout, selector = Layout([("weight", (size,))]), TopK(0.001)
    generator = torch.Generator().manual_seed(0)
    halves = torch.zeros(2)
    for step in range(steps):
        x = draw(kind, size, generator).clamp(-2, 2)
        context = Round(layout, step)
        contribution = prepared(x, layout, selector, context, momentum=False)
        assert contribution.flat is not None
        chosen = selector.select_hinted(contribution.flat, context, contribution.hints)
        halves += torch.stack([(chosen < size // 2).sum(), (chosen >= size // 2).sum()])
    assert halves.sum() == steps * 20
    # Four standard deviations of a fair coin.
    assert abs(float(halves[0] / halves.sum()) - 0.5) < 4 * 0.5 / (steps * 20) ** 0.5


def test_segments_without_a_gradient_have_no_hints(backend: Reference) -> None:
    layout, selector = Layout([("a", (5000,)), ("b", (5000,)), ("c", (3, 2))]), TopK(0.01)
    memory = ErrorFeedback()
    memory.bind(layout, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(layout.size, generator=generator)
        parts: list[Tensor | None] = list(layout.views(x))
        if step % 2:
            parts[0] = None
        context = Round(layout, step)
        contribution = memory.prepare(Contribution(parts, wanted=selector.wanted(context)), context)
        vector = contribution.vector(layout, torch.float32, torch.device("cpu"))
        assert vector.flat is not None
        chosen = selector.select_hinted(vector.flat, context, vector.hints)
        assert chosen.numel() == 100
        assert bool((chosen >= 5000).all()) or step % 2 == 0
        assert torch.equal(chosen, selector.select(vector.flat, context))
