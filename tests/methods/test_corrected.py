"""The syncs of methods that take over momentum: both dgc and sketched_sgd are made of them."""

from typing import Any

import pytest

from lightning_sparsecomm.channel import ClipLocalNorm, ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.methods import dgc, sketched_sgd
from lightning_sparsecomm.methods.corrected import corrected
from lightning_sparsecomm.sharing import GradientSync

KINDS: dict[bool, Any] = {
    True: ([ClipLocalNorm, MomentumCorrection, ErrorFeedback], [ClipLocalNorm, Momentum]),
    False: ([ClipLocalNorm, ErrorFeedback], [ClipLocalNorm]),
}


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("masking", [True, False])
def test_momentum_is_applied_once_and_masked_once(correction: bool, masking: bool) -> None:
    sparse, dense = corrected(DenseAllReduce(), 2.0, correction, masking, ["head.*"], True)
    assert isinstance(sparse, GradientSync)
    assert isinstance(dense, GradientSync)
    for sync, kinds in zip((sparse, dense), KINDS[correction], strict=True):
        assert [type(memory) for memory in sync.channel.memories] == kinds
        (clip,) = (memory for memory in sync.channel.memories if isinstance(memory, ClipLocalNorm))
        assert clip.max_norm == 2.0
    masks = [memory.mask for memory in sparse.channel.memories if isinstance(memory, MomentumCorrection)]
    assert masks == [masking] * correction
    assert sparse.mask_momentum == (masking and not correction)
    assert (sparse.min_dimensions, sparse.exclude, dense.rest) == (2, ("head.*",), True)


@pytest.mark.parametrize("recipe", [dgc, sketched_sgd])
@pytest.mark.parametrize("clip", [0, -1, "1", True])
def test_the_recipes_name_their_own_parameter(recipe: Any, clip: Any) -> None:
    with pytest.raises(ValueError, match=rf"^clip must be a positive number.*got {clip!r}\."):
        recipe(clip=clip)
