"""Digests of tensors, to compare them between ranks."""

import hashlib

import torch
from torch import Tensor


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's bits, in row-major order, whatever the memory format: 16 hexadecimal digits."""
    # As bytes, since NumPy lacks bfloat16.
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()
