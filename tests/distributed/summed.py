"""Recipes as the default has them: ranks add up pieces of tensors, and biases and norms go in 8 bits."""

from collections.abc import Callable
from typing import Any

from lightning_sparsecomm.methods import dgc, local_adam
from lightning_sparsecomm.sharing import Method


def summed(recipe: Callable[..., Method], density: float, **options: Any) -> Method:
    """`dgc` or `local_adam`. Pieces are added up by three ranks and more; two exchange whole payloads."""
    values = {dgc: "three_bit", local_adam: "few_bits"}[recipe]
    return recipe(
        density, scope="balanced", values=values, positions="short", exchange="all_reduce", rest_bits=8, **options
    )
