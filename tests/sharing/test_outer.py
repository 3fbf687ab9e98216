"""An outer optimizer is made of exactly the anchors, or refused with the reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from lightning_sparsecomm.sharing.outer import check_outer, make_outer


def anchors() -> list[Parameter]:
    return [Parameter(torch.zeros(2)), Parameter(torch.zeros(3))]


def test_it_holds_the_anchors() -> None:
    given = anchors()
    outer = make_outer(partial(SGD, lr=0.7, momentum=0.9), given)
    assert isinstance(outer, SGD)
    assert outer.param_groups[0]["params"] == given
    assert outer.defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    "outer",
    [SGD([Parameter(torch.zeros(1))], lr=0.1), 0.7, "SGD", {"lr": 0.7}],
    ids=["optimizer", "number", "name", "dict"],
)
def test_what_cannot_make_an_optimizer_is_refused(outer: Any) -> None:
    check_outer(None)
    check_outer(partial(SGD, lr=0.7))
    with pytest.raises(TypeError, match=r"(?s)outer must make an optimizer.*functools.partial\(torch.optim.SGD"):
        check_outer(outer)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (partial(SGD, lr=-1), ValueError, "outer must make an optimizer of the 2 parameters.*raised ValueError"),
        (lambda: None, ValueError, "outer must make an optimizer of the 2 parameters.*raised TypeError"),
        (lambda parameters: None, TypeError, "outer must make a torch optimizer; got None"),
        (torch.optim.LBFGS, TypeError, "got LBFGS, which evaluates several"),
        (lambda parameters: SGD(parameters[:1], lr=1), ValueError, "SGD lacks 1 of 2 and holds 0 others"),
        (
            lambda parameters: SGD([*parameters, Parameter(torch.zeros(1))], lr=1),
            ValueError,
            "lacks 0 of 2 and holds 1",
        ),
        (lambda parameters: SGD(anchors(), lr=1), ValueError, "SGD lacks 2 of 2 and holds 2 others"),
    ],
)
def test_an_optimizer_of_anything_else_is_refused(make: Callable[..., Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_outer(make, anchors())
