"""Which Lightning packages are installed: `lightning` and `pytorch_lightning` are separate, and do not mix."""

import importlib
from importlib.util import find_spec

TRAINERS = tuple(
    name for name in ("pytorch_lightning", "lightning.pytorch") if find_spec(name.split(".")[0]) is not None
)
FABRICS = tuple(name for name in ("lightning_fabric", "lightning.fabric") if find_spec(name.split(".")[0]) is not None)


def callback_bases() -> tuple[type, ...]:
    """The Callback class of every Lightning that is installed, so that one class serves all of them."""
    return tuple(importlib.import_module(name).Callback for name in TRAINERS)
