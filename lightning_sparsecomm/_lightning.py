"""Which Lightning packages are here, and which of them the user works with.

`lightning` and `pytorch_lightning` are two class hierarchies, and each accepts its own classes only. The first import
of this module remembers which of them the user had imported by then, since registration below imports all of them.
"""

import importlib
import sys
from importlib.util import find_spec

TRAINERS = tuple(
    name for name in ("pytorch_lightning", "lightning.pytorch") if find_spec(name.split(".")[0]) is not None
)
FABRICS = tuple(name for name in ("lightning_fabric", "lightning.fabric") if find_spec(name.split(".")[0]) is not None)

_IMPORTED_BEFORE_US = tuple(name for name in TRAINERS if name in sys.modules)


def trainer_strategy() -> type:
    """SparseCommStrategy of the package whose Trainer the user works with.

    Raises:
        ImportError: That cannot be told: both were imported before this package, or none, where both are installed.
    """
    candidates = _IMPORTED_BEFORE_US or TRAINERS
    if len(candidates) != 1:
        when = "both were imported before it" if _IMPORTED_BEFORE_US else "none of them was imported before it"
        modules, of_fabric = (
            " or ".join(f"lightning_sparsecomm.strategies.{name}" for name in names) for names in (TRAINERS, FABRICS)
        )
        raise ImportError(
            "lightning_sparsecomm.SparseCommStrategy is the strategy of the Lightning package that you import first,"
            f" but {when}: {' and '.join(TRAINERS)} are both installed and do not mix."
            f" Import your Lightning package first, or take SparseCommStrategy from {modules}"
            f" (for Fabric, from {of_fabric})."
        )
    strategy: type = importlib.import_module(f"lightning_sparsecomm.strategies.{candidates[0]}").SparseCommStrategy
    return strategy


def register_strategies() -> None:
    """Enters the strategies' names in the registry of every Trainer and Fabric that is installed."""
    from lightning_sparsecomm.strategies.mixin import register

    for name in TRAINERS:
        registry = importlib.import_module(f"{name}.strategies").StrategyRegistry
        register(registry, importlib.import_module(f"lightning_sparsecomm.strategies.{name}").SparseCommStrategy)
    for name in FABRICS:
        registry = importlib.import_module(f"{name}.strategies").STRATEGY_REGISTRY
        register(registry, importlib.import_module(f"lightning_sparsecomm.strategies.{name}").SparseCommStrategy)


def callback_bases() -> tuple[type, ...]:
    """The Callback class of every Lightning that is installed, so that one class serves all of them."""
    return tuple(importlib.import_module(name).Callback for name in TRAINERS)
