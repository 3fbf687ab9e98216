"""Which way costs least, by what all ranks know."""

import re

import pytest
import torch

from lightning_sparsecomm.basis import Layout, Round
from lightning_sparsecomm.codecs import Auto, Float16, RunLength16, SparseCodec, TopK, TwoBit
from lightning_sparsecomm.exchange import Sparse

MILLIONS = Round(Layout([("weight", (10_000_000,))]))


def _way(exchange: Sparse, world_size: int, context: Round = MILLIONS, far: float = 0.0) -> str:
    return exchange.way(context, world_size, far)


def test_few_ranks_gather_and_many_add_up_in_regions() -> None:
    exchange = Sparse(SparseCodec(TopK(0.01)))
    assert [_way(exchange, ranks) for ranks in (1, 2, 4, 16, 64, 1024)] == ["gather"] * 3 + ["regions"] * 3


def test_where_ranks_select_the_same_fewer_are_enough() -> None:
    exchange = Sparse(SparseCodec(TopK(0.01)))
    exchange.load_state_dict({"positions": torch.tensor(1.1, dtype=torch.float64)})
    assert [_way(exchange, ranks) for ranks in (2, 4)] == ["gather", "regions"]
    apart = Sparse(SparseCodec(TopK(0.001)))
    assert _way(apart, 16) == "regions"
    apart.load_state_dict({"positions": torch.tensor(16.0, dtype=torch.float64)})
    assert _way(apart, 16) == "gather"


def test_wide_values_cost_twice_as_much_in_each_way() -> None:
    """As a sum of the whole vector too, which is what a gather of a quarter becomes with eight ranks."""
    wide = Round(Layout([("weight", (10_000_000,))]), dtype=torch.float64)
    exchange = Sparse(SparseCodec(TopK(0.25), indices=RunLength16()))
    assert [_way(exchange, 8, each) for each in (MILLIONS, wide)] == ["regions", "regions"]


def test_small_messages_are_gathered_over_long_ways() -> None:
    """Three more round trips take longer than the bytes that they save."""
    exchange, small = Sparse(SparseCodec(TopK(0.01))), Round(Layout([("weight", (100_000,))]))
    assert _way(exchange, 16, small, far=0.128) == "gather"
    assert _way(exchange, 16, MILLIONS, far=0.128) == "regions"
    assert _way(exchange, 16, Round(Layout([("weight", (10,))]))) == "gather"


def test_values_that_are_rounded_together_are_gathered() -> None:
    together = SparseCodec(TopK(0.01), TwoBit(), Auto())
    assert _way(Sparse(together), 1024) == "gather"
    with pytest.raises(ValueError, match=r"ways must have 'gather' for values that are rounded together.*TwoBit"):
        Sparse(together, ways=["regions"])
    assert _way(Sparse(SparseCodec(TopK(0.01), Float16(), Auto())), 1024) == "regions"


def test_a_user_can_name_the_way() -> None:
    codec = SparseCodec(TopK(0.01))
    assert _way(Sparse(codec, ways=["gather"]), 1024) == "gather"
    assert _way(Sparse(codec, ways=["regions"]), 2) == "regions"
    assert repr(Sparse(codec, ways=["regions"])).endswith("ways=('regions',))")
    with pytest.raises(ValueError, match=re.escape("ways must be one of gather, regions; got 'tree'")):
        Sparse(codec, ways=["tree"])  # type: ignore[list-item]
    for wrong in ([], "gather", None):
        with pytest.raises(ValueError, match="ways must have one way or more; got"):
            Sparse(codec, ways=wrong)  # type: ignore[arg-type]
