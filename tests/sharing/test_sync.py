"""Which parameters belong to a sync: by patterns, by dimensions, and by the kind of their gradients."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, Momentum
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Share, Sync
from lightning_sparsecomm.sharing.gradients import NamedParameters, note_sparse_gradient
from lightning_sparsecomm.sharing.sync import matches


class Plain(Sync):
    """A sync with the defaults of its base."""

    def start(self, optimizer: torch.optim.Optimizer, parameters: NamedParameters, wire: Wire) -> Share:
        raise NotImplementedError


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "claimed"),
    [
        ({}, ["body.weight", "body.bias", "head.weight"]),
        ({"parameters": ["body.*"]}, ["body.weight", "body.bias"]),
        ({"parameters": ["*.weight", "*.bias"], "exclude": ["head.*"]}, ["body.weight", "body.bias"]),
        ({"min_dimensions": 2}, ["body.weight", "head.weight"]),
        ({"rest": True}, []),
        ({"parameters": ["Body.*"]}, []),
        ({"parameters": ["weight"]}, []),
    ],
)
def test_patterns_and_dimensions(options: dict[str, Any], claimed: list[str]) -> None:
    sync = Plain(**options)
    shapes = {"body.weight": (2, 3), "body.bias": (2,), "head.weight": (1, 2)}
    assert [name for name, shape in shapes.items() if sync.claims(name, parameter(*shape))] == claimed
    # The rest may be anything that no other sync claims.
    assert all(sync.may_take(name, parameter(*shape)) for name, shape in shapes.items())


def test_limits_add_up_and_leave_the_original_alone() -> None:
    sync = Plain(exclude=["*.bias"])
    limited = sync.limited(inside=["body.*"]).limited(outside=["body.0.*"])
    claims = {name: limited.claims(name, parameter(2)) for name in ("body.1.w", "body.0.w", "head.w", "body.1.bias")}
    assert claims == {"body.1.w": True, "body.0.w": False, "head.w": False, "body.1.bias": False}
    assert not limited.may_take("body.0.w", parameter(2))
    assert sync.claims("head.w", parameter(2))
    assert (sync.inside, sync.outside) == ((), ())


@pytest.mark.parametrize(
    ("takes_sparse", "of_sparse", "of_dense"), [(False, False, True), (True, True, False), (None, True, True)]
)
def test_sparse_gradients_go_where_they_are_taken(takes_sparse: bool | None, of_sparse: bool, of_dense: bool) -> None:
    sync, sparse, dense = Plain(), parameter(4, 2), parameter(4, 2)
    sync.takes_sparse = takes_sparse
    note_sparse_gradient(sparse)
    assert sync.claims("table", sparse) is sync.may_take("table", sparse) is of_sparse
    assert sync.claims("table", dense) is of_dense


def test_a_repr_names_what_differs_from_the_defaults() -> None:
    sync = GradientSync(Channel(DenseAllReduce()), ["a.*"], ["*.b"], min_dimensions=2, rest=True)
    text = repr(sync.limited(inside=["x"], outside=["y"]))
    for part in (
        "inside=['x']",
        "outside=['y']",
        "parameters=['a.*']",
        "exclude=['*.b']",
        "min_dimensions=2",
        "rest=True",
    ):
        assert f", {part}" in text
    assert repr(GradientSync(Channel(DenseAllReduce()))).endswith("[]))")


def test_by_default_a_sync_cannot_join_others() -> None:
    with pytest.raises(ValueError, match="an optimizer of their own"):
        Plain().joining(ClipLocalNorm(), Momentum())
    assert Plain().objection(torch.optim.LBFGS([parameter(1)])) is None
    Plain().check([("a", parameter(1))])


MAKERS = [
    Plain,
    lambda **options: GradientSync(Channel(DenseAllReduce()), **options),
    lambda **options: DeltaSync(Channel(DenseAllReduce()), **options),
]


@pytest.mark.parametrize("make", MAKERS, ids=["Sync", "GradientSync", "DeltaSync"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"exclude": "*.bias"},
            TypeError,
            "exclude must be a list of patterns; got the string '*.bias'. Use ['*.bias'].",
        ),
        (
            {"parameters": "head"},
            TypeError,
            "parameters must be a list of patterns; got the string 'head'. Use ['head'].",
        ),
        ({"parameters": [1]}, TypeError, "parameters must be a list of patterns of parameter names; got [1]."),
        ({"exclude": None}, TypeError, "exclude must be a list of patterns of parameter names; got None."),
        *[
            (
                {"min_dimensions": given},
                ValueError,
                f"min_dimensions must be a whole number, 0 or more; got {given!r}. Use 2",
            )
            for given in ("2", -1, True)
        ],
        ({"rest": "no"}, TypeError, "rest must be True or False; got 'no'."),
    ],
)
def test_refuses(make: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make(**options)


def test_patterns_match_whole_names_and_case_matters() -> None:
    assert matches("layer.0.bias", ("x", "*.bias"))
    assert matches("layer.0.bias", ("layer.[01].*",))
    assert not matches("layer.0.bias", ("bias", "*.Bias"))
    assert not matches("layer.0.bias", ())
