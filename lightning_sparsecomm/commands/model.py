"""A model that a command's user names, as `package.module:Class`."""

import importlib
import inspect
import os
import sys
import warnings

from torch import nn
from torch.optim import Optimizer

_RULE = "--model must be file:Class or package.module:Class, what makes a model without arguments"


def model_named(text: str) -> nn.Module:
    """Imports and makes the model; files in the current folder are found.

    Args:
        text: The module, a colon, and a class or function in it.

    Raises:
        ValueError: It has no colon, cannot be imported, needs arguments, or makes no module that trains.
    """
    place, _, name = text.partition(":")
    place = place.removeprefix("./").removesuffix(".py")
    if not place or not name:
        raise ValueError(f"{_RULE}; got {text!r}. Write --model train:Model for class Model in train.py.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(place)
    except (ModuleNotFoundError, TypeError) as error:
        # What the file itself imports may be missing: that is the user's own error, with its traceback.
        if isinstance(error, ModuleNotFoundError) and not f"{place}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{_RULE}; got {text!r}: {error}. Start it in the folder that has {place.partition('.')[0]}."
        ) from error
    if not hasattr(module, name):
        raise ValueError(f"{_RULE}; got {text!r}, but {place} has no {name}.")
    maker = getattr(module, name)
    if not callable(maker) or isinstance(maker, nn.Module):
        is_one = "is a model already" if isinstance(maker, nn.Module) else f"is of type {type(maker).__name__}"
        raise ValueError(f"{_RULE}; got {text!r}, which {is_one}. Write a function that makes it, and name that.")
    try:
        inspect.signature(maker).bind()
    except ValueError:
        # It is built in, and does not tell its arguments.
        pass
    except TypeError as error:
        raise ValueError(
            f"{_RULE}; got {text!r}: {error}. Write a function without arguments that makes it, and name that."
        ) from error
    model = maker()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{_RULE}, a torch.nn.Module; got {text!r}, which makes {type(model).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{_RULE} that trains; got {text!r}, without a parameter that requires a gradient.")
    return model


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """What a LightningModule's `configure_optimizers` makes; nothing, and a warning, where it fails."""
    configure = getattr(model, "configure_optimizers", None)
    if configure is None:
        return []
    try:
        return _optimizers_in(configure())
    except Exception as error:  # It is the user's, and may need a Trainer in any way.
        warnings.warn(
            f"the layout is without optimizers, since {type(model).__name__}.configure_optimizers() failed outside a"
            f" Trainer: {type(error).__name__}: {error}. The loggers of a training get them as sparsecomm_model.",
            stacklevel=2,
        )
        return []


def _optimizers_in(made: object) -> list[Optimizer]:
    if isinstance(made, dict):
        return _optimizers_in(made.get("optimizer"))
    if isinstance(made, (list, tuple)):
        return [optimizer for each in made for optimizer in _optimizers_in(each)]
    return [made] if isinstance(made, Optimizer) else []
