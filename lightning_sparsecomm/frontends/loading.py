"""`weights_only`, which Lightning passes on since 2.6: handed to what takes it, refused where nothing does."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def takes_weights_only(load: Callable[..., object]) -> bool:
    """Whether a function that loads a checkpoint has a parameter `weights_only`, or takes any."""
    parameters = inspect.signature(load).parameters
    return "weights_only" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def loading(load: Callable[..., T], weights_only: bool | None) -> Callable[..., T]:
    """`load` with `weights_only` filled in where it has that parameter, as in Lightning from 2.6.

    Before, Lightning's own functions have none, and unpickle any object.

    Raises:
        ValueError: `weights_only` is True, and `load` does not take it.
    """
    if weights_only is None:
        return load
    if takes_weights_only(load):
        return partial(load, weights_only=weights_only)
    if weights_only:
        raise ValueError(
            f"weights_only must be None or False here; got {weights_only!r}, which"
            f" {getattr(load, '__qualname__', load)} does not take. Lightning loads so from version 2.6 on, and a"
            " checkpoint plugin needs that parameter in its load_checkpoint."
        )
    return load
