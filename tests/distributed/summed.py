"""Recipes whose ranks add up pieces of tensors, as the default's do, or regions of the vector, as with many ranks."""

import copy
from collections.abc import Callable
from typing import Any

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.exchange import Sparse
from lightning_sparsecomm.methods import dgc, local_adam
from lightning_sparsecomm.sharing import Method


def summed(recipe: Callable[..., Method], density: float, **options: Any) -> Method:
    """`dgc` or `local_adam`. Pieces are added up by three ranks and more; two exchange whole payloads."""
    values = {dgc: "three_bit", local_adam: "few_bits"}[recipe]
    return recipe(
        density, scope="balanced", values=values, positions="short", exchange="all_reduce", rest_bits=8, **options
    )


def in_regions(method: Method) -> Method:
    """A method that adds up in regions, however few ranks there are."""
    method = copy.deepcopy(method)
    found = list(parts_in(method, Sparse))
    assert found
    for exchange in found:
        exchange.ways = ("regions",)
    return method
