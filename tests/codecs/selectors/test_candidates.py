"""Candidates found by a sampled threshold, or noted while a residual is updated, lead to exactly the k largest."""

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm import kernels
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import TopK
from lightning_sparsecomm.codecs.selectors.candidates import (
    Hints,
    Wanted,
    candidate_room,
    candidates_of,
    enough,
    sample_stride,
    threshold_for,
)
from lightning_sparsecomm.kernels import Reference, Update, kernels_for
from lightning_sparsecomm.kernels.updates.cpu import Cpu

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
        # The sample sees only large elements, or none of them.
        x[int(torch.randint(2, (1,), generator=generator)) :: sample_stride(size)] *= 1000
    return x


@pytest.fixture(params=[Cpu(), Reference()], ids=lambda backend: type(backend).__name__)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reference:
    def chosen(device_type: str) -> kernels._Kernels:
        return kernels._Kernels(request.param)

    monkeypatch.setattr(kernels, "_kernels", chosen)
    return request.param


def noted(x: Tensor, stretch: Wanted) -> Hints:
    """The hints for one stretch that covers `x`, noted while `x` is added to an empty residual."""
    update = Update(torch.zeros_like(x), x)
    backend = kernels_for(x.device, x.dtype)
    threshold = threshold_for(backend.probe(update, sample_stride(x.numel())), x.numel(), stretch.k)
    found = backend.update_(update, threshold, candidate_room(stretch.k))
    assert torch.equal(update.residual, x)
    if threshold is None or found is None or not enough(found, stretch.k, threshold):
        return {}
    return {stretch: found}


@pytest.mark.few(1)
def test_exactly_the_largest_of_1000_random_tensors(backend: Reference) -> None:
    generator = torch.Generator().manual_seed(0)
    hinted = 0
    for number in range(1000):
        kind = KINDS[number % len(KINDS)]
        size = int(torch.randint(1, 30_000, (1,), generator=generator))
        density = 10 ** (-4 * float(torch.rand(1, generator=generator)))
        x = draw(kind, size, generator)
        selector, context = TopK(density), Round(Layout([("weight", (size,))]), number)
        (stretch,) = selector.wanted(context)
        hints = noted(x, stretch)
        hinted += len(hints)
        chosen = selector.select_hinted(x, context, hints)

        k = min(selector.count(context), int(x.count_nonzero()))
        assert chosen.numel() == k, (kind, size, density)
        assert bool((chosen.diff() > 0).all())
        expected = torch.topk(x.abs(), k).values.sort().values
        assert torch.equal(x[chosen].abs().sort().values, expected), (kind, size, density)
        # Hints change nothing but the time.
        assert torch.equal(chosen, selector.select(x, context))
        # The same threshold is found without an update.
        found = candidates_of(x, stretch.k)
        assert torch.equal(hints[stretch], found) if found is not None else not hints
    # Most selections start from hints: they are worth their cost.
    assert hinted > 600


@pytest.mark.parametrize("kind", ["constant", "few_values"])
def test_ties_favour_no_position(backend: Reference, kind: str) -> None:
    size, steps = 20_000, 200
    layout, selector = Layout([("weight", (size,))]), TopK(0.001)
    generator = torch.Generator().manual_seed(0)
    halves = torch.zeros(2)
    for step in range(steps):
        x = draw(kind, size, generator).clamp(-2, 2)
        context = Round(layout, step)
        (stretch,) = selector.wanted(context)
        chosen = selector.select_hinted(x, context, noted(x, stretch))
        halves += torch.stack([(chosen < size // 2).sum(), (chosen >= size // 2).sum()])
    assert halves.sum() == steps * 20
    # Four standard deviations of a fair coin.
    assert abs(float(halves[0] / halves.sum()) - 0.5) < 4 * 0.5 / (steps * 20) ** 0.5


def test_hints_are_used(backend: Reference) -> None:
    x = torch.arange(1.0, 101.0)
    selector, context = TopK(0.02), Round(Layout([("weight", (100,))]))
    (stretch,) = selector.wanted(context)
    # Wrong on purpose: the largest elements are not among them.
    assert selector.select_hinted(x, context, {stretch: torch.tensor([3, 7, 9])}).tolist() == [7, 9]
    # Hints for another stretch, or another k, are not for this one.
    for other in (stretch._replace(k=3), stretch._replace(stop=50)):
        assert selector.select_hinted(x, context, {other: torch.tensor([3, 7, 9])}).tolist() == [98, 99]
