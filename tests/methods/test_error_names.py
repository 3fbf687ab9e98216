"""Errors of a recipe name the recipe's own parameters, not those of the parts that it passes them to."""

from collections.abc import Callable

import pytest

from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.methods import dgc, gradient_dropping, parallax, s2_reducer, sketched_sgd, strom
from lightning_sparsecomm.sharing import Method

CASES: list[tuple[Callable[[], Method], type[Exception], str]] = [
    (
        lambda: sketched_sgd(sketch_dtype="x"),
        ValueError,
        "sketch_dtype must be one of same, float16, bfloat16; got 'x'",
    ),
    (lambda: sketched_sgd(clip=0), ValueError, "clip must be a positive number"),
    (lambda: sketched_sgd(density=2), ValueError, "density must be in (0, 1]"),
    (lambda: sketched_sgd(rows=0), ValueError, "rows must be"),
    (lambda: s2_reducer(block_density=2), ValueError, "block_density must be in (0, 1]"),
    (lambda: s2_reducer(block_density="x"), TypeError, "block_density must be a number in (0, 1] or a Schedule"),
    (lambda: s2_reducer(block_density=Stages([0.1, 2], steps=[0, 5])), ValueError, "block_density must be in (0, 1]"),
    (lambda: s2_reducer(block_size=0), ValueError, "block_size must be a whole number, at least 1"),
    (lambda: s2_reducer(sparse_below=2), ValueError, "sparse_below must be in [0, 1]"),
    (lambda: s2_reducer(sketch_ratio=-1), ValueError, "sketch_ratio must be a positive number"),
    (lambda: dgc(clip=-1), ValueError, "clip must be a positive number: the largest norm of the averaged gradient"),
    (lambda: dgc(clip="x"), ValueError, "clip must be a positive number"),
    (lambda: gradient_dropping(average_every=0), ValueError, "average_every must be a whole number of optimizer steps"),
    (lambda: gradient_dropping(average_every=True), ValueError, "average_every must be a whole number"),
    (lambda: strom(threshold=1e-50), ValueError, "threshold must be within float32's range, in which it is sent"),
    (lambda: parallax(tables="words.*"), TypeError, "tables must be a list of patterns; got the string 'words.*'"),
]


@pytest.mark.parametrize(("make", "error", "beginning"), CASES, ids=[beginning for _, _, beginning in CASES])
def test_errors_begin_with_the_recipes_parameter(
    make: Callable[[], Method], error: type[Exception], beginning: str
) -> None:
    with pytest.raises(error) as raised:
        make()
    assert type(raised.value) is error
    assert str(raised.value).startswith(beginning)
