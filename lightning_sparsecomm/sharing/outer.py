"""The outer optimizer, which moves the weights that all ranks share."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

OuterOptimizer = Callable[[list[Parameter]], Optimizer]
"""Makes an optimizer for the anchor: a class with its options bound, such as `partial(torch.optim.SGD, lr=0.7)`."""


def check_outer(outer: OuterOptimizer | None) -> None:
    """Raises `TypeError` for anything but None and what can make an optimizer, such as an optimizer itself."""
    if isinstance(outer, Optimizer) or not (outer is None or callable(outer)):
        raise TypeError(
            "outer must make an optimizer from a list of parameters: those that it moves (the anchor) do not exist yet;"
            f" got {outer!r}. Use functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
        )


def make_outer(make: OuterOptimizer, anchors: list[Parameter]) -> Optimizer:
    """The outer optimizer of exactly these parameters.

    Raises:
        ValueError: `make` raises, or makes an optimizer of other parameters.
        TypeError: It makes no optimizer, or one that evaluates several gradients.
    """
    try:
        outer = make(anchors)
    except Exception as error:
        raise ValueError(
            f"outer must make an optimizer of the {len(anchors)} parameters that it is given; {make!r} raised"
            f" {type(error).__name__}: {error}. Use functools.partial(torch.optim.SGD, lr=0.7), for example."
        ) from error
    if not isinstance(outer, Optimizer):
        raise TypeError(
            f"outer must make a torch optimizer; got {outer!r} from {make!r}. Use functools.partial(torch.optim.SGD,"
            " lr=0.7), for example."
        )
    if isinstance(outer, LBFGS):
        raise TypeError("outer must step by one gradient; got LBFGS, which evaluates several. Use torch.optim.SGD.")
    held = {id(parameter) for group in outer.param_groups for parameter in group["params"]}
    missing = sum(id(anchor) not in held for anchor in anchors)
    if missing or len(held) != len(anchors):
        raise ValueError(
            f"outer must make an optimizer of the parameters that it is given; {type(outer).__name__} lacks"
            f" {missing} of {len(anchors)} and holds {len(held) + missing - len(anchors)} others. Pass its first"
            " argument on, as functools.partial(torch.optim.SGD, lr=0.7) does."
        )
    return outer


def load_outer(outer: Optimizer, states: Mapping[Parameter, Mapping[str, Any]]) -> None:
    """Gives an outer optimizer copies of the state of anchors."""
    for anchor, state in states.items():
        outer.state[anchor] = {
            key: value.to(anchor.device, copy=True) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
