"""Digests tell tensors apart by their bits, and not by how they lie in memory."""

import torch

from lightning_sparsecomm.basis.digests import digest_of


def test_weights_are_compared_by_their_bits() -> None:
    x = torch.randn(2, 3, 2, 2)
    turned = x.contiguous(memory_format=torch.channels_last)
    half = x.bfloat16()
    digests = [digest_of(tensor) for tensor in (x, turned, -x * 0, x * 0, half)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
