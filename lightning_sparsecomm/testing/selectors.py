"""The laws of selectors."""

from collections.abc import Iterable

import torch

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import Selector
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector
from lightning_sparsecomm.testing.decoding import check_positions, inputs
from lightning_sparsecomm.testing.laws import check_kind, law
from lightning_sparsecomm.testing.samples import LAYOUTS


def check_selector(selector: Selector, layouts: Iterable[Layout] = LAYOUTS) -> None:
    """Checks the laws of a selector.

    Positions are strictly increasing, in range, and at most `count(context)`; that number is equal on all ranks. The
    same arguments give the same positions, and the vector is not changed. Hints change no result.

    >>> check_selector(TopK(density=0.1))

    Args:
        selector: The selector.
        layouts: Layouts to select from.

    Raises:
        AssertionError: A law is violated.
        TypeError: `selector` is no selector.
    """
    check_kind("selector", selector, Selector)
    name = type(selector).__name__
    for layout in layouts:
        for step in (0, 1, 1000):
            contexts = [Round(layout, step, step / 100, 7, rank, 3) for rank in range(3)]
            counts = [selector.count(context) for context in contexts]
            law(all(type(each) is int for each in counts), f"{name}.count must be a whole number; got {counts[0]!r}")
            law(len(set(counts)) == 1, f"{name}.count must be equal on all ranks; got {counts} in {layout}")
            for kind, x in inputs(layout):
                where = f"for {kind}, in step {step} of {layout}"
                before = x.clone()
                indices = selector.select(x, contexts[1])
                check_positions(indices, layout.size, f"{name}.select", where)
                law(
                    indices.numel() <= counts[1],
                    f"{name}.select returned {indices.numel()} positions, more than count, {counts[1]}, {where}",
                )
                law(torch.equal(x, before), f"{name}.select changed the vector {where}")
                again = selector.select(x, contexts[1])
                law(torch.equal(indices, again), f"{name}.select is not pure: two calls differ {where}")
                if isinstance(selector, HintedSelector):
                    hints = {
                        (start, stop, k): x[start:stop].nonzero().view(-1) + start
                        for start, stop, k in selector.wanted(contexts[1])
                    }
                    hinted = selector.select_hinted(x, contexts[1], hints)
                    law(torch.equal(indices, hinted), f"{name}.select_hinted: hints changed the result {where}")
