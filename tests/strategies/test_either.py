"""A strategy for any Lightning package: the Trainer or Fabric that is given it makes its own."""

import copy
import gc
import importlib
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_sparsecomm.methods import gradient_dropping
from lightning_sparsecomm.strategies.either import ElasticSparseCommStrategy, SparseCommStrategy

PACKAGES = ["pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"]


def made_by(package: str, strategy: Any) -> Any:
    module = importlib.import_module(package)
    make = module.Fabric if package in PACKAGES[2:] else module.Trainer
    return make(accelerator="cpu", devices=2, strategy=strategy).strategy


@pytest.mark.parametrize("package", PACKAGES)
def test_whoever_is_given_it_makes_its_own(package: str) -> None:
    either = SparseCommStrategy(gradient_dropping(0.25), seed=3, check_replicas_every=7, start_method="fork")
    made = made_by(package, either)
    assert type(made) is importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    assert repr(made.method) == repr(gradient_dropping(0.25))
    assert (made.seed, made.check_replicas_every, made._start_method) == (3, 7, "fork")
    # The user's object stands for what was made.
    assert either.method is made.method
    assert either.ledger is None
    assert isinstance(made, SparseCommStrategy)


def test_the_last_to_be_given_it_is_meant() -> None:
    either = SparseCommStrategy(start_method="fork")
    first, second = (made_by(package, either) for package in PACKAGES[:2])
    assert first is not second
    assert either.method is second.method


def test_two_objects_are_two_strategies() -> None:
    first, second = (SparseCommStrategy(seed=seed, start_method="fork") for seed in (1, 2))
    assert first != second
    assert [made_by("pytorch_lightning", each).seed for each in (first, second, first)] == [1, 2, 1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies(duplicate: Callable[[Any], Any]) -> None:
    either = SparseCommStrategy(gradient_dropping(0.25), seed=3, start_method="fork")
    twin = duplicate(either)
    assert twin != either
    assert repr(twin) == repr(either)
    made = made_by("lightning.pytorch", twin)
    assert (made.seed, repr(made.method)) == (3, repr(gradient_dropping(0.25)))


def test_a_repr_says_what_was_given() -> None:
    assert repr(SparseCommStrategy()) == "SparseCommStrategy(seed=0, check_replicas_every=1000)"
    assert "uneven_inputs=True" in repr(SparseCommStrategy(uneven_inputs=True))
    assert repr(SparseCommStrategy(gradient_dropping(), 3)) == (
        "SparseCommStrategy(method=gradient_dropping(density=0.01), seed=3, check_replicas_every=1000)"
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"method": "dgc"}, TypeError, "Did you mean lightning_sparsecomm.methods.dgc()?"),
        ({"seed": 1.5}, TypeError, "seed must be a whole number"),
        ({"check_replicas_every": 0}, ValueError, "check_replicas_every must be a whole number"),
        ({"ddp_comm_hook": fp16_compress_hook}, ValueError, "ddp_comm_hook cannot be combined with a method"),
        *[
            ({name: "x"}, TypeError, f"{name} can only be given to the strategy of one Lightning package")
            for name in ("accelerator", "parallel_devices", "precision", "precision_plugin")
        ],
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        SparseCommStrategy(**options)


def test_it_cannot_be_subclassed() -> None:
    with pytest.raises(TypeError, match=r"cannot be subclassed.*lightning_sparsecomm.strategies.pytorch_lightning"):

        class Own(SparseCommStrategy):  # type: ignore[misc]
            pass


def test_other_strategies_are_not_taken_for_it() -> None:
    assert not isinstance(pl.strategies.DDPStrategy(), SparseCommStrategy)
    assert not isinstance("ddp", SparseCommStrategy)


def test_replicas_that_come_and_go_are_told_from_others() -> None:
    module = importlib.import_module("lightning_sparsecomm.strategies.pytorch_lightning")
    plain = module.SparseCommStrategy()
    # Without torchft, none can be constructed.
    elastic = module.ElasticSparseCommStrategy.__new__(module.ElasticSparseCommStrategy)
    assert isinstance(plain, SparseCommStrategy)
    assert isinstance(elastic, SparseCommStrategy)
    assert isinstance(elastic, ElasticSparseCommStrategy)
    assert not isinstance(plain, ElasticSparseCommStrategy)


def test_it_keeps_nothing_alive() -> None:
    """Lightning's registries live as long as the process."""
    either = SparseCommStrategy(start_method="fork")
    name, made = str(either), weakref.ref(made_by("pytorch_lightning", either))
    gc.collect()
    assert made() is None
    assert name in pl.strategies.StrategyRegistry
    del either
    gc.collect()
    assert name not in pl.strategies.StrategyRegistry


def test_before_a_trainer_has_it_it_tells_its_arguments() -> None:
    either = SparseCommStrategy(gradient_dropping(0.25), seed=3)
    assert (either.seed, either.check_replicas_every, either.ledger) == (3, 1000, None)
    assert repr(either.method) == repr(gradient_dropping(0.25))
    with pytest.raises(AttributeError, match="no Trainer or Fabric has been given"):
        _ = either.root_device


def test_options_that_users_look_up_are_in_the_signature() -> None:
    assert {"method", "seed", "nodes", "uneven_inputs"} <= inspect.signature(SparseCommStrategy).parameters.keys()
