"""What all recipes have in common."""

import ast
import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_sparsecomm import ParameterAveraging, methods
from lightning_sparsecomm.basis import ByLength
from lightning_sparsecomm.channel import Channel, MomentumCorrection
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, SketchedTopK
from lightning_sparsecomm.methods import (
    RECIPES,
    default,
    dense,
    dgc,
    federated_averaging,
    gradient_dropping,
    local_adam,
)
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method

SWITCHED: list[Callable[..., object]] = [
    *RECIPES.values(),
    functools.partial(GradientSync, Channel(DenseAllReduce())),
    functools.partial(DeltaSync, Channel(DenseAllReduce())),
    BlockReduce,
    SketchedTopK,
    MomentumCorrection,
    ParameterAveraging,
]


@pytest.mark.parametrize("make", SWITCHED)
def test_switches(make: Callable[..., object]) -> None:
    for name, parameter in inspect.signature(make).parameters.items():
        for given in ("no", 1, None) if parameter.annotation is bool else ():
            text = f"{name} must be True or False; got {given!r}. Leave it out for its default."
            with pytest.raises(TypeError, match=re.escape(text)):
                make(**{name: given})


@pytest.mark.parametrize("name", [name for name in methods.__all__ if name not in ("RECIPES", "default", "split")])
def test_a_recipe_is_a_method_that_can_be_copied_and_says_what_it_is(name: str) -> None:
    recipe: Any = getattr(methods, name)
    assert issubclass(recipe, Method)
    method = recipe()
    for duplicate in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert duplicate is not method
        assert repr(duplicate) == repr(method)


def test_names_of_strategies_are_those_of_recipes() -> None:
    assert RECIPES.keys() <= set(methods.__all__)
    assert all(getattr(methods, name) is recipe for name, recipe in RECIPES.items())


def test_the_default_is_dgc_then_local_adam_then_gradient_dropping() -> None:
    options: Any = {"scope": "balanced", "positions": "short"}
    summed: Any = {**options, "exchange": "all_reduce", "rest_bits": 8}
    density = ByLength(0.23, 0.88, least=0.002, most=0.58)
    assert repr(default().syncs) == repr(dgc(density, values="three_bit", **summed).syncs)
    adam, density = default().fallback, ByLength(0.45, 1.0, least=0.002, most=0.76)
    assert adam is not None
    assert repr(adam.syncs) == repr(local_adam(density, values="few_bits", **summed).syncs)
    assert repr(adam.fallback) == repr(gradient_dropping(ByLength(), values="bfloat16", **options))


@pytest.mark.parametrize(
    ("method", "call"),
    [
        (dgc(), "dgc(density=0.001)"),
        (dense(), "dense()"),
        (federated_averaging(), "federated_averaging(every=100)"),
        (dgc(density=0.01, exclude=[]), "dgc(density=0.01)"),
        (dgc(0.001, warmup_steps=5), "dgc(density=0.001, warmup_steps=5)"),
        (dgc(0.01).with_fallback(local_adam()), "dgc(density=0.01).with_fallback(local_adam(density=0.01))"),
        (copy.deepcopy(gradient_dropping(scope="tensor")), "gradient_dropping(density=0.01, scope='tensor')"),
    ],
)
def test_the_repr_of_a_recipe_is_its_call(method: Method, call: str) -> None:
    assert repr(method) == call


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.__name__)
def test_short_definitions(recipe: type[Method]) -> None:
    (definition,) = ast.parse(inspect.getsource(recipe)).body
    assert isinstance(definition, ast.ClassDef) and isinstance(definition.body[0], ast.Expr)
    lines = [*inspect.getsource(recipe).splitlines()]
    del lines[definition.body[0].lineno - 1 : definition.body[0].end_lineno]
    assert len([line for line in lines if line.strip()]) <= 25
