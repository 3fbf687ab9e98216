"""The strategy as an object: what it refuses, by which names it goes, and what it says without torchft."""

import importlib
import pickle
import sys
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.torch_version import TorchVersion

import lightning_sparsecomm
from lightning_sparsecomm import methods
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.frontends.elastic import LIGHTHOUSE, ElasticTrainerMixin
from lightning_sparsecomm.sharing import DeltaSync, GradientSync, Method
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy
from tests.elastic.replicas import needs_torchft

TRAINERS = ["pytorch_lightning", "lightning.pytorch"]


def trainer_of(package: str, strategy: Any) -> Any:
    return importlib.import_module(package).Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)


@needs_torchft
@pytest.mark.parametrize("package", TRAINERS)
def test_names(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").ElasticSparseCommStrategy
    registered = trainer_of(package, "sparsecomm_elastic").strategy
    assert type(registered) is own
    assert repr(registered.method) == repr(methods.sparse_loco())
    # Where both packages are installed, the top level has a name for the strategies of both.
    monkeypatch.delitem(sys.modules, "pytorch_lightning.cli", raising=False)
    monkeypatch.delitem(sys.modules, "lightning.pytorch.cli", raising=False)
    either = lightning_sparsecomm.ElasticSparseCommStrategy(methods.diloco(every=7), replica="a")
    made = trainer_of(package, either).strategy
    assert type(made) is own
    assert (repr(made.method), made.replica) == (repr(methods.diloco(every=7)), "a")
    assert either.replica == "a"
    assert repr(either) == "ElasticSparseCommStrategy(method=diloco(every=7), seed=0, replica='a')"
    assert repr(pickle.loads(pickle.dumps(either))) == repr(either)


@needs_torchft
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (methods.dense(), "not in DDP's buckets"),
        (methods.auto(), "not in DDP's buckets"),
        (methods.ef21(), "must not keep a mean estimate"),
        (methods.gradient_dropping(local="sum"), "gradients that are equal on all replicas"),
        (methods.default(delay=1), "delay must be 0 for gradients"),
        (methods.default(every=2), "every must be 1 for gradients"),
        (methods.dgc(residual_in_weights=True), "gradients that are equal on all replicas"),
        (
            Method(
                [
                    DeltaSync(Channel(DenseAllReduce()), every=9, delay=3, exclude=["*.bias"]),
                    DeltaSync(Channel(DenseAllReduce()), every=9, parameters=["*.bias"]),
                ]
            ),
            r"delay must be the same for all parameters .* got \[0, 3\]. Use delay=3",
        ),
        (
            Method(
                [
                    DeltaSync(Channel(DenseAllReduce()), every=9, delay=3, exclude=["*.bias"]),
                    DeltaSync(Channel(DenseAllReduce()), every=8, delay=3, parameters=["*.bias"]),
                ]
            ),
            "every must be the same for all parameters with a delay .* got 8 and 9. Use every=9 for all, or delay=0",
        ),
        (
            methods.dgc().with_fallback(methods.dgc().with_fallback(methods.gradient_dropping(local="sum"))),
            "gradients that are equal on all replicas",
        ),
        (
            Method([DeltaSync(Channel(DenseAllReduce()), exclude=["*.bias"]), GradientSync(Channel(DenseAllReduce()))]),
            "method must exchange either weights or gradients",
        ),
    ],
    ids=lambda each: repr(each)[:30],
)
def test_methods_that_need_all_ranks_are_refused(method: Method, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ElasticSparseCommStrategy(method)


@needs_torchft
def test_weights_may_be_exchanged_in_flight() -> None:
    method = methods.sparse_loco(every=9, fragments=2, delay=3)
    assert ElasticSparseCommStrategy(method).method is method


@needs_torchft
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": methods.dgc(), "adapt_steps": True}, ValueError, "adapt_steps must be False where gradients"),
        (
            {"method": methods.diloco(every=9, delay=3), "adapt_steps": True},
            ValueError,
            "adapt_steps must be False with delay, .* got delay=3",
        ),
        ({"membership_log": "nowhere/log.jsonl"}, ValueError, "membership_log must be a file in a folder that exists"),
        ({"membership_log": "."}, ValueError, "membership_log must be a file; got '.', which is a folder"),
        ({"local_state_dir": "nowhere", "replica": "a"}, ValueError, "local_state_dir must be a folder that exists"),
        ({"local_state_dir": "."}, ValueError, "replica must be given with local_state_dir"),
        ({"local_state_dir": ".", "replica": "字" * 29}, ValueError, "replica must be a name that a file"),
        ({"local_state_dir": ".", "replica": "\ud800"}, ValueError, "replica must be a name that a file"),
        ({"local_state_dir": ".", "replica": ""}, ValueError, "replica must be a name that a file"),
        (
            {"local_state_dir": ".", "replica": "a", "method": methods.dgc()},
            ValueError,
            "local_state_dir must be None with a method that exchanges gradients",
        ),
        ({"log_each_replica": "no"}, TypeError, "log_each_replica must be True or False; got 'no'"),
        ({"uneven_inputs": True}, ValueError, "uneven_inputs must be False"),
        ({"exchange_timeout": timedelta(0)}, ValueError, "exchange_timeout must be a positive timedelta"),
        ({"patience": 60}, ValueError, "patience must be a positive timedelta; got 60"),
        (
            {"lighthous": "x"},
            TypeError,
            "ElasticSparseCommStrategy has no option 'lighthous'. Did you mean 'lighthouse'",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ElasticSparseCommStrategy(**options)


@needs_torchft
def test_a_fit_without_a_lighthouse_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    strategy = ElasticSparseCommStrategy()
    with pytest.raises(ValueError, match=r"lighthouse must be the address that `sparsecomm lighthouse` has printed"):
        strategy._lighthouse()
    monkeypatch.setenv(LIGHTHOUSE, "http://host:29510")
    assert strategy._lighthouse() == "http://host:29510"


def test_older_versions_of_torch_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them, no quorum would ever form: torchft sets an option that their Gloo lacks."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1+cpu"))
    with pytest.raises(ImportError, match=r"need torch 2.8 or newer, for torchft; got 2.7.1"):
        ElasticSparseCommStrategy()


def test_without_torchft_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where it is not installed: importing it raises.
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.0"))
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-sparsecomm\[elastic\]'"):
        ElasticSparseCommStrategy()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-sparsecomm\[elastic\]'"):
        trainer_of("pytorch_lightning", "sparsecomm_elastic")
    # All else works.
    assert isinstance(pl.Trainer(accelerator="cpu", devices=1, strategy="sparsecomm_diloco").strategy.method, Method)


def test_importing_the_package_does_not_import_torchft() -> None:
    names = [name for name, module in sys.modules.items() if name.startswith("lightning_sparsecomm") and module]
    assert names
    assert all("torchft" not in vars(sys.modules[name]) for name in names)
    assert issubclass(ElasticSparseCommStrategy, ElasticTrainerMixin)


@needs_torchft
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "dgc"}, r"method must be a Method.*got 'dgc'. Did you mean lightning_sparsecomm.methods.dgc\(\)"),
        ({"lighthouse": 5}, "lighthouse must be a text; got 5"),
        ({"replica": 5}, "replica must be a text; got 5"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_at_construction(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ElasticSparseCommStrategy(**arguments)
