"""Refusals that need no training; those in one are in tests/run/test_registry.py and tests/distributed."""

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import default, dense, dgc, sbc, split
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.refusals import (
    listed,
    refuse_moved_by_others,
    refuse_renormalizing,
    refuse_strangers,
    refuse_unannounced,
)
from lightning_sparsecomm.sharing import Method


def test_a_gradient_that_no_backward_pass_announced() -> None:
    layer = nn.Linear(2, 1)
    named = list(layer.named_parameters())
    refuse_unannounced(named, [])
    layer.bias.grad = torch.ones(1)
    refuse_unannounced(named, [id(layer.bias)])
    with pytest.raises(
        ValueError, match=r"parameter 'bias' has a gradient, but required none .* set its \.grad to None"
    ):
        refuse_unannounced(named, [id(layer.weight)])


def test_a_parameter_of_no_module_and_one_of_two_optimizers() -> None:
    layer = nn.Linear(2, 1)
    refuse_strangers([])
    with pytest.raises(
        ValueError, match=r"1 parameter\(s\) that the model lacks, of shapes \(1, 2\): .* part of the model"
    ):
        refuse_strangers([layer.weight])
    refuse_moved_by_others(list(layer.named_parameters()), [])
    with pytest.raises(ValueError, match=r"parameter 'bias' belongs to two optimizers.*Give it to one optimizer"):
        refuse_moved_by_others(list(layer.named_parameters()), [id(layer.bias)])


def test_weights_that_share_memory() -> None:
    layer = nn.Linear(3, 3)
    flat = torch.zeros(7)
    apart = [("first", nn.Parameter(flat[:3])), ("second", nn.Parameter(flat[3:7])), ("none", nn.Parameter(flat[:0]))]
    refuse_moved_by_others(apart, [])
    transposed = nn.Parameter(layer.weight.detach().t())
    columns = [(f"column {at}", nn.Parameter(part.t())) for at, part in enumerate(torch.zeros(4, 6).split(2, 1))]
    refuse_moved_by_others(columns, [])
    with pytest.raises(ValueError, match=r"parameters '(there|back)' and '(there|back)' must not share memory"):
        refuse_moved_by_others([("there", layer.weight), ("bias", layer.bias), ("back", transposed)], [])
    with pytest.raises(ValueError, match="parameters 'all' and 'last' must not share memory"):
        refuse_moved_by_others([("last", nn.Parameter(flat[6:])), ("all", nn.Parameter(flat))], [])


@pytest.mark.parametrize(
    ("method", "refused"), [(dgc(), True), (default(), True), (dense(), True), (sbc(), False)], ids=repr
)
def test_embeddings_that_rescale_their_rows(method: Method, refused: bool) -> None:
    bags = nn.EmbeddingBag(3, 2, max_norm=2.0)
    if refused:
        with pytest.raises(ValueError, match=r"max_norm of 'bags' must be None .* got 2.0.*renorm_\(2, 0, 2.0\)"):
            refuse_renormalizing([method], "bags", bags)
    else:
        refuse_renormalizing([method], "bags", bags)
    refuse_renormalizing([split(["bags.*"], sbc(), dgc())], "bags", bags)
    refuse_renormalizing([method], "words", nn.Embedding(3, 2))
    bags.weight.requires_grad_(False)
    refuse_renormalizing([method], "bags", bags)


def test_one_rank_may_rescale_rows(wire: Wire) -> None:
    engine = Engine(dgc(), wire)
    engine.registry.add_module(nn.Embedding(3, 2, max_norm=2.0))
    engine.close()


def test_long_lists_are_shortened() -> None:
    assert listed([1, 2], most=2) == "1, 2"
    assert listed([1, 2, 3], most=2) == "1, 2, … (3 in all)"
