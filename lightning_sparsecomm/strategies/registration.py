"""Our strategies in Lightning's registries, and the one that the top level of the package offers."""

import importlib
import sys
from collections.abc import Callable
from typing import Protocol

from lightning_sparsecomm import methods
from lightning_sparsecomm.frontends.packages import FABRICS, TRAINERS
from lightning_sparsecomm.sharing.method import Method

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork"}
"""Suffixes of strategy names, and how each starts its processes, like Lightning's `ddp`, `ddp_spawn`, `ddp_fork`."""


class Registry(Protocol):
    """A strategy registry of Lightning, as far as we use it."""

    def register(
        self, name: str, strategy: type, description: str, override: bool = ..., **init_params: object
    ) -> Callable[..., object]: ...
    def remove(self, name: str) -> None: ...


def bindings() -> list[tuple[Registry, type]]:
    """The registry of every Trainer and Fabric that is installed, with our strategy for it."""
    found = []
    for names, registry in ((TRAINERS, "StrategyRegistry"), (FABRICS, "STRATEGY_REGISTRY")):
        for name in names:
            ours = importlib.import_module(f"lightning_sparsecomm.strategies.{name}").SparseCommStrategy
            found.append((getattr(importlib.import_module(f"{name}.strategies"), registry), ours))
    return found


def trainer_strategy() -> type:
    """The top-level SparseCommStrategy: that of the one package in use, or one that any Trainer or Fabric accepts.

    LightningCLI needs a class of its own package. Which package that is, its module `cli` tells, which we never import.
    """
    running = [name for name in TRAINERS if f"{name}.cli" in sys.modules]
    candidates = TRAINERS if len(TRAINERS) == 1 else running
    if len(candidates) == 1:
        ours: type = importlib.import_module(f"lightning_sparsecomm.strategies.{candidates[0]}").SparseCommStrategy
        return ours
    return importlib.import_module("lightning_sparsecomm.strategies.either").SparseCommStrategy  # type: ignore[no-any-return]


def register_strategies() -> None:
    """Enters `sparsecomm`, and a name for each method, with Lightning's three ways to start processes."""
    names: dict[str, Method | None] = {"sparsecomm": None}
    names.update({f"sparsecomm_{name}": recipe() for name, recipe in methods.RECIPES.items()})
    for registry, strategy in bindings():
        for name, method in names.items():
            for suffix, start_method in START_METHODS.items():
                registry.register(
                    name + suffix,
                    strategy,
                    description=f"{name} with start_method {start_method!r}",
                    override=True,
                    method=method,
                    start_method=start_method,
                )
