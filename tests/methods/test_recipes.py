"""What all recipes have in common."""

import ast
import copy
import functools
import inspect
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from lightning_sparsecomm import ParameterAveraging, methods
from lightning_sparsecomm.basis import ByLength
from lightning_sparsecomm.basis.parts import parts_in
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
    quantized,
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


def test_the_default_is_dgc_then_local_adam_then_all_in_8_bits() -> None:
    options: Any = {"scope": "balanced", "positions": "short"}
    summed: Any = {**options, "exchange": "all_reduce", "rest_bits": 8, "few_rows": True}
    density = ByLength(0.212, 0.88, least=0.002, most=0.58)
    assert repr(default().syncs) == repr(dgc(density, values="three_bit", **summed).syncs)
    adam, density = default().fallback, ByLength(0.45, 1.0, least=0.002, most=0.74)
    assert adam is not None
    assert repr(adam.syncs) == repr(local_adam(density, values="few_bits", **summed).syncs)
    for method in (default(), default(delay=1), default(every=2), *(default().for_run(n, 4) for n in (300, 9e9))):
        assert repr(method.chain[2].syncs) == repr(quantized(8, few_rows=True).syncs)


def _bits(density: float, adam: bool) -> float:
    """Of each element: its position by the entropy, or in a bitmap; and its value."""
    position = 1.0 if density >= 0.5 else -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    return position + density * ((2.5 if density > 0.6 else 1.125) if adam else 3.25)


@pytest.mark.parametrize(
    ("adam", "steps", "every"),
    [(False, 1000, 2), (False, 2000, 3), (False, 4000, 4), (True, 1000, 2), (True, 2000, 2), (True, 4000, 2)],
)
def test_with_local_steps_the_default_sends_about_as_many_bits(adam: bool, steps: int, every: int) -> None:
    def density(method: Method) -> float:
        found = method.fallback if adam else method
        assert found is not None
        return next(parts_in(list(found.syncs), ByLength)).for_length(steps)

    seldom, often = _bits(density(default(every=every)), adam) / every, _bits(density(default()), adam)
    assert 3 / 4 < seldom / often < 8 / 7


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
