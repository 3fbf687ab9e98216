"""Our strategies in Lightning's registries, and the one that the top level of the package offers."""

import importlib
import sys
import traceback
from typing import TYPE_CHECKING

from lightning_sparsecomm import methods
from lightning_sparsecomm.frontends.packages import FABRICS, TRAINERS

if TYPE_CHECKING:
    from lightning_fabric.strategies.registry import _StrategyRegistry

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
"""Suffixes of strategy names, and how each starts its processes: those of Lightning's `ddp`."""


PLAIN, ELASTIC, RAY = "SparseCommStrategy", "ElasticSparseCommStrategy", "RaySparseCommStrategy"
"""The classes of strategies; a Fabric has only the first."""


def strategy_in(module: str, kind: str = PLAIN) -> type:
    """The strategy of a kind in one of our modules."""
    strategy: type = getattr(importlib.import_module(f"lightning_sparsecomm.strategies.{module}"), kind)
    return strategy


def bindings(kind: str = PLAIN) -> "list[tuple[_StrategyRegistry, type]]":
    """The registry of every Trainer and Fabric that is installed, with our strategy of a kind for it."""
    frontends = ((TRAINERS, "StrategyRegistry"), (FABRICS, "STRATEGY_REGISTRY"))
    return [
        (getattr(importlib.import_module(f"{name}.strategies"), registry), strategy_in(name, kind))
        for names, registry in frontends[: 1 if kind == ELASTIC else 2]
        for name in names
    ]


def trainer_strategy(kind: str = PLAIN) -> type:
    """A strategy for the top level: that of the one package in use, or one that any Trainer or Fabric accepts.

    LightningCLI needs a class of its own package. Which package that is, its module `cli` tells, which we never import;
    if both are imported, the one that calls us. On Ray's workers, Ray has decided it.
    """
    if kind == RAY:
        return strategy_in("ray", kind)
    imported = [name for name in TRAINERS if f"{name}.cli" in sys.modules]
    calling = [name for name in TRAINERS if f"{name}.cli" in _callers()] if len(imported) > 1 else imported
    candidates = TRAINERS if len(TRAINERS) == 1 else calling
    return strategy_in(candidates[0] if len(candidates) == 1 else "either", kind)


def _callers() -> set[str]:
    """The names of the modules whose functions are running."""
    return {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)}


def register_strategies() -> None:
    """Enters `sparsecomm_elastic`; and `sparsecomm`, and each method, with Lightning's ways to start processes."""
    recipes = {f"sparsecomm_{name}": recipe for name, recipe in (methods.RECIPES | {"auto": methods.auto}).items()}
    for registry, strategy in bindings():
        for name, recipe in {"sparsecomm": methods.default, **recipes}.items():
            for suffix, start_method in START_METHODS.items():
                registry.register(
                    name + suffix,
                    strategy,
                    description=f"{_summary(recipe)} Processes start by {start_method}.",
                    override=True,
                    method=None if recipe is methods.default else recipe(),
                    start_method=start_method,
                )
    for registry, strategy in bindings(ELASTIC):
        # Each replica is a process that the user starts.
        registry.register("sparsecomm_elastic", strategy, description=_summary(strategy), override=True)


def _summary(recipe: object) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((recipe.__doc__ or "").partition("\n\n")[0].split())
