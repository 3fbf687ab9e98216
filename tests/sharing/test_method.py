"""Each parameter belongs to exactly one sync of a method."""

import doctest
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import Golomb, SparseCodec, TopK
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Gather
from lightning_sparsecomm.methods import dense, dgc, gradient_dropping
from lightning_sparsecomm.sharing import Averaging, BucketSync, GradientSync, Method, method
from lightning_sparsecomm.sharing.gradients import NamedParameters, note_sparse_gradient


def sync(parameters: Sequence[str] = ("*",), rest: bool = False, sparse: bool = False) -> GradientSync:
    exchange = BlockReduce() if sparse else DenseAllReduce()
    return GradientSync(Channel(exchange), parameters=parameters, rest=rest, sparse=sparse)


def named() -> NamedParameters:
    return list(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).named_parameters())


def names(parameters: NamedParameters) -> list[str]:
    return [name for name, _ in parameters]


def test_rest_takes_what_nobody_claims() -> None:
    made = dgc(exclude=["1.*"])
    (first, sparse_names), (second, dense_names) = made.parts(named())
    assert names(sparse_names) == ["0.weight"]
    assert names(dense_names) == ["0.bias", "1.weight", "1.bias"]
    assert not first.rest
    assert second.rest
    # Nothing is left for the dense sync.
    assert len(dgc().parts(named()[:1])) == 1


def test_parts_keep_the_order_of_syncs_and_of_parameters() -> None:
    biases, weights = sync(["*.bias"]), sync(["*.weight"])
    assert [(each, names(piece)) for each, piece in Method([biases, weights]).parts(named())] == [
        (biases, ["0.bias", "1.bias"]),
        (weights, ["0.weight", "1.weight"]),
    ]


def test_a_method_takes_what_a_sync_claims_or_the_rest_may_have() -> None:
    weight, table = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    note_sparse_gradient(table)
    assert Method([sync(["a"])]).takes("a", weight)
    assert not Method([sync(["a"])]).takes("b", weight)
    assert Method([sync(["a"]), sync(rest=True)]).takes("b", weight)
    assert not Method([sync(rest=True)]).takes("b", table)
    assert Method([sync(rest=True), sync(sparse=True)]).takes("b", table)


def test_a_repr_says_what_is_not_default() -> None:
    assert repr(Method([sync()])) == f"Method({[sync()]!r})"
    made = Method([sync()], Averaging(3), fallback=gradient_dropping())
    assert ", averaging=Averaging(every=3" in repr(made)
    assert ", fallback=gradient_dropping(" in repr(made) or ", fallback=Method(" in repr(made)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Method([]), "syncs must name at least one sync; got none. Use dense() to send everything."),
        (
            lambda: Method([BucketSync(), sync(["head.*"])]),
            "a BucketSync must be the only sync of a method, since DDP's buckets hold all parameters; got 2",
        ),
        (
            lambda: Method([sync(rest=True)] * 2),
            "only one sync of a method can take the rest; got several with rest=True.",
        ),
        (lambda: Method(dgc().syncs, fallback=dense()), "fallback must be None with a BucketSync"),
        (lambda: Method(dense().syncs, fallback=dgc()), "fallback must be None with a BucketSync"),
    ],
)
def test_refuses(make: Callable[[], Method], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Method([sync()], averaging=500), "averaging must be an Averaging; got 500. Use Averaging(every=500)"),  # type: ignore[arg-type]
        (lambda: Method([sync()], fallback="dgc"), "fallback must be a Method; got 'dgc'."),  # type: ignore[arg-type]
        (lambda: Gather(TopK(0.1)), "compressor must be a Compressor; got TopK(density=0.1"),  # type: ignore[arg-type]
        (lambda: SparseCodec(TopK), "selector must be an object of a class derived from Selector; got <class"),  # type: ignore[arg-type]
        (lambda: SparseCodec(TopK(0.1), indices=Golomb), "indices must be an object of a class derived from Index"),  # type: ignore[arg-type]
    ],
)
def test_parts_of_the_wrong_kind_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        make()


def test_several_may_take_the_rest_within_different_limits() -> None:
    made = Method([sync(rest=True).limited(inside=["0.*"]), sync(rest=True).limited(outside=["0.*"])])
    assert [names(piece) for _, piece in made.parts(named())] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


def test_docstring() -> None:
    results = doctest.testmod(method, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted >= 4
