"""Two methods for two parts of a model."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.methods import auto, default, dense, dgc, gradient_dropping, s2_reducer, split
from lightning_sparsecomm.sharing import Averaging


def test_each_parameter_goes_to_the_method_of_its_part() -> None:
    module = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "body": nn.Linear(2, 2)})
    method = split(["embedding.*"], s2_reducer(), dgc())
    found = {name: sync for sync, piece in method.parts(list(module.named_parameters())) for name, _ in piece}
    assert found.keys() == {"embedding.weight", "body.weight", "body.bias"}
    assert found["embedding.weight"].inside == (("embedding.*",),)
    assert found["body.weight"].outside == found["body.bias"].outside == ("embedding.*",)
    assert found["body.weight"] is not found["body.bias"]


def test_a_method_in_ddps_buckets_works_at_the_step_instead() -> None:
    module = nn.Linear(2, 2)
    method = split(["bias"], dense("float16"), gradient_dropping())
    (sync, piece), _ = method.parts(list(module.named_parameters()))
    assert [name for name, _ in piece] == ["bias"]
    assert "DenseAllReduce(wire_dtype='float16')" in repr(sync)


def test_averages_are_those_of_the_one_that_has_some() -> None:
    drifting = gradient_dropping(local="partial", average_every=7)
    assert split(["a"], drifting, dgc()).averaging == split(["a"], dgc(), drifting).averaging == Averaging(7)
    assert split(["a"], dgc(), dgc()).averaging is None
    with pytest.raises(ValueError, match=r"both average all parameters.*average_every=None"):
        split(["a"], drifting, drifting)


def test_splits_nest() -> None:
    method = split(["a.*"], split(["a.b"], dgc(), gradient_dropping()), dgc())
    names = ("a.b", "a.c", "d")
    parts = method.parts([(name, nn.Parameter(torch.zeros(2, 2))) for name in names])
    assert [[name for name, _ in piece] for _, piece in parts] == [["a.b"], ["a.c"], ["d"]]
    assert [sync.channel.exchange for sync, _ in parts] == [method.syncs[index].channel.exchange for index in (0, 2, 3)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("parameters", ["embedding.*", [], [1], None])
def test_parameters_must_be_a_list_of_patterns(parameters: Any) -> None:
    text = rf"parameters must be a list of .*patterns of names.*; got {re.escape(repr(parameters))}\."
    with pytest.raises(TypeError, match=text):
        split(parameters, dgc(), dgc())


@pytest.mark.parametrize("option", ["method", "rest"])
def test_both_must_be_methods_for_all_optimizers(option: str) -> None:
    with pytest.raises(TypeError, match=rf"{option} must be a Method, such as methods.dgc\(\); got 'dgc'"):
        split(["a"], **{"method": dgc(), "rest": dgc(), option: "dgc"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{option} must not be auto\(\), which chooses for the whole model"):
        split(["a"], **{"method": dgc(), "rest": dgc(), option: auto()})  # type: ignore[arg-type]
    text = rf"{option} must be one method for all .*; got dgc with another .* Use methods.dgc\(\) for SGD"
    with pytest.raises(ValueError, match=text):
        split(["a"], **{"method": dgc(), "rest": dgc(), option: default()})
