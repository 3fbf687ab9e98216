"""Vectors and densities for every selector: ties, zeros of both signs, the smallest and the largest numbers."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs.selectors.candidates import Hints, Wanted

DENORMAL = 1e-45
# Few distinct magnitudes, so ties are common; both zeros; the smallest and the largest numbers.
crowded = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, DENORMAL, -DENORMAL, 2 * DENORMAL, 3e38, -3e38])
spread = st.floats(width=32, allow_nan=False, allow_infinity=False)
densities = st.sampled_from([1e-9, 0.01, 0.1, 0.25, 0.5, 0.99, 1.0]) | st.floats(1e-6, 1.0)


@st.composite
def vectors(draw: st.DrawFn) -> tuple[torch.Tensor, Layout]:
    """A vector of 0 to 60 elements, cut into tensors, some of them empty."""
    elements = draw(st.sampled_from([crowded, spread, st.just(1.0), st.just(0.0), st.sampled_from([0.0] * 9 + [1.0])]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sizes = draw(st.lists(st.integers(0, 20), max_size=3))
    x = torch.tensor(draw(st.lists(elements, min_size=sum(sizes), max_size=sum(sizes))), dtype=dtype)
    return x, Layout((str(i), (size,)) for i, size in enumerate(sizes))


def hints_for(x: torch.Tensor, wanted: Sequence[Wanted], surplus: int) -> Hints:
    """For each stretch, all non-zero elements that reach the k-th largest magnitude, or the `surplus`-th after it.

    None at all for some values of `surplus`.
    """
    hints: dict[tuple[int, int, int], torch.Tensor] = {}
    for start, stop, k in wanted if surplus % 3 else ():
        magnitudes = x[start:stop].abs()
        threshold = magnitudes.sort(descending=True).values[min(k + surplus, stop - start) - 1]
        reached = (magnitudes >= threshold) & (magnitudes > 0)
        hints[start, stop, k] = reached.nonzero().view(-1) + start
    return hints
