"""Which Lightning packages are installed: `lightning` and `pytorch_lightning` are separate, and do not mix."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

TRAINERS = tuple(
    name for name in ("pytorch_lightning", "lightning.pytorch") if find_spec(name.split(".")[0]) is not None
)
FABRICS = tuple(name for name in ("lightning_fabric", "lightning.fabric") if find_spec(name.split(".")[0]) is not None)

if TYPE_CHECKING:
    import pytorch_lightning
    from lightning.pytorch import Callback as OtherCallback

    class Callback(pytorch_lightning.Callback, OtherCallback):  # type: ignore[misc]
        """For type checkers: a callback of every Lightning package."""
else:
    # Of every Lightning that is installed. All have the same hooks, so it does not matter which base provides one.
    Callback = type("Callback", tuple(importlib.import_module(name).Callback for name in TRAINERS), {})
