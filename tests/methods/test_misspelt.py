"""What is misspelt is refused at once, with the name that it is nearest to."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import lightning_sparsecomm
from lightning_sparsecomm import SparseCommStrategy, methods
from lightning_sparsecomm.strategies import lightning_fabric, pytorch_lightning

MISSPELT: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "method": (
        lambda: methods.dcg,
        AttributeError,
        "'lightning_sparsecomm.methods' has no method 'dcg'. Did you mean 'dgc'?",
    ),
    "nothing near": (lambda: methods.zzz, AttributeError, "has no method 'zzz'."),
    "class": (
        lambda: lightning_sparsecomm.CompressionMonitr,  # type: ignore[attr-defined]
        AttributeError,
        "has no attribute 'CompressionMonitr'. Did you mean 'CompressionMonitor'?",
    ),
    "strategy": (
        lambda: lightning_sparsecomm.SparseComStrategy,  # type: ignore[attr-defined]
        AttributeError,
        "has no attribute 'SparseComStrategy'. Did you mean 'SparseCommStrategy'?",
    ),
    "way to start processes": (
        lambda: SparseCommStrategy(start_method="forkk"),
        ValueError,
        # Python 3.14 lists them in another order.
        "; got 'forkk'. Did you mean 'fork'? Leave it out for popen, which starts the script again.",
    ),
    "value of an option": (
        lambda: methods.dgc(positions="shrt"),  # type: ignore[arg-type]
        ValueError,
        "positions must be one of fast, short; got 'shrt'. Did you mean 'short'?",
    ),
    "ranking": (
        lambda: methods.dgc(scope="ballanced"),  # type: ignore[arg-type]
        ValueError,
        "scope must be one of model, tensor, balanced, norm, entropy; got 'ballanced'. Did you mean 'balanced'?",
    ),
    "dtype": (
        lambda: methods.dense("bfloat"),  # type: ignore[arg-type]
        ValueError,
        "wire_dtype must be one of same, float32, float16, bfloat16; got 'bfloat'. Did you mean 'bfloat16'?",
    ),
    "option of a method": (
        lambda: methods.sbc(densty=0.1),  # type: ignore[call-arg]
        TypeError,
        "sbc has no option 'densty'. Did you mean 'density'? Its options: density, ",
    ),
    "method by name": (
        lambda: SparseCommStrategy("dcg"),  # type: ignore[arg-type]
        TypeError,
        "got 'dcg'. Did you mean lightning_sparsecomm.methods.dgc()?",
    ),
    "method by the strategy's name": (
        lambda: SparseCommStrategy("sparsecomm_local_adm"),  # type: ignore[arg-type]
        TypeError,
        "Did you mean lightning_sparsecomm.methods.local_adam()?",
    ),
    **{
        f"option of the strategy of {module.__name__}": (
            lambda module=module: module.SparseCommStrategy(find_unused_parameter=True),  # type: ignore[misc]
            TypeError,
            "SparseCommStrategy has no option 'find_unused_parameter'. Did you mean 'find_unused_parameters'?",
        )
        for module in (pytorch_lightning, lightning_fabric)
    },
    "two warm-ups": (
        lambda: methods.dgc(warmup_steps=5, warmup_epochs=1),
        ValueError,
        "warmup_steps and warmup_epochs both say how long the warm-up is; got 5 and 1. Give one of them.",
    ),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_refused_with_the_nearest_name(name: str) -> None:
    make, error, message = MISSPELT[name]
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_a_recipe_may_take_any_options() -> None:
    class denser(methods.gradient_dropping):  # noqa: N801
        def __init__(self, **options: Any) -> None:
            super().__init__(**{"density": 0.5, **options})

    assert "Float16" in str(denser(values="float16").syncs)
    assert repr(denser(values="float16")) == "denser(values='float16')"
    with pytest.raises(TypeError, match="'value'"):
        denser(value="float16")


def test_warm_ups() -> None:
    """1,000 steps, unless it is given otherwise."""
    (default,) = {str(methods.dgc().syncs), str(methods.dgc(warmup_steps=1000).syncs)}
    assert "steps=1000" in default
    assert "epochs=4" in str(methods.dgc(warmup_epochs=4).syncs)
    assert {str(methods.dgc(warmup_epochs=0).syncs)} == {str(methods.dgc(warmup_steps=0).syncs)}
